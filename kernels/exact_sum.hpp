#pragma once
#include <cmath>
#include <cstdint>

#include "core/dtype.hpp"

namespace shardq {

// Order-free sums of floats. A value v is split into two integers, v = coarse * 2^-8 + fine * 2^-56 (to the nearest
// 2^-56), and integers are added: the result is the same bits however the terms are grouped over ranks and in whatever
// order they come.
//
// |fine| <= 2^47 a term, so 2^15 terms a rank and element are safe; |sum of coarse| must stay below 2^54, that is |sum|
// < 7e13. Terms below 2^-32 lose low bits of their 24; sums of squares of activations are far above. A NaN or an
// infinity adds a quantum that no finite sum reaches, and reads back as NaN.

inline constexpr int64_t kExactPoison = int64_t{1} << 55;

struct ExactTerm {
  int64_t coarse, fine;
};

SHARDQ_HD inline ExactTerm exact_split(float value) {
  const float magnitude = value < 0 ? -value : value;
  if (!(magnitude < 7.0e13f)) return {kExactPoison, 0};  // also NaN
    // Both products are by powers of two and the difference is a multiple of value's last place: nothing rounds but the
    // two rint.
#ifdef __CUDA_ARCH__
  const double coarse = rint(static_cast<double>(value) * 256.0);
  const double rest = __dsub_rn(static_cast<double>(value), coarse * 0.00390625);
  return {static_cast<int64_t>(coarse), static_cast<int64_t>(rint(rest * 72057594037927936.0))};
#else
  const double coarse = std::rint(static_cast<double>(value) * 256.0);
  const double rest = static_cast<double>(value) - coarse * 0.00390625;
  return {static_cast<int64_t>(coarse), static_cast<int64_t>(std::rint(rest * 72057594037927936.0))};
#endif
}

/// The sum as a float. Normalises the carry first, so that equal sums read as equal bits.
SHARDQ_HD inline float exact_read(int64_t coarse, int64_t fine) {
  const int64_t limit = kExactPoison / 2;
  if (coarse >= limit || coarse <= -limit) return bits_float(0x7fc00000u);
  const int64_t unit = int64_t{1} << 48;  // fine units in a coarse one
  coarse += fine / unit;
  fine %= unit;
  return static_cast<float>(static_cast<double>(coarse) * 0.00390625 +
                            static_cast<double>(fine) * 1.3877787807814457e-17);
}

}  // namespace shardq
