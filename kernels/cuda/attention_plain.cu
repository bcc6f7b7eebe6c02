// Attention without tensor cores, for fp32 (and fp16) activations and for shapes that the tensor-core kernel does not
// take.
//
// One warp a query: 32 keys at a time, a lane a key for the scores, a lane every 32nd column for the weighted sum of
// values; online softmax in fp32. Correct for everything, and about a hundred times slower than attention.cu.
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/cuda_check.hpp"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;

/// kHeld columns of the output a lane: column = lane + 32 i.
template <int kHeld, class T>
__global__ void __launch_bounds__(kThreads) attend_plain(AttentionInput<T> a) {
  __shared__ float queries[kWarps][kHeld * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x % a.heads, kv_head = head / a.group;
  const AttentionTile tile = a.tiles[blockIdx.x / a.heads];
  const T* keys = a.k + tile.begin * a.k_stride + kv_head * a.head_dim;
  const T* values = a.v + tile.begin * a.v_stride + kv_head * a.head_dim;
  const int end = min(tile.query + kPlainRows, tile.length);
  for (int query = tile.query + warp; query < end; query += kWarps) {
    const T* q = a.q + (tile.begin + query) * a.q_stride + head * a.head_dim;
    for (int d = lane; d < a.head_dim; d += 32) queries[warp][d] = widen(q[d]);
    __syncwarp();
    float sum[kHeld] = {};
    float largest = -INFINITY, total = 0;
    for (int first = max(0, query - a.window + 1); first <= query; first += 32) {
      const int key = first + lane;
      float score = -INFINITY;
      if (key <= query) {
        score = 0;
        for (int d = 0; d < a.head_dim; ++d) score = fmaf(queries[warp][d], widen(keys[key * a.k_stride + d]), score);
        score *= a.scale;
      }
      float now = fmaxf(largest, score);
      for (int distance = 16; distance > 0; distance /= 2) now = fmaxf(now, __shfl_xor_sync(kWholeWarp, now, distance));
      const float weight = expf(score - now), before = expf(largest - now);
      largest = now;
      total = total * before + warp_sum(weight);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) sum[i] *= before;
      const int visible = min(32, query - first + 1);
      for (int other = 0; other < visible; ++other) {
        const float w = __shfl_sync(kWholeWarp, weight, other);
        const T* value = values + (first + other) * a.v_stride;
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
          if (lane + 32 * i < a.head_dim) sum[i] = fmaf(w, widen(value[lane + 32 * i]), sum[i]);
      }
    }
    T* out = a.out + (tile.begin + query) * a.out_stride + head * a.head_dim;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (lane + 32 * i < a.head_dim) out[lane + 32 * i] = narrow<T>(sum[i] / total);
    __syncwarp();
  }
}

}  // namespace

template <class T>
void launch_plain_attention(const AttentionInput<T>& input, cudaStream_t stream) {
  SHARDQ_CHECK(input.head_dim <= kPlainMaxDim, ExitCode::internal,
               "attention: head_dim {}, at most {} is supported on CUDA", input.head_dim, kPlainMaxDim);
  const auto blocks = static_cast<unsigned>(input.tile_count * input.heads);
  if (input.head_dim <= 128)
    attend_plain<4><<<blocks, kThreads, 0, stream>>>(input);
  else
    attend_plain<kPlainMaxDim / 32><<<blocks, kThreads, 0, stream>>>(input);
  SHARDQ_LAUNCHED("attention without tensor cores");
}

template void launch_plain_attention(const AttentionInput<float>&, cudaStream_t);
template void launch_plain_attention(const AttentionInput<Float16>&, cudaStream_t);
template void launch_plain_attention(const AttentionInput<BFloat16>&, cudaStream_t);

}  // namespace shardq
