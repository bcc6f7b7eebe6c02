#include "model/weight_source.hpp"

#include <cstring>
#include <exception>
#include <mutex>

#include "core/error.hpp"
#include "io/packing.hpp"

namespace shardq {

namespace {

/// "[e, i, j]" of a flat index.
std::string position_in(const Shape& shape, int64_t flat) {
  Shape index(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    index[axis] = flat % shape[axis];
    flat /= shape[axis];
  }
  return to_string(index);
}

void check_all_finite(const Checkpoint& checkpoint, const TensorEntry& entry, std::span<const std::byte> bytes,
                      int64_t first_element) {
  const int64_t at = first_nonfinite(bytes, entry.dtype);
  SHARDQ_CHECK(at < 0, ExitCode::input, "{}: tensor {}: NaN or infinity at {} of shape {}",
               checkpoint.directory().string(), entry.name, position_in(entry.shape, first_element + at),
               to_string(entry.shape));
}

/// target[r][c] = source[c][r] for elements of `size` bytes.
void transpose(const std::byte* source, int64_t source_stride, int64_t rows, int64_t cols, int64_t size,
               std::byte* target) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      std::memcpy(target + (r * cols + c) * size, source + (c * source_stride + r) * size, size);
}

/// Offsets are multiples of this, so that any element type is aligned.
constexpr int64_t kAlignment = 256;
int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
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

std::vector<int32_t> words_of(std::span<const std::byte> bytes) {
  std::vector<int32_t> words(bytes.size() / 4);
  std::memcpy(words.data(), bytes.data(), words.size() * 4);
  return words;
}

std::vector<float> floats_of(const Checkpoint& checkpoint, const std::string& name) {
  const TensorEntry& entry = checkpoint.entry(name);
  std::vector<float> values(element_count(entry.shape));
  convert_elements(checkpoint.bytes(name).data(), entry.dtype, values.data(), DType::f32,
                   static_cast<int64_t>(values.size()));
  return values;
}

/// A linear that we quantized, reconstructed bit for bit as the solver used it.
void read_packed(const Checkpoint& checkpoint, const QuantizedConfig& config, const LinearSpec& linear, void* target,
                 DType compute) {
  const std::string packed = linear.module + ".weight_packed", scale = linear.module + ".weight_scale",
                    zero_point = linear.module + ".weight_zero_point";
  SHARDQ_CHECK(!checkpoint.has(linear.module + ".weight_g_idx"), ExitCode::input,
               "{}: tensor {}.weight_g_idx: grouping by activation order is not supported",
               checkpoint.directory().string(), linear.module);
  const Shape& packed_shape = checkpoint.entry(packed).shape;
  const int bits = bits_of(config, packed, linear.cols, packed_shape.at(1));
  const std::vector<int8_t> codes = unpack_rows(words_of(checkpoint.bytes(packed)), linear.rows, linear.cols, bits);
  const TensorEntry& scale_entry = checkpoint.entry(scale);
  const std::vector<float> scales = floats_of(checkpoint, scale);
  const int64_t groups = scale_entry.shape.at(1), group_size = linear.cols / groups;
  std::vector<int8_t> zeros(linear.rows * groups, 0);
  if (checkpoint.has(zero_point)) {
    const Shape expected{packed_words(linear.rows, bits), groups};
    const TensorEntry& entry = checkpoint.entry(zero_point);
    SHARDQ_CHECK(entry.dtype == DType::i32 && entry.shape == expected, ExitCode::input,
                 "{}: tensor {}: expected I32 {}, found {} {}", checkpoint.directory().string(), zero_point,
                 to_string(expected), safetensors_name(entry.dtype), to_string(entry.shape));
    zeros = unpack_columns(words_of(checkpoint.bytes(zero_point)), linear.rows, groups, bits);
  }
  std::vector<float> row(linear.cols);
  for (int64_t r = 0; r < linear.rows; ++r) {
    for (int64_t c = 0; c < linear.cols; ++c) {
      const int64_t g = r * groups + c / group_size;
      row[c] = dequantize_code(codes[r * linear.cols + c], scales[g], zeros[g], scale_entry.dtype);
    }
    convert_elements(row.data(), DType::f32, static_cast<std::byte*>(target) + r * linear.cols * size_of(compute),
                     compute, linear.cols);
  }
}

}  // namespace

WeightSource::WeightSource(const Checkpoint& checkpoint, const ModelSpec& spec)
    : checkpoint_(checkpoint), spec_(spec), config_(read_quantized_config(checkpoint.config_text())) {}

void WeightSource::read_linear(const LinearSpec& linear, void* target, DType compute, bool check_finite) const {
  if (!checkpoint_.has(linear.tensor) && checkpoint_.has(linear.module + ".weight_packed")) {
    read_packed(checkpoint_, config_, linear, target, compute);
    return;
  }
  const TensorEntry& entry = checkpoint_.entry(linear.tensor);
  const int64_t size = size_of(entry.dtype), count = linear.rows * linear.cols;
  std::span<const std::byte> bytes = checkpoint_.bytes(linear.tensor);
  int64_t first = 0;
  std::vector<std::byte> rearranged;
  if (linear.fused_index >= 0) {
    const int64_t slice = element_count(entry.shape) / entry.shape[0];
    if (linear.fused_transposed) {
      // Rows of ours are columns of the file; the whole slice is scanned, so that the index in a message is the file's.
      const int64_t all_rows = slice / linear.cols;
      const auto whole = bytes.subspan(linear.fused_index * slice * size, slice * size);
      if (check_finite) check_all_finite(checkpoint_, entry, whole, linear.fused_index * slice);
      rearranged.resize(count * size);
      transpose(whole.data() + linear.fused_row * size, all_rows, linear.rows, linear.cols, size, rearranged.data());
      convert_elements(rearranged.data(), entry.dtype, target, compute, count);
      return;
    }
    first = linear.fused_index * slice + linear.fused_row * linear.cols;
    bytes = bytes.subspan(first * size, count * size);
  }
  if (check_finite) check_all_finite(checkpoint_, entry, bytes, first);
  convert_elements(bytes.data(), entry.dtype, target, compute, count);
}

void WeightSource::read_plain(const std::string& name, void* target, DType compute, bool check_finite) const {
  const TensorEntry& entry = checkpoint_.entry(name);
  const auto bytes = checkpoint_.bytes(name);
  if (check_finite) check_all_finite(checkpoint_, entry, bytes, 0);
  convert_elements(bytes.data(), entry.dtype, target, compute, element_count(entry.shape));
}

void WeightSource::add_tap(std::vector<Part>& parts, const LayerSpec& layer, Tap tap, DType compute,
                           bool check_finite) const {
  const ModelSpec::TapShape shape = spec_.tap_shape(layer, tap);
  const int index = static_cast<int>(tap);
  std::vector<const LinearSpec*> linears;
  bool any_bias = false;
  for (const LinearSpec& linear : layer.linears)
    if (linear.tap == tap) {
      linears.push_back(&linear);
      any_bias |= !linear.bias.empty();
    }
  const int64_t size = size_of(compute);
  const auto fill_weights = [=, this](std::byte* target) {
    std::exception_ptr failure;
    std::mutex failure_lock;
    const int64_t count = static_cast<int64_t>(linears.size());
    // Few large matrices are converted by all threads one after another, many small ones a thread each.
    // No exception may leave the loop.
#pragma omp parallel for schedule(dynamic) if (count > 8)
    for (int64_t i = 0; i < count; ++i) {
      const LinearSpec& linear = *linears[i];
      const int64_t row = std::max<int64_t>(linear.expert, 0) * shape.rows + linear.row_offset;
      try {
        read_linear(linear, target + row * shape.cols * size, compute, check_finite);
      } catch (...) {
        const std::lock_guard guard(failure_lock);
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  };
  parts.push_back({{shape.count, shape.rows, shape.cols},
                   [index](LayerWeights& w) -> Tensor& { return w.taps[index]; },
                   fill_weights});
  if (!any_bias) return;
  const auto fill_bias = [=, this](std::byte* target) {
    std::memset(target, 0, shape.rows * size);  // linears without a bias beside some that have one
    for (const LinearSpec* linear : linears)
      if (!linear->bias.empty()) read_plain(linear->bias, target + linear->row_offset * size, compute, check_finite);
  };
  parts.push_back({{shape.rows}, [index](LayerWeights& w) -> Tensor& { return w.biases[index]; }, fill_bias});
}

std::vector<WeightSource::Part> WeightSource::parts(const LayerSpec& layer, DType compute, bool check_finite) const {
  std::vector<Part> result;
  for (Tap tap : kTaps) add_tap(result, layer, tap, compute, check_finite);
  const auto add_plain = [&](const std::string& name, Tensor LayerWeights::*slot) {
    if (name.empty()) return;
    result.push_back({checkpoint_.entry(name).shape, [slot](LayerWeights& w) -> Tensor& { return w.*slot; },
                      [=, this](std::byte* target) { read_plain(name, target, compute, check_finite); }});
  };
  add_plain(layer.input_norm, &LayerWeights::input_norm);
  add_plain(layer.post_attention_norm, &LayerWeights::post_attention_norm);
  add_plain(layer.q_norm, &LayerWeights::q_norm);
  add_plain(layer.k_norm, &LayerWeights::k_norm);
  add_plain(layer.router, &LayerWeights::router);
  return result;
}

int64_t WeightSource::layer_bytes(const LayerSpec& layer, DType compute) const {
  int64_t bytes = 0;
  for (const Part& part : parts(layer, compute, false)) bytes += aligned(element_count(part.shape) * size_of(compute));
  return bytes;
}

void WeightSource::read(const LayerSpec& layer, DType compute, bool check_finite, HostLayer& host) const {
  std::byte* at = host.reserve(layer_bytes(layer, compute));
  for (const Part& part : parts(layer, compute, check_finite)) {
    part.fill(at);
    at += aligned(element_count(part.shape) * size_of(compute));
  }
}

LayerWeights WeightSource::upload(Backend& backend, const LayerSpec& layer, DType compute,
                                  const HostLayer& host) const {
  LayerWeights weights;
  const std::byte* at = host.data();
  const std::string what = layer.prefix + "weights";
  for (const Part& part : parts(layer, compute, false)) {
    Tensor& tensor = part.slot(weights);
    tensor = Tensor(backend, compute, part.shape, what.c_str());
    backend.upload(tensor.data(), at, tensor.bytes());
    at += aligned(tensor.bytes());
  }
  return weights;
}

LayerWeights WeightSource::load(Backend& backend, const LayerSpec& layer, DType compute, bool check_finite) const {
  if (!backend.is_host()) {
    HostLayer host(backend);
    read(layer, compute, check_finite, host);
    return upload(backend, layer, compute, host);
  }
  LayerWeights weights;
  const std::string what = layer.prefix + "weights";
  for (const Part& part : parts(layer, compute, check_finite)) {
    Tensor& tensor = part.slot(weights);
    tensor = Tensor(backend, compute, part.shape, what.c_str());
    part.fill(tensor.as<std::byte>());
  }
  return weights;
}

Tensor WeightSource::load_tensor(Backend& backend, const std::string& name, DType compute, bool check_finite) const {
  Tensor tensor(backend, compute, checkpoint_.entry(name).shape, name.c_str());
  if (backend.is_host()) {
    read_plain(name, tensor.data(), compute, check_finite);
    return tensor;
  }
  HostLayer host(backend);
  read_plain(name, host.reserve(tensor.bytes()), compute, check_finite);
  backend.upload(tensor.data(), host.data(), tensor.bytes());
  return tensor;
}

HostLayer::~HostLayer() {
  if (data_) backend_.release_host(data_);
}

std::byte* HostLayer::reserve(int64_t bytes) {
  if (bytes <= capacity_) return data_;
  if (data_) backend_.release_host(data_);
  data_ = nullptr;
  capacity_ = 0;
  data_ = static_cast<std::byte*>(backend_.allocate_host(bytes));
  capacity_ = bytes;
  return data_;
}

}  // namespace shardq
