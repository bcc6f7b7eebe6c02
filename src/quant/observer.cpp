#include "quant/observer.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace shardq {
namespace {
constexpr int kShrinkSteps = 20;      // 1.0, 0.975 .. 0.5 of the range
constexpr float kMseNorm = 2.4f;      // compressed-tensors' and llm-compressor's mse observers
constexpr float kHessianNorm = 2.0f;  // the layer's own objective with H reduced to its diagonal
}  // namespace

void check_groups(const QuantScheme& scheme, int64_t cols) {
  const int64_t group = group_size_for(scheme, cols);
  SHARDQ_CHECK(cols == 0 || (group > 0 && cols % group == 0), ExitCode::input,
               "scheme {}: group size {} does not divide {} input columns", scheme.name, group, cols);
}

ScaleTensors allocate_scales(Backend& backend, const QuantScheme& scheme, int64_t count, int64_t rows, int64_t cols) {
  const int64_t groups = cols == 0 ? 0 : cols / group_size_for(scheme, cols);
  ScaleTensors tensors{Tensor(backend, DType::f32, {count, rows, groups}, "scales"), {}};
  if (!scheme.grid.symmetric) tensors.zeros = Tensor(backend, DType::i8, {count, rows, groups}, "zero points");
  return tensors;
}

void observe(Backend& backend, StackView weights, const QuantScheme& scheme, const float* importance,
             const ScaleTensors& target) {
  if (weights.cols == 0) return;
  const int64_t group = group_size_for(scheme, weights.cols);
  const int steps = scheme.observer == Observer::minmax ? 0 : kShrinkSteps;
  const float norm = scheme.observer == Observer::mse ? kMseNorm : kHessianNorm;
  backend.find_scales(weights, scheme.observer == Observer::hessian ? importance : nullptr, steps, norm, scheme.grid,
                      group, target.scales.as<float>(), target.zero_data());
}

Tensor observer_importance(Backend& backend, const QuantScheme& scheme, const HessianStatistics& statistics,
                           const std::vector<MatrixOutcome>& outcomes) {
  if (scheme.observer != Observer::hessian || statistics.diagonal.empty()) return {};
  const int64_t count = static_cast<int64_t>(outcomes.size());
  const int64_t cols = static_cast<int64_t>(statistics.diagonal.size()) / count;
  std::vector<float> importance = statistics.diagonal;
  for (int64_t e = 0; e < count; ++e)
    if (is_fallback(outcomes[e].verdict)) std::fill_n(importance.begin() + e * cols, cols, 1.0f);
  Tensor tensor(backend, DType::f32, {count, cols}, "observer importance");
  backend.upload(tensor.data(), importance.data(), tensor.bytes());
  return tensor;
}

void check_scales(Backend& backend, const ScaleTensors& scales, const QuantScheme& scheme, const MatrixNames& names) {
  // bf16 and f32 reach as far as any finite weight.
  if (scheme.grid.scale_dtype != DType::f16 || scales.scales.size() == 0) return;
  std::vector<float> host(static_cast<size_t>(scales.scales.size()));
  backend.download(host.data(), scales.scales.data(), scales.scales.bytes());
  const auto bad = std::find_if_not(host.begin(), host.end(), [](float v) { return std::isfinite(v); });
  if (bad == host.end()) return;
  const Shape& shape = scales.scales.shape();
  const int64_t index = bad - host.begin(), row = index / shape[2];
  fail(ExitCode::input, "scale of {} row {} group {} overflows float16: expected at most 65504; use bfloat16 scales",
       names[row / shape[1]], row % shape[1], index % shape[2]);
}

}  // namespace shardq
