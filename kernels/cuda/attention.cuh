#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/view.hpp"

namespace shardq {

/// Neighbouring queries of one sequence that one thread block takes, for one head.
struct AttentionTile {
  int64_t begin;   ///< first token of the sequence
  int32_t length;  ///< tokens of the sequence
  int32_t query;   ///< first query of the tile, counted from the sequence's first token
};

/// What every attention kernel gets; element type T.
template <class T>
struct AttentionInput {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  int64_t q_stride, k_stride, v_stride, out_stride;
  const AttentionTile* tiles;  ///< in device memory; thread block b takes tile b / heads, head b % heads
  int64_t tile_count;
  int heads, group;  ///< query heads, and how many of them share a key/value head
  int head_dim;
  int window;  ///< latest keys a query sees, itself included; INT32_MAX: all
  float scale;
};

/// Queries a tile of the plain kernel.
constexpr int kPlainRows = 32;
constexpr int kPlainMaxDim = 512;

/// Any element type, any head_dim up to kPlainMaxDim, any alignment; fp32 throughout, no tensor cores.
template <class T>
void launch_plain_attention(const AttentionInput<T>& input, cudaStream_t stream);

/// Queries a tile of the warpgroup kernel, and its largest head_dim.
constexpr int kWarpgroupRows = 128;
constexpr int kWarpgroupMaxDim = 128;

/// On compute capability 9.0 only. Requires: head_dim a multiple of 8, all rows on 16-byte boundaries.
void launch_warpgroup_attention(const AttentionInput<BFloat16>& input, cudaStream_t stream);

}  // namespace shardq
