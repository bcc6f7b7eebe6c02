#pragma once
#include <functional>
#include <memory>

#include "io/checkpoint.hpp"
#include "io/output_writer.hpp"
#include "model/layer_forward.hpp"

namespace shardq {

/// Reads the weights of layers from a checkpoint, full-precision or quantized by us (then dequantized bit for bit as
/// the solver used them).
class WeightSource {
 public:
  WeightSource(const Checkpoint& checkpoint, const ModelSpec& spec);
  /// Whole layer into backend memory, in the file's dtype (converted where `compute` is f32: weights follow compute).
  /// `check_finite`: every weight is scanned; Error(input) names tensor and index of the first NaN or Inf.
  LayerWeights load(Backend& backend, const LayerSpec& layer, DType compute, bool check_finite) const;
  /// One tensor (norm, head) in `compute` dtype.
  Tensor load_tensor(Backend& backend, const std::string& name, DType compute, bool check_finite) const;
  bool quantized() const { return config_.quantized; }

 private:
  void read_linear(const LinearSpec& linear, void* target, DType compute, bool check_finite) const;
  const Checkpoint& checkpoint_;
  const ModelSpec& spec_;
  QuantizedConfig config_;
};

}  // namespace shardq
