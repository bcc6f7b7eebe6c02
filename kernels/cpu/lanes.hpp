#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/grid.hpp"

// Quantization of a column of kLanes rows at once: the functions of grid.hpp written without branches, so that the
// compiler turns each loop into vector instructions. Same bits as grid.hpp; a test compares them.
namespace shardq::cpu {

/// Rows side by side in one tile: two AVX-512 registers of floats, so that two chains of dependent operations (a
/// division in each) overlap.
inline constexpr int kLanes = 32;

/// round_to without branches.
template <DType kDType>
inline float round_lane(float value) {
  const uint32_t bits = float_bits(value);
  if constexpr (kDType == DType::bf16) {
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    const uint32_t nan = (bits | 0x400000u) & 0xffff0000u;
    return bits_float((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  } else if constexpr (kDType == DType::f16) {
    const uint32_t sign = bits & 0x80000000u, magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & 0xffffe000u;
    // Below 2^-14 the spacing is 2^-24, the spacing of floats in [0.5, 1): one addition rounds.
    const uint32_t tiny = float_bits((bits_float(magnitude < 0x38800000u ? magnitude : 0u) + 0.5f) - 0.5f);
    uint32_t result = magnitude < 0x38800000u ? tiny : normal;
    result = magnitude >= 0x477ff000u ? 0x7f800000u : result;
    result = magnitude > 0x7f800000u ? 0x7fc00000u : result;
    return bits_float(sign | result);
  } else {
    return value;
  }
}

/// Bounds of the codes as floats.
struct CodeRange {
  float lowest, highest;
};
inline CodeRange code_range(const Grid& grid) {
  return {static_cast<float>(grid.qmin()), static_cast<float>(grid.qmax())};
}

/// code and quantized value nearest to p, for one lane of a vectorised loop.
template <DType kDType>
inline void quantize_lane(float p, float scale, float zero, CodeRange range, int32_t& code, float& value) {
  float t = p / scale + zero;
  t = t < range.lowest ? range.lowest : t;
  t = t > range.highest ? range.highest : t;
  code = static_cast<int32_t>(rintf(t));
  // Codes and zeros are small integers: their float difference is exact.
  value = round_lane<kDType>((static_cast<float>(code) - zero) * scale);
}

/// quantize_lane on kLanes rows.
template <DType kDType>
inline void quantize_lanes(const float* p, const float* scale, const float* zero, CodeRange range, int32_t* code,
                           float* value) {
#pragma omp simd
  for (int i = 0; i < kLanes; ++i) quantize_lane<kDType>(p[i], scale[i], zero[i], range, code[i], value[i]);
}

/// Calls f.template operator()<dtype>() for a stored scale dtype.
template <class F>
void with_scale_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bf16:
      return f.template operator()<DType::bf16>();
    case DType::f16:
      return f.template operator()<DType::f16>();
    default:
      return f.template operator()<DType::f32>();
  }
}

}  // namespace shardq::cpu
