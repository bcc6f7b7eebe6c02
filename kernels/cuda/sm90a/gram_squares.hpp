#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "core/view.hpp"

namespace shardq {

/// Rows [row, row + rows) of x, to be added to matrix `matrix`; `turn` counts the segments of one matrix from 0.
struct GramSegment {
  int64_t row = 0;
  int32_t rows = 0, matrix = 0, turn = 0;
  bool more = false;  ///< a later segment of this matrix follows
};

/// Edge of the square that two neighbouring blocks compute together.
inline constexpr int64_t kGramSquare = 256;
/// Squares of the lower triangle of an n by n matrix.
inline int64_t gram_squares(int64_t n) {
  const int64_t edge = (n + kGramSquare - 1) / kGramSquare;
  return edge * (edge + 1) / 2;
}
/// Row and column of every square as row << 16 | column, in an order that keeps neighbours in the cache together.
std::vector<uint32_t> gram_square_order(int64_t n);

/// True where the kernel can read x: bf16 or fp16 rows that start on 16 bytes.
bool gram_accepts(const MatrixView& x);

/// Device-side inputs of one launch.
struct GramCall {
  MatrixView x;  ///< [rows, n]
  StackView h;   ///< f32 [count, n, n]
  const GramSegment* segments = nullptr;
  int64_t segment_count = 0;
  const uint32_t* squares = nullptr;  ///< gram_square_order(n)
  int* turns = nullptr;               ///< [count * gram_squares(n) * 2], zero
};

/// h[matrix] += x_s^T x_s for all segments, lower triangle, in the order of turns: the sums do not depend on timing.
/// Segments must be sorted by turn.
void launch_gram(cudaStream_t stream, const GramCall& call);

}  // namespace shardq
