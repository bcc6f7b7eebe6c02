#include "model/tensor_reader.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.hpp"
#include "core/parallel.hpp"
#include "io/packing.hpp"
#include "kernels/grid.hpp"

namespace shardq {

namespace {

/// Large enough that a file system is busy with one request, small enough that one layer gives every thread some.
constexpr int64_t kPieceBytes = int64_t{4} << 20;

/// Scratch of the calling thread, kept for its next pieces.
enum class Scratch { stored, turned, count };
std::span<std::byte> scratch(Scratch which, int64_t bytes) {
  thread_local std::array<std::vector<std::byte>, static_cast<size_t>(Scratch::count)> buffers;
  std::vector<std::byte>& buffer = buffers[static_cast<size_t>(which)];
  if (static_cast<int64_t>(buffer.size()) < bytes) buffer = std::vector<std::byte>(bytes);
  return std::span(buffer).first(bytes);
}

/// Elements in one unit of the item's range.
int64_t width_of(const ReadItem& item) {
  return item.linear ? item.linear->cols : 1;
}

/// "[e, i, j]" of a flat index.
std::string position_in(const Shape& shape, int64_t flat) {
  Shape index(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    index[axis] = flat % shape[axis];
    flat /= shape[axis];
  }
  return to_string(index);
}

/// target[r][c] = source[c][r] for elements of `size` bytes.
void transpose(const std::byte* source, int64_t source_stride, int64_t rows, int64_t cols, int64_t size,
               std::byte* target) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      std::memcpy(target + (r * cols + c) * size, source + (c * source_stride + r) * size, size);
}

/// The one number of bits for which `cols` codes fill `words` words, of those that the config speaks of.
int bits_of(const QuantizedConfig& config, const std::string& name, int64_t cols, int64_t words) {
  int found = 0;
  for (const OutputGroup& group : config.groups) {
    if (packed_words(cols, group.bits) != words || found == group.bits) continue;
    SHARDQ_CHECK(found == 0, ExitCode::input, "tensor {}: {} words for {} columns fit {} and {} bits", name, words,
                 cols, found, group.bits);
    found = group.bits;
  }
  SHARDQ_CHECK(found != 0, ExitCode::input,
               "tensor {}: {} words for {} columns fit no config group of quantization_config", name, words, cols);
  return found;
}

std::vector<int32_t> read_words(const Checkpoint& checkpoint, const std::string& name, int64_t first, int64_t count) {
  std::vector<int32_t> words(count);
  checkpoint.read(name, first * 4, std::as_writable_bytes(std::span(words)));
  return words;
}

}  // namespace

TensorReader::TensorReader(const Checkpoint& checkpoint)
    : checkpoint_(checkpoint), config_(read_quantized_config(checkpoint.config_text())) {}

void TensorReader::read(const std::vector<ReadItem>& items, DType compute, bool check_finite) const {
  std::vector<ReadItem> pieces;
  for (const ReadItem& item : items) cut(item, compute, pieces);
  int64_t bytes = 0;  // a small layer is read before other threads have woken
  for (const ReadItem& item : items) bytes += item.range.size() * width_of(item) * size_of(compute);
  parallel_for(static_cast<int64_t>(pieces.size()), bytes > kPieceBytes, [&](int64_t i) {
    read_piece(pieces[i], {compute, check_finite});
  });
}

/// A transposed slice stays whole: every piece of it would have to read all of it.
void TensorReader::cut(const ReadItem& item, DType compute, std::vector<ReadItem>& pieces) const {
  const LinearSpec* linear = item.linear;
  const int64_t width = width_of(item);
  const DType stored =
      linear && packed(*linear) ? compute : checkpoint_.entry(linear ? linear->tensor : *item.tensor).dtype;
  const int64_t step = linear && linear->fused_transposed
                           ? std::max<int64_t>(item.range.size(), 1)
                           : std::max<int64_t>(kPieceBytes / (width * size_of(stored)), 1);
  for (int64_t begin = item.range.begin; begin < item.range.end; begin += step) {
    ReadItem piece = item;
    piece.range = {begin, std::min(begin + step, item.range.end)};
    piece.target += (begin - item.range.begin) * width * size_of(compute);
    pieces.push_back(piece);
  }
}

void TensorReader::read_piece(const ReadItem& piece, Format format) const {
  if (!piece.linear) return read_elements(*piece.tensor, piece.range, piece.target, format);
  const LinearSpec& linear = *piece.linear;
  if (packed(linear)) return read_packed(linear, piece.range, piece.target, format);
  if (linear.fused_transposed) return read_transposed(linear, piece.range, piece.target, format);
  int64_t first = 0;
  if (linear.fused_index >= 0) {
    const Shape& shape = checkpoint_.entry(linear.tensor).shape;
    first = linear.fused_index * (element_count(shape) / shape[0]) + linear.fused_row * linear.cols;
  }
  read_elements(linear.tensor, {first + piece.range.begin * linear.cols, first + piece.range.end * linear.cols},
                piece.target, format);
}

void TensorReader::read_elements(const std::string& name, Range elements, std::byte* target, Format format) const {
  const TensorEntry& entry = checkpoint_.entry(name);
  const int64_t size = size_of(entry.dtype), bytes = elements.size() * size;
  const bool direct = entry.dtype == format.compute;
  const std::span<std::byte> stored = direct ? std::span(target, bytes) : scratch(Scratch::stored, bytes);
  checkpoint_.read(name, elements.begin * size, stored);
  if (format.check_finite) check_all_finite(entry, stored, elements.begin);
  if (!direct) convert_elements(stored.data(), entry.dtype, target, format.compute, elements.size());
}

/// Rows of ours are columns of the file: whole lines of it are read, and our columns of them turned.
void TensorReader::read_transposed(const LinearSpec& linear, Range rows, std::byte* target, Format format) const {
  const TensorEntry& entry = checkpoint_.entry(linear.tensor);
  const int64_t size = size_of(entry.dtype), line = entry.shape[2], slice = linear.fused_index * entry.shape[1] * line;
  const int64_t first = linear.fused_row + rows.begin, step = std::max<int64_t>(kPieceBytes / (line * size), 1);
  for (int64_t begin = 0; begin < linear.cols; begin += step) {
    const int64_t lines = std::min(step, linear.cols - begin);
    const std::span<std::byte> stored = scratch(Scratch::stored, lines * line * size);
    const std::span<std::byte> turned = scratch(Scratch::turned, lines * rows.size() * size);
    checkpoint_.read(linear.tensor, (slice + begin * line) * size, stored);
    transpose(stored.data() + first * size, line, rows.size(), lines, size, turned.data());
    const int64_t bad = format.check_finite ? first_nonfinite(turned, entry.dtype) : -1;
    if (bad >= 0) fail_nonfinite(entry, slice + (begin + bad % lines) * line + first + bad / lines);
    for (int64_t r = 0; r < rows.size(); ++r)
      convert_elements(turned.data() + r * lines * size, entry.dtype,
                       target + (r * linear.cols + begin) * size_of(format.compute), format.compute, lines);
  }
}

void TensorReader::read_packed(const LinearSpec& linear, Range rows, std::byte* target, Format format) const {
  const std::string packed = linear.module + ".weight_packed", scale = linear.module + ".weight_scale";
  SHARDQ_CHECK(!checkpoint_.has(linear.module + ".weight_g_idx"), ExitCode::input,
               "{}: tensor {}.weight_g_idx: grouping by activation order is not supported",
               checkpoint_.directory().string(), linear.module);
  const int64_t words = checkpoint_.entry(packed).shape.at(1);
  const int bits = bits_of(config_, packed, linear.cols, words);
  const std::vector<int8_t> codes = unpack_rows(
      read_words(checkpoint_, packed, rows.begin * words, rows.size() * words), rows.size(), linear.cols, bits);
  const TensorEntry& scale_entry = checkpoint_.entry(scale);
  const int64_t groups = scale_entry.shape.at(1), group_size = linear.cols / groups;
  std::vector<float> scales(rows.size() * groups);
  read_elements(scale, {rows.begin * groups, rows.end * groups}, reinterpret_cast<std::byte*>(scales.data()),
                {DType::f32, format.check_finite});
  const std::vector<int8_t> zeros = read_zeros(linear, rows, groups, bits);
  std::vector<float> row(linear.cols);
  for (int64_t r = 0; r < rows.size(); ++r) {
    for (int64_t c = 0; c < linear.cols; ++c) {
      const int64_t g = r * groups + c / group_size;
      row[c] = dequantize_code(codes[r * linear.cols + c], scales[g], zeros[g], scale_entry.dtype);
    }
    convert_elements(row.data(), DType::f32, target + r * linear.cols * size_of(format.compute), format.compute,
                     linear.cols);
  }
}

/// Zero points of `rows`; 0 where there are none.  Shapes: [rows, groups].
std::vector<int8_t> TensorReader::read_zeros(const LinearSpec& linear, Range rows, int64_t groups, int bits) const {
  const std::string name = linear.module + ".weight_zero_point";
  if (!checkpoint_.has(name)) return std::vector<int8_t>(rows.size() * groups, 0);
  const Shape expected{packed_words(linear.rows, bits), groups};
  const TensorEntry& entry = checkpoint_.entry(name);
  SHARDQ_CHECK(entry.dtype == DType::i32 && entry.shape == expected, ExitCode::input,
               "{}: tensor {}: expected I32 {}, found {} {}", checkpoint_.directory().string(), name,
               to_string(expected), safetensors_name(entry.dtype), to_string(entry.shape));
  // Packed along rows: `bits` words hold 32 of them, so that a multiple of 32 begins with a word.
  const int64_t before = rows.begin % 32, count = before + rows.size();
  std::vector<int8_t> zeros =
      unpack_columns(read_words(checkpoint_, name, rows.begin / 32 * bits * groups, packed_words(count, bits) * groups),
                     count, groups, bits);
  zeros.erase(zeros.begin(), zeros.begin() + before * groups);
  return zeros;
}

bool TensorReader::packed(const LinearSpec& linear) const {
  return !checkpoint_.has(linear.tensor) && checkpoint_.has(linear.module + ".weight_packed");
}

void TensorReader::check_finite(const std::string& name) const {
  const TensorEntry& entry = checkpoint_.entry(name);
  if (entry.dtype != DType::bf16 && entry.dtype != DType::f16 && entry.dtype != DType::f32) return;
  const int64_t count = element_count(entry.shape), step = (int64_t{4} << 20) / size_of(entry.dtype);
  parallel_for((count + step - 1) / step, true, [&](int64_t i) {
    const Range range{i * step, std::min(count, (i + 1) * step)};
    std::vector<std::byte> values(static_cast<size_t>(range.size() * size_of(entry.dtype)));
    read_elements(name, range, values.data(), {entry.dtype, true});
  });
}

void TensorReader::check_all_finite(const TensorEntry& entry, std::span<const std::byte> bytes, int64_t first) const {
  const int64_t at = first_nonfinite(bytes, entry.dtype);
  if (at >= 0) fail_nonfinite(entry, first + at);
}

void TensorReader::fail_nonfinite(const TensorEntry& entry, int64_t flat) const {
  fail(ExitCode::input, "{}: tensor {}: NaN or infinity at {} of shape {}", checkpoint_.directory().string(),
       entry.name, position_in(entry.shape, flat), to_string(entry.shape));
}

}  // namespace shardq
