#pragma once
#include <bit>
#include <cstdint>

namespace shardq::cpu {

/// e^x in float, without branches or calls, so that loops over it become vector code (the C library's expf is called
/// element by element). Method: x = n ln2 + r with |r| <= ln2 / 2, the Taylor polynomial of e^r to degree 7 (remainder
/// below 6e-9), then 2^n put into the exponent bits. Below -87 the result is 0 instead of a subnormal; above 88 it
/// stays at e^88. Relative error below 3e-7. NaN gives NaN.
inline float exponential(float x) {
  const float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  constexpr float kRoundingBias = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to the nearest integer
  const float biased = clamped * 1.44269504f + kRoundingBias;
  const float n = biased - kRoundingBias;
  // ln2 in two parts, the first with few bits, so that n * ln2_high is exact.
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float power =
      std::bit_cast<float>((std::bit_cast<uint32_t>(biased) - std::bit_cast<uint32_t>(kRoundingBias) + 127u) << 23);
  return x < -87.0f ? 0.0f : p * power;
}

}  // namespace shardq::cpu
