#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "equivalence/equivalence.hpp"

namespace shardq::equivalence {

/// Where a matrix lies in a wider buffer: columns [offset, offset + cols) of rows of `stride` elements.
struct Layout {
  int64_t rows = 0, cols = 0, stride = 0, offset = 0;
  int64_t elements() const { return rows * stride; }
};
inline Layout dense(int64_t rows, int64_t cols) {
  return {rows, cols, cols, 0};
}
inline MatrixView view_of(const Tensor& buffer, const Layout& layout) {
  return {static_cast<char*>(buffer.data()) + layout.offset * size_of(buffer.dtype()), buffer.dtype(), layout.rows,
          layout.cols, layout.stride};
}
inline std::string to_string(const Layout& layout) {
  return fmt::format("[{}, {}] at column {} of {}", layout.rows, layout.cols, layout.offset, layout.stride);
}

/// Largest relative error of rounding to `dtype`: half a unit in the last place over the smallest mantissa.
inline double roundoff(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
}

/// Shapes that meet every path of a row kernel: nothing, single elements, primes, whole 16-byte words in one warp,
/// several warps, more than registers hold, column ranges on and off 16-byte boundaries.
inline std::vector<Layout> row_layouts() {
  return {
      dense(0, 64),    dense(5, 0),       dense(1, 1),       dense(7, 3),     dense(1, 128),           dense(1031, 32),
      dense(517, 128), dense(37, 127),    dense(13, 768),    dense(19, 2048), dense(5, 4104),          dense(3, 8192),
      dense(2, 40000), {23, 96, 320, 32}, {23, 96, 320, 33}, {11, 64, 67, 0}, {300, 128, 5 * 128, 128}};
}

}  // namespace shardq::equivalence
