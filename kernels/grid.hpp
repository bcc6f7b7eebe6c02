#pragma once
#include <cmath>
#include <cstdint>

#include "core/dtype.hpp"

namespace shardq {

/// The set of values a weight may take, before its scale: integers of `bits` bits (symmetric or with a signed zero point).
/// Room is left for FP8 E4M3 and FP4 E2M1, whose codes would be the bit patterns.
struct Grid {
  int bits = 4;           ///< 2, 3, 4 or 8 are exercised; any 2..8 works
  bool symmetric = true;  ///< zero point is 0
  DType scale_dtype = DType::bf16;  ///< dtype that scales are stored in; they are rounded to it before any code is computed

  SHARDQ_HD int qmin() const { return -(1 << (bits - 1)); }
  SHARDQ_HD int qmax() const { return (1 << (bits - 1)) - 1; }
};

// The three functions below are THE definition of quantization: solver loop, rounding, dequantization and tests on both
// backends call them, so that host and device produce the same bits. Divisions and products are IEEE, never contracted.

/// The code nearest to `value`: rint(clamp(value / scale + zero)), ties to even, as compressed-tensors computes it.
SHARDQ_HD inline int quantize_code(float value, float scale, int zero, const Grid& grid) {
#ifdef __CUDA_ARCH__
  float t = __fadd_rn(__fdiv_rn(value, scale), static_cast<float>(zero));
#else
  float t = value / scale + static_cast<float>(zero);
#endif
  const float lo = static_cast<float>(grid.qmin()), hi = static_cast<float>(grid.qmax());
  t = t < lo ? lo : t > hi ? hi : t;
  return static_cast<int>(rintf(t));
}

/// What a reader of the checkpoint reconstructs: (code - zero) * scale, rounded to the dtype of the scale.
SHARDQ_HD inline float dequantize_code(int code, float scale, int zero, DType scale_dtype) {
#ifdef __CUDA_ARCH__
  return round_to(scale_dtype, __fmul_rn(static_cast<float>(code - zero), scale));
#else
  return round_to(scale_dtype, static_cast<float>(code - zero) * scale);
#endif
}

/// Scale and zero point of a group whose values span [lowest, highest].
struct ScaleZero {
  float scale;
  int zero;
};

/// Smallest positive normal number of a scale dtype: a scale below it would lose bits or vanish in the file.
SHARDQ_HD inline float smallest_normal(DType dtype) { return dtype == DType::f16 ? 6.103515625e-05f : 1.1754943508222875e-38f; }

/// Source: numerics.md "Grid". Symmetric: absmax / ((2^b - 1) / 2); asymmetric: (max - min) / (2^b - 1), min <= 0 <= max.
/// The result is rounded to the stored dtype, and never zero. An overflow of fp16 gives +inf, which callers report.
SHARDQ_HD inline ScaleZero scale_of_range(float lowest, float highest, const Grid& grid) {
  lowest = lowest < 0.0f ? lowest : 0.0f;
  highest = highest > 0.0f ? highest : 0.0f;
  const float steps = static_cast<float>((1 << grid.bits) - 1);
  float scale;
  if (grid.symmetric) {
    const float absmax = -lowest > highest ? -lowest : highest;
#ifdef __CUDA_ARCH__
    scale = __fdiv_rn(absmax, steps * 0.5f);
#else
    scale = absmax / (steps * 0.5f);
#endif
  } else {
#ifdef __CUDA_ARCH__
    scale = __fdiv_rn(__fsub_rn(highest, lowest), steps);
#else
    scale = (highest - lowest) / steps;
#endif
  }
  scale = round_to(grid.scale_dtype, scale);
  const float floor = smallest_normal(grid.scale_dtype);
  scale = scale < floor ? floor : scale;
  int zero = 0;
  if (!grid.symmetric) {
#ifdef __CUDA_ARCH__
    float z = __fsub_rn(static_cast<float>(grid.qmin()), __fdiv_rn(lowest, scale));
#else
    float z = static_cast<float>(grid.qmin()) - lowest / scale;
#endif
    const float lo = static_cast<float>(grid.qmin()), hi = static_cast<float>(grid.qmax());
    z = z < lo ? lo : z > hi ? hi : z;
    zero = static_cast<int>(rintf(z));
  }
  return {scale, zero};
}

}  // namespace shardq
