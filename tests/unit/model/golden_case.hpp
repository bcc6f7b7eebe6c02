#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "model/causal_lm.hpp"
#include "model/embedding.hpp"
#include "model/layer_forward.hpp"
#include "model/model_spec.hpp"
#include "model/weight_source.hpp"

namespace shardq {

inline std::filesystem::path golden_directory() {
  return std::filesystem::path(SHARDQ_SOURCE_DIR) / "tests/golden/data";
}

/// Floats of a tensor of a safetensors file.
inline std::vector<float> golden_floats(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry* entry = file.find(name);
  if (!entry) throw std::runtime_error("no tensor " + name + " in " + file.path().string());
  std::vector<float> values(element_count(entry->shape));
  convert_elements(file.bytes(*entry).data(), entry->dtype, values.data(), DType::f32,
                   static_cast<int64_t>(values.size()));
  return values;
}
inline std::vector<int32_t> golden_integers(const SafetensorsFile& file, const std::string& name) {
  const auto bytes = file.bytes(*file.find(name));
  std::vector<int32_t> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Largest difference over the largest magnitude that is wanted; infinite for unequal sizes, and for anything that is
/// no number.
inline double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size() || want.empty()) return INFINITY;
  double largest = 0, error = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    largest = std::max(largest, std::abs(static_cast<double>(want[i])));
    error = std::max(error, std::abs(static_cast<double>(got[i]) - want[i]));
  }
  return largest > 0 ? error / largest : INFINITY;
}

/// Allowed relative error after `layers` layers: each adds about ten roundings of sums over `width` terms, and a peaked
/// softmax or a norm multiplies what came before by a small factor.
inline double forward_tolerance(DType compute, int64_t width, int64_t layers) {
  const double eps = compute == DType::f32 ? 0x1p-24 : compute == DType::f16 ? 0x1p-11 : 0x1p-8;
  return 4.0 * eps * std::sqrt(static_cast<double>(width)) * static_cast<double>(1 << layers);
}

/// What a model computes: the residual stream after each layer, and the logits.
struct ForwardOutput {
  std::vector<std::vector<float>> hidden;
  std::vector<float> logits;
};

inline std::vector<float> to_host(Backend& backend, const Tensor& tensor) {
  std::vector<std::byte> bytes(tensor.bytes());
  backend.download(bytes.data(), tensor.data(), tensor.bytes());
  std::vector<float> values(tensor.size());
  convert_elements(bytes.data(), tensor.dtype(), values.data(), DType::f32, tensor.size());
  return values;
}

/// One golden model with its sequences, packed.
struct GoldenCase {
  explicit GoldenCase(const std::string& name)
      : checkpoint(golden_directory() / name), golden(golden_directory() / name / "golden.safetensors") {
    ids = golden_integers(golden, "input_ids");
    starts = {0};
    for (int32_t length : golden_integers(golden, "lengths")) {
      starts.push_back(starts.back() + length);
      longest = std::max<int64_t>(longest, length);
    }
    for (int64_t layer = 0; golden.find("hidden." + std::to_string(layer)); ++layer)
      want.hidden.push_back(golden_floats(golden, "hidden." + std::to_string(layer)));
    want.logits = golden_floats(golden, "logits");
  }

  ForwardOutput run(Backend& backend, const ModelSpec& spec, DType compute) const {
    const WeightSource source(checkpoint, spec);
    const RopeTable rope = rope_table(spec, longest);
    ChunkState chunk;
    chunk.starts = starts;
    chunk.hidden = Embedding(backend, checkpoint, spec, compute)(ids);
    ForwardOutput output;
    for (const LayerSpec& layer : spec.layer) {
      const LayerWeights weights = source.load(backend, layer, compute, true);
      LayerForward forward(backend, spec, layer, weights, rope, compute);
      for (Tap tap : kTaps) forward.to(tap, chunk);
      forward.finish(chunk);
      output.hidden.push_back(to_host(backend, chunk.hidden));
    }
    const Tensor norm = source.load_tensor(backend, spec.final_norm, compute, true);
    const Tensor head = source.load_tensor(backend, spec.lm_head, compute, true);
    const Tensor normed(backend, compute, chunk.hidden.shape(), "normed");
    const Tensor logits(backend, compute, {starts.back(), spec.vocab}, "logits");
    head_logits(backend, spec, norm, head, chunk.hidden.matrix(), normed.matrix(), logits.matrix());
    output.logits = to_host(backend, logits);
    return output;
  }

  Checkpoint checkpoint;
  SafetensorsFile golden;
  std::vector<int32_t> ids;
  std::vector<int64_t> starts;
  int64_t longest = 0;
  ForwardOutput want;
};

}  // namespace shardq
