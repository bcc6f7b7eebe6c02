#pragma once
#include <algorithm>
#include <cstdint>

namespace shardq::cpu {

// Reductions over a fixed number of lanes: the compiler may not reorder a floating-point sum, so the order that vector
// code needs is written down here, the same on every machine.

inline constexpr int64_t kReductionLanes = 16;

/// Largest of `count` > 0 values; NaN is passed over unless it comes first.
inline float largest_of(const float* values, int64_t count) {
  float lanes[kReductionLanes];
  std::fill(lanes, lanes + kReductionLanes, values[0]);
  int64_t i = 0;
  for (; i + kReductionLanes <= count; i += kReductionLanes)
    for (int64_t l = 0; l < kReductionLanes; ++l) lanes[l] = values[i + l] > lanes[l] ? values[i + l] : lanes[l];
  for (int64_t l = 0; i < count; ++i, ++l) lanes[l] = values[i] > lanes[l] ? values[i] : lanes[l];
  float largest = lanes[0];
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

/// Sum of term(i) for i < count, in double.
template <class Term>
double sum_of(int64_t count, Term term) {
  double lanes[kReductionLanes] = {};
  int64_t i = 0;
  for (; i + kReductionLanes <= count; i += kReductionLanes)
    for (int64_t l = 0; l < kReductionLanes; ++l) lanes[l] += static_cast<double>(term(i + l));
  for (int64_t l = 0; i < count; ++i, ++l) lanes[l] += static_cast<double>(term(i));
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace shardq::cpu
