#pragma once
#include <functional>
#include <memory>

#include "io/checkpoint.hpp"
#include "io/output_writer.hpp"
#include "model/layer_forward.hpp"

namespace shardq {

/// The weights of one layer in host memory from which transfers run fast. Kept and reused for layer after layer, so
/// that page-locked memory is allocated once.  Requires: the backend outlives it.
class HostLayer {
 public:
  explicit HostLayer(Backend& backend) : backend_(backend) {}
  ~HostLayer();
  HostLayer(const HostLayer&) = delete;
  HostLayer& operator=(const HostLayer&) = delete;
  /// At least `bytes`; what was in it is lost when it grows.
  std::byte* reserve(int64_t bytes);
  std::byte* data() const { return data_; }

 private:
  Backend& backend_;
  std::byte* data_ = nullptr;
  int64_t capacity_ = 0;
};

/// Reads the weights of layers from a checkpoint, full-precision or quantized by us (then dequantized bit for bit as
/// the solver used them).
class WeightSource {
 public:
  WeightSource(const Checkpoint& checkpoint, const ModelSpec& spec);
  /// Whole layer into backend memory, converted to `compute`: weights follow the dtype of the activations.
  /// `check_finite`: every weight is scanned; Error(input) names tensor and index of the first NaN or Inf.
  LayerWeights load(Backend& backend, const LayerSpec& layer, DType compute, bool check_finite) const;
  /// The two halves of load, for reading ahead: `read` touches files and host memory only, so that another thread may
  /// run it while the device computes; `upload` then takes what was read (same layer and dtype) to the backend.
  void read(const LayerSpec& layer, DType compute, bool check_finite, HostLayer& host) const;
  LayerWeights upload(Backend& backend, const LayerSpec& layer, DType compute, const HostLayer& host) const;
  /// Bytes of a layer's weights in `compute`, with norms, biases and router.
  int64_t layer_bytes(const LayerSpec& layer, DType compute) const;
  /// One tensor (norm, head) in `compute` dtype.
  Tensor load_tensor(Backend& backend, const std::string& name, DType compute, bool check_finite) const;
  bool quantized() const { return config_.quantized; }

 private:
  /// One tensor of a layer: its shape, where it belongs, and how its memory is filled.
  struct Part {
    Shape shape;
    std::function<Tensor&(LayerWeights&)> slot;
    std::function<void(std::byte*)> fill;
  };
  std::vector<Part> parts(const LayerSpec& layer, DType compute, bool check_finite) const;
  void add_tap(std::vector<Part>& parts, const LayerSpec& layer, Tap tap, DType compute, bool check_finite) const;
  void read_linear(const LinearSpec& linear, void* target, DType compute, bool check_finite) const;
  void read_plain(const std::string& name, void* target, DType compute, bool check_finite) const;
  const Checkpoint& checkpoint_;
  const ModelSpec& spec_;
  QuantizedConfig config_;
};

}  // namespace shardq
