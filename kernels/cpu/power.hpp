#pragma once
#include <cmath>
#include <cstdint>

#include "core/dtype.hpp"

namespace shardq::cpu {

/// x^y for x >= 0 and 0 < y < 8, without branches, so that a loop over it becomes vector instructions.
/// Relative error below 1e-6 for normal x and results; 0 where x is 0 or subnormal. Inf and NaN give NaN.
inline float power_lane(float x, float y) {
  // log2 x = exponent + log2 m with m in [sqrt(1/2), sqrt 2): an odd series in t = (m - 1) / (m + 1), |t| < 0.172.
  const uint32_t bits = float_bits(x);
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float m = bits_float(bits - (static_cast<uint32_t>(exponent) << 23));
  const float t = (m - 1.0f) / (m + 1.0f), t2 = t * t;
  float series = std::fma(t2, 0.32059890f, 0.41219858f);  // 2 / (ln 2 (2 i + 1)), i = 4, 3 ...
  series = std::fma(t2, series, 0.57707802f);
  series = std::fma(t2, series, 0.96179669f);
  series = std::fma(t2, series, 2.88539008f);
  // Integer and fraction are scaled apart: their sum would cost the fraction its last bits.
  const float whole = y * static_cast<float>(exponent), nearest = rintf(whole);
  const float rest = std::fma(y, t * series, std::fma(y, static_cast<float>(exponent), -nearest));
  const float step = rintf(rest), f = (rest - step) * 0.69314718f;  // 2^rest = 2^step e^f, |f| <= 0.347
  float e = std::fma(f, 1.0f / 720, 1.0f / 120);
  e = std::fma(f, e, 1.0f / 24);
  e = std::fma(f, e, 1.0f / 6);
  e = std::fma(f, e, 0.5f);
  e = std::fma(f, e, 1.0f);
  e = std::fma(f, e, 1.0f);
  const float scale_exponent = nearest + step;
  const float clamped = scale_exponent < -126.0f ? -126.0f : scale_exponent > 127.0f ? 127.0f : scale_exponent;
  const float scale = bits_float(static_cast<uint32_t>(static_cast<int32_t>(clamped) + 127) << 23);
  const float result = scale_exponent < -126.0f ? 0.0f : e * scale;
  return x < 1.1754943508222875e-38f ? 0.0f : result + (x - x);  // the zero is NaN for Inf and NaN
}

}  // namespace shardq::cpu
