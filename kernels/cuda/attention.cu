// Causal softmax attention over packed sequences, grouped query heads, optional sliding window.
//
//   out_i = sum_j p_ij v_j / sum_j p_ij,   p_ij = exp(scale q_i . k_j - m_i),   j <= i, j > i - window
//
// Online softmax after FlashAttention-2 (Dao 2023, algorithm 1): a block of four warps takes kRows queries of one head
// and walks over the visible keys kKeys at a time; scores, probabilities and the running output never leave registers.
// Row maxima and sums are fp32; exponentials are taken in base 2 with scale * log2(e) folded into one multiply-add;
// probabilities are rounded to bf16 for the second product, their sum is not. The output is rescaled only when some
// maximum of the warp grew.
//
// Mapping: a warp owns 16 kBlocks query rows, so the softmax needs no exchange beyond the four lanes that share a row.
// With kBlocks = 2, each fragment of K or V read from shared memory feeds two products: 32 FLOP a byte, above what the
// tensor cores need from shared memory (mma.sync m16n8k16). K and V are double-buffered by asynchronous copies; rows
// are padded by 16 bytes, which makes ldmatrix free of bank conflicts and keeps its addresses "base + constant".
//
// Work: tiles in order of (sequence, queries from the last backwards, head): heads that share K and V run side by side,
// and the blocks that start last are the light ones. Tiles of keys with nothing visible to a warp are skipped.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/environment_choice.hpp"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;

/// Shape of a thread block: head_dim up to kDim, 16 kBlocks query rows a warp, kKeys keys a step.
template <int kDim_, int kBlocks_, int kKeys_>
struct Plan {
  static constexpr int kDim = kDim_, kBlocks = kBlocks_, kKeys = kKeys_;
  static constexpr int kWarpRows = 16 * kBlocks;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kPitch = 2 * kDim + 16;  ///< bytes of a row in shared memory
  static constexpr int kTile = kKeys * kPitch;
  static constexpr int kShared = kRows * kPitch + 4 * kTile;  ///< queries, two stages of keys, two stages of values
};

/// Rows [0, valid_rows) of `source` to shared memory, zeros up to kCount rows and kDim columns.
template <class P, int kCount>
__device__ void load_rows(uint32_t target, const BFloat16* source, int64_t stride, int valid_rows, int head_dim) {
  constexpr int kChunks = P::kDim / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kCount * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * 8;
    const bool valid = row < valid_rows && column < head_dim;
    copy_async(target + row * P::kPitch + column * 2, valid ? source + row * stride + column : source, valid);
  }
}

/// A warp's rows: scores of one step, running output, maxima and sums.
template <class P>
struct Rows {
  float output[P::kBlocks][P::kDim / 8][4] = {};
  float score[P::kBlocks][P::kKeys / 8][4];
  float largest[P::kBlocks][2], total[P::kBlocks][2] = {};
};

/// score = q k^T for the warp's rows and one tile of keys.
template <class P>
__device__ void multiply_keys(Rows<P>& r, uint32_t queries, uint32_t keys) {
#pragma unroll
  for (int b = 0; b < P::kBlocks; ++b)
#pragma unroll
    for (int n = 0; n < P::kKeys / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) r.score[b][n][c] = 0;
#pragma unroll
  for (int d = 0; d < P::kDim / 16; ++d) {
    uint32_t q[P::kBlocks][4];
#pragma unroll
    for (int b = 0; b < P::kBlocks; ++b) load_matrices(q[b], queries + b * 16 * P::kPitch + d * 32);
#pragma unroll
    for (int n = 0; n < P::kKeys / 16; ++n) {
      uint32_t k[4];
      load_matrices(k, keys + n * 16 * P::kPitch + d * 32);
#pragma unroll
      for (int b = 0; b < P::kBlocks; ++b) {
        multiply_add(r.score[b][2 * n], q[b], k[0], k[1]);
        multiply_add(r.score[b][2 * n + 1], q[b], k[2], k[3]);
      }
    }
  }
}

/// Scores of invisible keys become -inf. `ahead`: first key of the tile minus first query of the warp.
template <class P>
__device__ void mask_scores(Rows<P>& r, int ahead, int window) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < P::kBlocks; ++b)
#pragma unroll
    for (int n = 0; n < P::kKeys / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = 16 * b + lane / 4 + c / 2 * 8;
        const int key = ahead + 8 * n + lane % 4 * 2 + c % 2;
        if (key > row || key <= row - window) r.score[b][n][c] = -INFINITY;
      }
}

/// Turns scores into unnormalised probabilities and brings output and sums to the new maxima.
template <class P>
__device__ void update_softmax(Rows<P>& r, float scale) {
  float shrink[P::kBlocks][2];
  bool grew = false;
#pragma unroll
  for (int b = 0; b < P::kBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = r.largest[b][h];
#pragma unroll
      for (int n = 0; n < P::kKeys / 8; ++n) now = fmaxf(now, fmaxf(r.score[b][n][2 * h], r.score[b][n][2 * h + 1]));
      now = fmaxf(now, __shfl_xor_sync(kWholeWarp, now, 1));
      now = fmaxf(now, __shfl_xor_sync(kWholeWarp, now, 2));
      // A row that has seen no key yet keeps -inf; 0 in its place gives exp(-inf) = 0 instead of exp(-inf + inf).
      const float base = now == -INFINITY ? 0.0f : now;
      shrink[b][h] = exp2_fast((r.largest[b][h] - base) * scale);
      r.largest[b][h] = now;
      const float shift = base * scale;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < P::kKeys / 8; ++n) {
        const float low = exp2_fast(fmaf(r.score[b][n][2 * h], scale, -shift));
        const float high = exp2_fast(fmaf(r.score[b][n][2 * h + 1], scale, -shift));
        r.score[b][n][2 * h] = low;
        r.score[b][n][2 * h + 1] = high;
        sum += low + high;
      }
      r.total[b][h] = fmaf(r.total[b][h], shrink[b][h], sum);
      grew = grew || shrink[b][h] != 1.0f;
    }
  }
  if (__any_sync(kWholeWarp, grew)) {
#pragma unroll
    for (int b = 0; b < P::kBlocks; ++b)
#pragma unroll
      for (int n = 0; n < P::kDim / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) r.output[b][n][c] *= shrink[b][c / 2];
  }
}

/// output += probabilities times values.
template <class P>
__device__ void multiply_values(Rows<P>& r, uint32_t values) {
#pragma unroll
  for (int j = 0; j < P::kKeys / 16; ++j) {
    uint32_t p[P::kBlocks][4];
#pragma unroll
    for (int b = 0; b < P::kBlocks; ++b) {
      // Two neighbouring accumulators of the first product are, lane by lane, one operand of the second.
      p[b][0] = pack_bf16(r.score[b][2 * j][0], r.score[b][2 * j][1]);
      p[b][1] = pack_bf16(r.score[b][2 * j][2], r.score[b][2 * j][3]);
      p[b][2] = pack_bf16(r.score[b][2 * j + 1][0], r.score[b][2 * j + 1][1]);
      p[b][3] = pack_bf16(r.score[b][2 * j + 1][2], r.score[b][2 * j + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < P::kDim / 16; ++n) {
      uint32_t v[4];
      load_matrices_transposed(v, values + j * 16 * P::kPitch + n * 32);
#pragma unroll
      for (int b = 0; b < P::kBlocks; ++b) {
        multiply_add(r.output[b][2 * n], p[b], v[0], v[1]);
        multiply_add(r.output[b][2 * n + 1], p[b], v[2], v[3]);
      }
    }
  }
}

/// Normalises, rounds and stores the warp's rows, by way of the shared memory of its own queries so that stores are
/// whole 16-byte words.
template <class P>
__device__ void store_rows(Rows<P>& r, unsigned char* own, BFloat16* out, int64_t stride, int valid_rows,
                           int head_dim) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int b = 0; b < P::kBlocks; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = r.total[b][h];
      total += __shfl_xor_sync(kWholeWarp, total, 1);
      total += __shfl_xor_sync(kWholeWarp, total, 2);
      const float inverse = 1.0f / total;
      unsigned char* row = own + (16 * b + lane / 4 + 8 * h) * P::kPitch + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < P::kDim / 8; ++n)
        *reinterpret_cast<uint32_t*>(row + n * 16) =
            pack_bf16(r.output[b][n][2 * h] * inverse, r.output[b][n][2 * h + 1] * inverse);
    }
  __syncwarp();
  constexpr int kChunks = P::kDim / 8;
  for (int i = lane; i < P::kWarpRows * kChunks; i += 32) {
    const int row = i / kChunks, column = i % kChunks * 8;
    if (row < valid_rows && column < head_dim)
      *reinterpret_cast<uint4*>(out + row * stride + column) =
          *reinterpret_cast<const uint4*>(own + row * P::kPitch + column * 2);
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads, 2) attend(AttentionInput<BFloat16> a) {
  extern __shared__ __align__(16) unsigned char attention_shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x % a.heads, kv_head = head / a.group;
  const AttentionTile tile = a.tiles[blockIdx.x / a.heads];
  const BFloat16* q = a.q + (tile.begin + tile.query) * a.q_stride + head * a.head_dim;
  const BFloat16* k = a.k + tile.begin * a.k_stride + kv_head * a.head_dim;
  const BFloat16* v = a.v + tile.begin * a.v_stride + kv_head * a.head_dim;
  const uint32_t queries = shared_address(attention_shared);
  const uint32_t keys = queries + P::kRows * P::kPitch, values = keys + 2 * P::kTile;
  const auto load_step = [&](int step) {
    const int64_t first = static_cast<int64_t>(step) * P::kKeys;
    const int valid = tile.length - step * P::kKeys;
    const uint32_t stage = step % 2 * P::kTile;
    load_rows<P, P::kKeys>(keys + stage, k + first * a.k_stride, a.k_stride, valid, a.head_dim);
    load_rows<P, P::kKeys>(values + stage, v + first * a.v_stride, a.v_stride, valid, a.head_dim);
    copy_commit();
  };

  const int first_step = max(0, tile.query - a.window + 1) / P::kKeys;
  const int end_step = (min(tile.query + P::kRows, tile.length) + P::kKeys - 1) / P::kKeys;
  load_rows<P, P::kRows>(queries, q, a.q_stride, tile.length - tile.query, a.head_dim);
  load_step(first_step);

  // This lane's row in the matrices that ldmatrix reads: queries and values go down the 16 rows first, keys across.
  const int own_row = warp * P::kWarpRows;
  const uint32_t lane_queries = queries + (own_row + lane % 16) * P::kPitch + lane / 16 * 16;
  const uint32_t lane_keys = keys + (lane % 8 + lane / 16 * 8) * P::kPitch + lane / 8 % 2 * 16;
  const uint32_t lane_values = values + lane % 16 * P::kPitch + lane / 16 * 16;
  const int first_query = tile.query + own_row, last_query = first_query + P::kWarpRows - 1;
  const float scale = a.scale * 1.4426950408889634f;

  Rows<P> rows;
#pragma unroll
  for (int b = 0; b < P::kBlocks; ++b) rows.largest[b][0] = rows.largest[b][1] = -INFINITY;
  for (int step = first_step; step < end_step; ++step) {
    copy_wait<0>();
    __syncthreads();  // the copies of all threads have landed, and nobody still reads the other stage
    if (step + 1 < end_step) load_step(step + 1);
    const int first_key = step * P::kKeys, last_key = first_key + P::kKeys - 1;
    if (first_key > last_query || last_key <= first_query - a.window || first_query >= tile.length) continue;
    const uint32_t stage = step % 2 * P::kTile;
    multiply_keys(rows, lane_queries, lane_keys + stage);
    if (last_key > first_query || first_key <= last_query - a.window)
      mask_scores(rows, first_key - first_query, a.window);
    update_softmax(rows, scale);
    multiply_values(rows, lane_values + stage);
  }
  if (first_query >= tile.length) return;
  store_rows(rows, attention_shared + own_row * P::kPitch,
             a.out + (tile.begin + first_query) * a.out_stride + head * a.head_dim, a.out_stride,
             tile.length - first_query, a.head_dim);
}

/// Tiles of `rows` queries: longest sequence first, last queries first.
std::vector<AttentionTile> cut_tiles(std::span<const int64_t> starts, int64_t rows) {
  std::vector<size_t> order(starts.size() - 1);
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](size_t s) { return starts[s + 1] - starts[s]; });
  std::vector<AttentionTile> tiles;
  for (const size_t s : order) {
    const int64_t length = starts[s + 1] - starts[s];
    for (int64_t tile = ceil_div(length, rows); tile-- > 0;)
      tiles.push_back({starts[s], static_cast<int32_t>(length), static_cast<int32_t>(tile * rows)});
  }
  return tiles;
}

/// Cuts the tiles, uploads them and hands the completed input to `launch`.
template <class T, class Launch>
void run_tiles(CudaBackend::State& state, AttentionInput<T> input, std::span<const int64_t> starts, int64_t rows,
               Launch&& launch) {
  const std::vector<AttentionTile> tiles = cut_tiles(starts, rows);
  if (tiles.empty()) return;
  SHARDQ_CHECK(static_cast<int64_t>(tiles.size()) * input.heads <= INT32_MAX, ExitCode::internal,
               "attention: {} tiles of {} heads are too many for one launch", tiles.size(), input.heads);
  const DeviceArray<AttentionTile> device_tiles(state, std::span<const AttentionTile>(tiles), "attention tiles");
  input.tiles = device_tiles.get();
  input.tile_count = static_cast<int64_t>(tiles.size());
  launch(input);
}

template <class P>
void run_plan(CudaBackend::State& state, const AttentionInput<BFloat16>& input, std::span<const int64_t> starts) {
  run_tiles(state, input, starts, P::kRows, [&](const AttentionInput<BFloat16>& complete) {
    SHARDQ_CUDA(cudaFuncSetAttribute(attend<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kShared));
    const auto blocks = static_cast<unsigned>(complete.tile_count * complete.heads);
    attend<P><<<blocks, kThreads, P::kShared, state.compute>>>(complete);
    SHARDQ_LAUNCHED("attention");
  });
}

#ifdef SHARDQ_WITH_SM90A
/// SHARDQ_ATTENTION=portable keeps to this file's kernel, so that both can be tested and timed on one card.
bool portable_only() {
  return environment_says("SHARDQ_ATTENTION", "portable");
}
#endif

/// Largest head_dim of this file's kernel.
constexpr int kMaxDim = 256;

void run_tensor_cores(CudaBackend::State& state, const AttentionInput<BFloat16>& input,
                      std::span<const int64_t> starts) {
#ifdef SHARDQ_WITH_SM90A
  if (state.compute_capability == 90 && input.head_dim <= kWarpgroupMaxDim && !portable_only())
    return run_tiles(state, input, starts, kWarpgroupRows, [&](const AttentionInput<BFloat16>& complete) {
      launch_warpgroup_attention(complete, state.compute);
    });
#endif
  if (input.head_dim <= 32) return run_plan<Plan<32, 2, 64>>(state, input, starts);
  if (input.head_dim <= 64) return run_plan<Plan<64, 2, 64>>(state, input, starts);
  if (input.head_dim <= 96) return run_plan<Plan<96, 2, 64>>(state, input, starts);
  if (input.head_dim > 128) return run_plan<Plan<kMaxDim, 1, 32>>(state, input, starts);
  // Two blocks a multiprocessor hide each other's softmax: with less shared memory (sm_80, sm_89) the steps are
  // shorter.
  using Large = Plan<128, 2, 64>;
  if (state.shared_memory_per_block >= 2 * Large::kShared) return run_plan<Large>(state, input, starts);
  run_plan<Plan<128, 2, 32>>(state, input, starts);
}

}  // namespace

void CudaBackend::attention(MatrixView q, MatrixView k, MatrixView v, int64_t head_dim, std::span<const int64_t> starts,
                            float scale, int64_t window, MatrixView out) {
  SHARDQ_CHECK(head_dim > 0 && q.cols % head_dim == 0 && k.cols % head_dim == 0 && k.cols > 0 && q.cols % k.cols == 0 &&
                   v.cols == k.cols && out.cols == q.cols,
               ExitCode::internal, "attention: q has {} columns, k {}, v {}, out {}, head_dim {}", q.cols, k.cols,
               v.cols, out.cols, head_dim);
  SHARDQ_CHECK(!starts.empty() && starts.front() >= 0 && starts.back() <= q.rows && std::ranges::is_sorted(starts) &&
                   k.rows == q.rows && v.rows == q.rows && out.rows == q.rows && q.rows <= INT32_MAX && window >= 0 &&
                   scale > 0,
               ExitCode::internal, "attention: {} query rows, {} key rows, {} sequence offsets, window {}, scale {}",
               q.rows, k.rows, starts.size(), window, scale);
  SHARDQ_CHECK(q.dtype == k.dtype && q.dtype == v.dtype && q.dtype == out.dtype, ExitCode::internal,
               "attention: q of {}, k of {}, v of {}, out of {}", safetensors_name(q.dtype), safetensors_name(k.dtype),
               safetensors_name(v.dtype), safetensors_name(out.dtype));
  state_->use();
  with_float_type(q.dtype, "attention", [&]<class T>(T) {
    const AttentionInput<T> input{.q = q.as<T>(),
                                  .k = k.as<T>(),
                                  .v = v.as<T>(),
                                  .out = out.as<T>(),
                                  .q_stride = q.stride,
                                  .k_stride = k.stride,
                                  .v_stride = v.stride,
                                  .out_stride = out.stride,
                                  .tiles = nullptr,
                                  .tile_count = 0,
                                  .heads = static_cast<int>(q.cols / head_dim),
                                  .group = static_cast<int>(q.cols / k.cols),
                                  .head_dim = static_cast<int>(head_dim),
                                  .window = window == 0 || window > INT32_MAX ? INT32_MAX : static_cast<int>(window),
                                  .scale = scale};
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (head_dim % 8 == 0 && head_dim <= kMaxDim && whole_words(q) && whole_words(k) && whole_words(v) &&
          whole_words(out))
        return run_tensor_cores(*state_, input, starts);
    }
    run_tiles(*state_, input, starts, kPlainRows,
              [&](const AttentionInput<T>& complete) { launch_plain_attention(complete, state_->compute); });
  });
}

}  // namespace shardq
