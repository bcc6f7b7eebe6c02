#include "io/token_readers.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.hpp"
#include "io/safetensors.hpp"
#include "io/safetensors_header.hpp"

namespace shardq {
namespace {

template <class T>
void widen(const std::byte* source, std::vector<int64_t>& target) {
  for (size_t i = 0; i < target.size(); ++i) {
    T value;
    std::memcpy(&value, source + i * sizeof(T), sizeof(T));
    // A u64 beyond int64 becomes negative, which the range check refuses.
    target[i] = static_cast<int64_t>(value);
  }
}

std::vector<int64_t> widen(std::span<const std::byte> bytes, DType dtype, int64_t count, const std::string& where) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  switch (dtype) {
    case DType::boolean:
    case DType::u8:
      widen<uint8_t>(bytes.data(), values);
      break;
    case DType::i8:
      widen<int8_t>(bytes.data(), values);
      break;
    case DType::u16:
      widen<uint16_t>(bytes.data(), values);
      break;
    case DType::i16:
      widen<int16_t>(bytes.data(), values);
      break;
    case DType::u32:
      widen<uint32_t>(bytes.data(), values);
      break;
    case DType::i32:
      widen<int32_t>(bytes.data(), values);
      break;
    case DType::u64:
      widen<uint64_t>(bytes.data(), values);
      break;
    case DType::i64:
      widen<int64_t>(bytes.data(), values);
      break;
    default:
      fail(ExitCode::input, "{}: token ids must be integers, found {}", where, torch_name(dtype));
  }
  return values;
}

/// [samples, length] of a shape of rank 1 (one sample) or 2.
std::pair<int64_t, int64_t> rectangle(const Shape& shape, const std::string& where) {
  SHARDQ_CHECK(shape.size() == 1 || shape.size() == 2, ExitCode::input,
               "{}: token ids must have shape [samples, length], found {}", where, to_string(shape));
  return shape.size() == 1 ? std::pair(int64_t{1}, shape[0]) : std::pair(shape[0], shape[1]);
}

struct NpyHeader {
  DType dtype = DType::i32;
  Shape shape;
  int64_t data_begin = 0;
};

/// The text of one entry of the header's Python dictionary, from behind its key's colon; the writer's layout is fixed
/// enough to search for keys.
std::string_view npy_value(std::string_view header, std::string_view key, const std::string& where) {
  const std::string quoted = fmt::format("'{}'", key);
  const size_t at = header.find(quoted);
  const size_t colon = at == std::string_view::npos ? at : header.find(':', at + quoted.size());
  SHARDQ_CHECK(colon != std::string_view::npos, ExitCode::input, "{}: the npy header lacks {}", where, quoted);
  const size_t value = header.find_first_not_of(' ', colon + 1);
  SHARDQ_CHECK(value != std::string_view::npos, ExitCode::input, "{}: the npy header lacks a value for {}", where,
               quoted);
  return header.substr(value);
}

DType npy_dtype(std::string_view text, const std::string& where) {
  static constexpr std::pair<std::string_view, DType> kKinds[] = {{"'<i4'", DType::i32}, {"'<i8'", DType::i64},
                                                                  {"'<u2'", DType::u16}, {"'<u4'", DType::u32},
                                                                  {"'<i2'", DType::i16}, {"'|u1'", DType::u8}};
  for (const auto& [name, dtype] : kKinds)
    if (text.starts_with(name)) return dtype;
  fail(ExitCode::input, "{}: token ids must be little-endian integers ('<i4', '<i8', '<u2', '<u4'), found {}", where,
       printable(text.substr(0, text.find_first_of(",}"))));
}

Shape npy_shape(std::string_view text, const std::string& where) {
  Shape shape;
  bool good = text.starts_with('(');
  size_t at = 1;
  while (good && at < text.size() && text[at] != ')') {
    if (text[at] == ' ' || text[at] == ',') {
      ++at;
      continue;
    }
    int64_t dim = 0;
    const size_t begin = at;
    for (; at < text.size() && '0' <= text[at] && text[at] <= '9'; ++at)
      good = good && !__builtin_mul_overflow(dim, 10, &dim) && !__builtin_add_overflow(dim, text[at] - '0', &dim);
    good = good && at > begin;
    shape.push_back(dim);
  }
  SHARDQ_CHECK(good && at < text.size(), ExitCode::input, "{}: malformed shape in the npy header: {}", where,
               printable(text.substr(0, 40)));
  return shape;
}

/// A file read piecewise: token files may be far larger than the samples asked for.
class PieceReader {
 public:
  PieceReader(const std::filesystem::path& path, std::string where)
      : stream_(path, std::ios::binary), where_(std::move(where)) {
    SHARDQ_CHECK(stream_.good(), ExitCode::input, "{}: cannot open", where_);
    stream_.seekg(0, std::ios::end);
    size_ = stream_.tellg();
    stream_.seekg(0);
  }
  int64_t size() const { return size_; }
  /// The next `bytes` bytes; `what` names them where the file is too short.
  std::string next(int64_t bytes, const char* what) {
    SHARDQ_CHECK(bytes <= size_ - stream_.tellg(), ExitCode::input,
                 "{}: {} of {} bytes is longer than the file of {} bytes", where_, what, bytes, size_);
    std::string piece(static_cast<size_t>(bytes), '\0');
    stream_.read(piece.data(), bytes);
    SHARDQ_CHECK(stream_.good(), ExitCode::input, "{}: cannot read {}", where_, what);
    return piece;
  }

 private:
  std::ifstream stream_;
  std::string where_;
  int64_t size_ = 0;
};

NpyHeader read_npy_header(PieceReader& file, const std::string& where) {
  constexpr int64_t kMagic = 8, kLargestHeader = 1 << 20;
  SHARDQ_CHECK(file.size() >= kMagic + 2, ExitCode::input, "{}: not an npy file", where);
  const std::string magic = file.next(kMagic, "the npy magic");
  SHARDQ_CHECK(magic.starts_with("\x93NUMPY"), ExitCode::input, "{}: not an npy file", where);
  const int version = magic[6];
  SHARDQ_CHECK(version >= 1 && version <= 3, ExitCode::input, "{}: npy version {} is not supported, expected 1, 2 or 3",
               where, version);
  const std::string count = file.next(version == 1 ? 2 : 4, "the npy header length");
  int64_t length = 0;
  for (size_t i = count.size(); i-- > 0;) length = length << 8 | static_cast<unsigned char>(count[i]);
  SHARDQ_CHECK(length <= kLargestHeader, ExitCode::input, "{}: the npy header claims {} bytes, more than {}", where,
               length, kLargestHeader);
  const std::string text = file.next(length, "the npy header");
  NpyHeader header;
  header.data_begin = kMagic + static_cast<int64_t>(count.size()) + length;
  header.dtype = npy_dtype(npy_value(text, "descr", where), where);
  header.shape = npy_shape(npy_value(text, "shape", where), where);
  const bool fortran = npy_value(text, "fortran_order", where).starts_with("True");
  SHARDQ_CHECK(!fortran || header.shape.size() < 2, ExitCode::input,
               "{}: the npy array must be in C order, found Fortran order", where);
  return header;
}

std::vector<int64_t> json_integers(const nlohmann::json& array, const std::string& where) {
  SHARDQ_CHECK(array.is_array(), ExitCode::input, "{}: expected an array of token ids, found {}", where,
               array.type_name());
  std::vector<int64_t> values;
  values.reserve(array.size());
  for (const auto& item : array) {
    SHARDQ_CHECK(item.is_number_integer() || item.is_boolean(), ExitCode::input,
                 "{}: position {} must be an integer, found {}", where, values.size(),
                 printable(item.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)));
    values.push_back(item.is_boolean() ? item.get<bool>() : item.get<int64_t>());
  }
  return values;
}

std::vector<int64_t> unmasked(std::vector<int64_t> ids, const std::vector<int64_t>& mask) {
  size_t kept = 0;
  for (size_t i = 0; i < ids.size(); ++i)
    if (mask[i] != 0) ids[kept++] = ids[i];
  ids.resize(kept);
  return ids;
}

}  // namespace

RawSamples split_samples(const std::vector<int64_t>& ids, const std::vector<int64_t>& mask, int64_t samples,
                         int64_t length) {
  RawSamples result;
  result.reserve(static_cast<size_t>(samples));
  for (int64_t s = 0; s < samples; ++s) {
    std::vector<int64_t> sample(ids.begin() + s * length, ids.begin() + (s + 1) * length);
    if (!mask.empty())
      sample = unmasked(std::move(sample), {mask.begin() + s * length, mask.begin() + (s + 1) * length});
    result.push_back(std::move(sample));
  }
  return result;
}

RawSamples read_npy_tokens(const std::filesystem::path& path, int64_t max_samples) {
  const std::string where = "token file " + path.string();
  PieceReader file(path, where);
  const NpyHeader header = read_npy_header(file, where);
  auto [samples, length] = rectangle(header.shape, where);
  int64_t bytes = size_of(header.dtype);
  const bool overflow = __builtin_mul_overflow(bytes, samples, &bytes) || __builtin_mul_overflow(bytes, length, &bytes);
  const int64_t found = file.size() - header.data_begin;
  SHARDQ_CHECK(!overflow && bytes == found, ExitCode::input, "{}: shape {} of {} needs {} bytes of data, found {}",
               where, to_string(header.shape), torch_name(header.dtype), overflow ? -1 : bytes, found);
  SHARDQ_CHECK(samples == 0 || length > 0, ExitCode::input, "{}: sample 0 is empty (shape {})", where,
               to_string(header.shape));
  if (max_samples > 0) samples = std::min(samples, max_samples);
  const std::string data = file.next(samples * length * size_of(header.dtype), "the data");
  return split_samples(widen(std::as_bytes(std::span(data)), header.dtype, samples * length, where), {}, samples,
                       length);
}

RawSamples read_safetensors_tokens(const std::filesystem::path& path, int64_t max_samples) {
  const SafetensorsFile file(path);
  const TensorEntry* ids = file.find("input_ids");
  if (!ids && file.entries().size() == 1) ids = &file.entries().begin()->second;
  SHARDQ_CHECK(ids, ExitCode::input, "token file {}: expected a tensor input_ids, or a single tensor; found {}",
               path.string(), file.entries().size());
  const std::string where = "token file " + path.string() + ", tensor " + printable(ids->name);
  auto [samples, length] = rectangle(ids->shape, where);
  SHARDQ_CHECK(samples == 0 || length > 0, ExitCode::input, "{}: sample 0 is empty (shape {})", where,
               to_string(ids->shape));
  if (max_samples > 0) samples = std::min(samples, max_samples);
  const TensorEntry* mask = file.find("attention_mask");
  std::vector<int64_t> kept;
  if (mask) {
    SHARDQ_CHECK(mask->shape == ids->shape, ExitCode::input, "{}: attention_mask has shape {}, expected {}", where,
                 to_string(mask->shape), to_string(ids->shape));
    kept = widen(file.bytes(*mask), mask->dtype, samples * length, where + ", attention_mask");
  }
  return split_samples(widen(file.bytes(*ids), ids->dtype, samples * length, where), kept, samples, length);
}

RawSamples read_jsonl_tokens(const std::filesystem::path& path, int64_t max_samples) {
  std::ifstream stream(path);
  SHARDQ_CHECK(stream.good(), ExitCode::input, "cannot open token file {}", path.string());
  RawSamples samples;
  std::string text;
  for (int64_t line = 1; std::getline(stream, text); ++line) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (max_samples > 0 && static_cast<int64_t>(samples.size()) == max_samples) break;
    const std::string where = "token file " + path.string() + ", line " + std::to_string(line);
    const nlohmann::json item = nlohmann::json::parse(text, nullptr, false);
    SHARDQ_CHECK(!item.is_discarded(), ExitCode::input, "{}: not valid JSON", where);
    SHARDQ_CHECK(!item.is_object() || item.contains("input_ids"), ExitCode::input, "{}: the object lacks input_ids",
                 where);
    std::vector<int64_t> ids = json_integers(item.is_object() ? item["input_ids"] : item, where);
    if (item.is_object() && item.contains("attention_mask")) {
      const std::vector<int64_t> mask = json_integers(item["attention_mask"], where + ", attention_mask");
      SHARDQ_CHECK(mask.size() == ids.size(), ExitCode::input, "{}: attention_mask has {} entries, input_ids {}", where,
                   mask.size(), ids.size());
      ids = unmasked(std::move(ids), mask);
    }
    samples.push_back(std::move(ids));
  }
  SHARDQ_CHECK(!stream.bad(), ExitCode::input, "cannot read token file {}", path.string());
  return samples;
}

}  // namespace shardq
