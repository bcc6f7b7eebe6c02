#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.hpp"
#include "model/model_spec.hpp"

namespace shardq {

namespace {

/// theta^(-2i/d) in float, as the models were trained with: at position 30,000 the float's last bit is visible in the
/// angle.
std::vector<float> inverse_frequencies(double theta, int64_t head_dim) {
  std::vector<float> result(head_dim / 2);
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    result[i] = 1.0f / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
  }
  return result;
}

/// The base grows with the sequence beyond the model's limit. Source: NTK-aware scaling, as in modeling_rope_utils.py.
double dynamic_theta(const RopeSpec& rope, int64_t head_dim, int64_t length) {
  const double limit = static_cast<double>(rope.original_max_position);
  const double longest = std::max(static_cast<double>(length), limit);
  const double growth = rope.factor * longest / limit - (rope.factor - 1);
  return rope.theta * std::pow(growth, static_cast<double>(head_dim) / static_cast<double>(head_dim - 2));
}

/// Long waves are stretched by `factor`, short ones kept, and those between blended.
void stretch_llama3(const RopeSpec& rope, std::vector<float>& frequencies) {
  const double context = static_cast<double>(rope.original_max_position);
  for (float& f : frequencies) {
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength < context / rope.high_freq_factor) continue;
    if (wavelength > context / rope.low_freq_factor) {
      f = static_cast<float>(f / rope.factor);
      continue;
    }
    const double smooth =
        (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
    f = static_cast<float>((1 - smooth) * f / rope.factor + smooth * f);
  }
}

/// Between the dimensions that turn `beta_fast` and `beta_slow` times over the original context, a ramp from kept to
/// stretched. Source: Peng et al. 2023 (YaRN), section 3.2.
void stretch_yarn(const RopeSpec& rope, int64_t head_dim, std::vector<float>& frequencies) {
  const double dim = static_cast<double>(head_dim);
  const auto dimension_of = [&](double turns) {
    return dim * std::log(static_cast<double>(rope.original_max_position) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = dimension_of(rope.beta_fast), high = dimension_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = static_cast<float>(frequencies[i] * (ramp / rope.factor + 1 - ramp));
  }
}

double yarn_attention_factor(const RopeSpec& rope) {
  if (rope.attention_factor > 0) return rope.attention_factor;
  const auto scale = [&](double m) { return rope.factor <= 1 ? 1.0 : 0.1 * m * std::log(rope.factor) + 1.0; };
  return rope.mscale != 0 && rope.mscale_all_dim != 0 ? scale(rope.mscale) / scale(rope.mscale_all_dim) : scale(1);
}

}  // namespace

RopeTable rope_table(const ModelSpec& spec, int64_t length) {
  const RopeSpec& rope = spec.rope;
  const int64_t half = spec.head_dim / 2;
  double theta = rope.theta, scaling = 1;
  if (rope.type == RopeSpec::Type::dynamic) theta = dynamic_theta(rope, spec.head_dim, length);
  std::vector<float> frequencies = inverse_frequencies(theta, spec.head_dim);
  if (rope.type == RopeSpec::Type::linear)
    for (float& f : frequencies) f = static_cast<float>(f / rope.factor);
  if (rope.type == RopeSpec::Type::llama3) stretch_llama3(rope, frequencies);
  if (rope.type == RopeSpec::Type::yarn) {
    stretch_yarn(rope, spec.head_dim, frequencies);
    scaling = yarn_attention_factor(rope);
  }
  RopeTable table;
  table.cosine.resize(length * half);
  table.sine.resize(length * half);
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < length; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<float>(p) * frequencies[i];  // the product is a float, as in training
      table.cosine[p * half + i] = static_cast<float>(std::cos(angle) * scaling);
      table.sine[p * half + i] = static_cast<float>(std::sin(angle) * scaling);
    }
  }
  return table;
}

}  // namespace shardq
