#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <vector>

#include "core/view.hpp"

namespace shardq {

/// Rows [row, row + rows) of x, to be added to matrix `matrix`; `turn` counts the segments of one matrix from 0.
struct GramSegment {
  int64_t row = 0;
  int32_t rows = 0, matrix = 0, turn = 0;
  bool more = false;  ///< a later segment of this matrix follows
};

/// True where the kernel can read x: bf16 or fp16 rows that start on 16 bytes.
bool gram_accepts(const MatrixView& x);

/// Pairs of blocks that the device holds at one time.
int64_t gram_clusters();

/// Panels of the lower triangle of an n by n matrix, the pieces that two neighbouring blocks compute together, as
/// row << 16 | column in units of a panel, in an order that keeps neighbours in the cache together.
std::vector<uint32_t> gram_panels(int64_t n);

/// Cuts the rows of every matrix of a stack (offsets as for Backend::accumulate_gram) into segments, sorted by turn,
/// longest first, so that `clusters` pairs of blocks are busy to the end; with 0 clusters, to a length that depends on
/// the matrix alone.
std::vector<GramSegment> gram_segments(std::span<const int64_t> offsets, int64_t panels, int64_t clusters);

/// Device-side inputs of one launch.
struct GramCall {
  MatrixView x;  ///< [rows, n]
  StackView h;   ///< f32 [count, n, n]
  const GramSegment* segments = nullptr;
  int64_t segment_count = 0;
  const uint32_t* panels = nullptr;  ///< gram_panels(n)
  int64_t panel_count = 0;
  int* turns = nullptr;  ///< [count * panel_count * 2], zero
};

/// h[matrix] += x_s^T x_s for all segments, lower triangle, in the order of turns: the sums do not depend on timing.
void launch_gram(cudaStream_t stream, const GramCall& call);

}  // namespace shardq
