#pragma once
#include <cstdint>

namespace shardq {

constexpr unsigned kWholeWarp = 0xffffffffu;

/// Sum over each group of `group` neighbouring lanes (a power of two, at most 32); every lane gets it. All 32 lanes
/// call.
template <class T>
__device__ T warp_sum(T value, int group = 32) {
  for (int distance = group / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kWholeWarp, value, distance);
  return value;
}

/// Sum over the block, in a fixed order; every thread gets it. blockDim.x is a multiple of 32; all threads call. Safe
/// to call again at once.
template <class T>
__device__ T block_sum(T value) {
  __shared__ T partial[32];
  const int warps = blockDim.x / 32;
  value = warp_sum(value);
  if (warps == 1) return value;
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = partial[0];
  for (int i = 1; i < warps; ++i) sum += partial[i];
  __syncthreads();
  return sum;
}

}  // namespace shardq
