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

/// Host memory to fill before it goes to a backend: the tensor itself where the host can write it, a staging buffer
/// elsewhere.
class HostImage {
 public:
  HostImage(Backend& backend, Tensor& tensor) : backend_(backend), tensor_(tensor) {
    data_ = backend.is_host() ? tensor.data() : backend.allocate_host(tensor.bytes());
  }
  ~HostImage() {
    if (!backend_.is_host()) backend_.release_host(data_);
  }
  HostImage(const HostImage&) = delete;
  HostImage& operator=(const HostImage&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  void finish() {
    if (!backend_.is_host()) backend_.upload(tensor_.data(), data_, tensor_.bytes());
  }

 private:
  Backend& backend_;
  Tensor& tensor_;
  void* data_;
};

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

Tensor WeightSource::load_tensor(Backend& backend, const std::string& name, DType compute, bool check_finite) const {
  const TensorEntry& entry = checkpoint_.entry(name);
  const auto bytes = checkpoint_.bytes(name);
  if (check_finite) check_all_finite(checkpoint_, entry, bytes, 0);
  Tensor tensor(backend, compute, entry.shape, name.c_str());
  HostImage image(backend, tensor);
  convert_elements(bytes.data(), entry.dtype, image.data(), compute, tensor.size());
  image.finish();
  return tensor;
}

LayerWeights WeightSource::load(Backend& backend, const LayerSpec& layer, DType compute, bool check_finite) const {
  LayerWeights weights;
  for (Tap tap : kTaps) {
    const ModelSpec::TapShape shape = spec_.tap_shape(layer, tap);
    std::vector<const LinearSpec*> linears;
    bool any_bias = false;
    for (const LinearSpec& linear : layer.linears)
      if (linear.tap == tap) {
        linears.push_back(&linear);
        any_bias |= !linear.bias.empty();
      }
    Tensor& stack = weights.taps[static_cast<int>(tap)];
    const std::string what = layer.prefix + to_string(tap) + " weights";
    stack = Tensor(backend, compute, {shape.count, shape.rows, shape.cols}, what.c_str());
    HostImage image(backend, stack);
    std::exception_ptr failure;
    std::mutex failure_lock;
    const int64_t count = static_cast<int64_t>(linears.size());
    // Few large matrices are converted by all threads one after another, many small ones a thread each. No exception
    // may leave the loop.
#pragma omp parallel for schedule(dynamic) if (count > 8)
    for (int64_t i = 0; i < count; ++i) {
      const LinearSpec& linear = *linears[i];
      const int64_t row = std::max<int64_t>(linear.expert, 0) * shape.rows + linear.row_offset;
      try {
        read_linear(linear, image.data() + row * shape.cols * size_of(compute), compute, check_finite);
      } catch (...) {
        const std::lock_guard guard(failure_lock);
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
    image.finish();
    if (!any_bias) continue;
    Tensor& bias = weights.biases[static_cast<int>(tap)];
    bias = Tensor(backend, compute, {shape.rows}, what.c_str());
    HostImage bias_image(backend, bias);
    std::memset(bias_image.data(), 0, bias.bytes());
    for (const LinearSpec* linear : linears) {
      if (linear->bias.empty()) continue;
      const TensorEntry& entry = checkpoint_.entry(linear->bias);
      const auto bytes = checkpoint_.bytes(linear->bias);
      if (check_finite) check_all_finite(checkpoint_, entry, bytes, 0);
      convert_elements(bytes.data(), entry.dtype, bias_image.data() + linear->row_offset * size_of(compute), compute,
                       linear->rows);
    }
    bias_image.finish();
  }
  weights.input_norm = load_tensor(backend, layer.input_norm, compute, check_finite);
  weights.post_attention_norm = load_tensor(backend, layer.post_attention_norm, compute, check_finite);
  if (!layer.q_norm.empty()) {
    weights.q_norm = load_tensor(backend, layer.q_norm, compute, check_finite);
    weights.k_norm = load_tensor(backend, layer.k_norm, compute, check_finite);
  }
  if (layer.moe) weights.router = load_tensor(backend, layer.router, compute, check_finite);
  return weights;
}

}  // namespace shardq
