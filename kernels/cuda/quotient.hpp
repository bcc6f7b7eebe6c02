#pragma once
#include <cmath>

#include "core/dtype.hpp"

namespace shardq {

/// True where divide() may be used: the scale is stored in 16 bits and far from the ends of fp32's range.
SHARDQ_HD inline bool divides_fast(float scale) {
  return scale >= 0x1p-60f && scale <= 0x1p60f;
}

/// value / scale as IEEE division rounds it, for a scale of at most 11 significant bits (bf16 and fp16 scales) that
/// passes divides_fast(), in three operations instead of a dozen. `inverse`: 1 / scale to within 2 units in the last
/// place. Quotients below 2^-50 may differ, which no code can show.
///
/// Why it is exact: let m <= 11 be the bits of the scale. q0 = RN(value * inverse) is off by a few units in the last
/// place (ulp), so the remainder r = value - q0 * scale is a multiple of 2^-m ulp(value) of few bits, and the fused
/// multiply-add computes it exactly. q0 + r * inverse misses the true quotient by less than 2^-20 ulp. The true
/// quotient is never half-way between two floats (that times the scale would need 25 bits), nor closer to half-way than
/// 2^-(m + 2) ulp: rounding lands on the same float. Source: Markstein's division theorem, with a short divisor.
SHARDQ_HD inline float divide(float value, float scale, float inverse) {
#ifdef __CUDA_ARCH__
  const float q0 = __fmul_rn(value, inverse);
  const float q1 = __fmaf_rn(__fmaf_rn(-q0, scale, value), inverse, q0);
#else
  const float q0 = value * inverse;
  const float q1 = std::fma(std::fma(-q0, scale, value), inverse, q0);
#endif
  // Beyond any code the remainder may overflow; the first guess saturates as well.
  return q0 < 1e9f && q0 > -1e9f ? q1 : q0;
}

/// t rounded to an integer, ties to even, for |t| < 2^22. Adding 1.5 * 2^23 leaves no bits for a fraction, and the low
/// byte of the sum is the integer in two's complement.
struct Rounded {
  float value;
  uint32_t bits;  ///< low byte: the code
};
SHARDQ_HD inline Rounded round_even(float t) {
  constexpr float kShift = 12582912.0f;
#ifdef __CUDA_ARCH__
  const float shifted = __fadd_rn(t, kShift);
  return {__fsub_rn(shifted, kShift), float_bits(shifted)};
#else
  const float shifted = t + kShift;
  return {shifted - kShift, float_bits(shifted)};
#endif
}

}  // namespace shardq
