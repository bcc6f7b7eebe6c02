#pragma once
#include <memory>

#include "pipeline/host_buffer.hpp"
#include "pipeline/tap_solver.hpp"

namespace shardq {

/// Host copy of rows [first_row, first_row + row_count) of a solved tap's [count * rows] rows: what the background
/// threads pack and write.
struct HostTap {
  HostBuffer codes, scales,
      zeros;  ///< i8 [row_count, cols], f32 [row_count, groups], i8 the same (unused when symmetric)
  int64_t first_row = 0, row_count = 0, cols = 0, groups = 0;
  bool symmetric = true;

  const int8_t* codes_at(int64_t row) const { return codes.as<int8_t>() + (row - first_row) * cols; }
  const float* scales_at(int64_t row) const { return scales.as<float>() + (row - first_row) * groups; }
  const int8_t* zeros_at(int64_t row) const { return zeros.as<int8_t>() + (row - first_row) * groups; }
};

/// A whole tap of zeros.
HostTap empty_tap(Backend& backend, const ModelSpec::TapShape& shape, const QuantScheme& scheme);
/// The whole tap, or only the rows from the first to the last that this rank solved.
std::shared_ptr<const HostTap> download_tap(Backend& backend, const TapResult& result, bool whole);

}  // namespace shardq
