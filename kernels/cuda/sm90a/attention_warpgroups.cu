// Attention with Hopper's warpgroup products: the same computation as attention.cu, for head_dim up to 128 on sm_90a.
//
// After FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2). A block of 128 queries of one head: two warpgroups
// own 64 queries each; a third copies keys and values, 128 at a time, into two stages each and never waits for a copy:
// the barrier of a stage is told by the copies themselves. Consumers release a stage after the products that read it.
//
// Two overlaps keep the tensor cores busy: the warpgroups drift apart, so that one's softmax runs under the other's
// products; and a warpgroup starts the scores of the next keys before it multiplies the current probabilities with
// their values, so that its own softmax runs under its own second product.
//
// Registers of a consumer: scores 64, output 64, probabilities 32 (bf16), addresses and sums; the producer gives up the
// difference between the 168 that three warpgroups start with and the 232 that this takes.
// Copies are 16-byte cp.async with zero fill, not the tensor copy engine: rows past a sequence must read as zeros,
// because probability 0 times a neighbour's NaN would be NaN.
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/cuda_check.hpp"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/sm90a/warpgroup.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kConsumers = 2;    // warpgroups
constexpr int kWarpgroup = 128;  // threads
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // sum as at launch: 3 x 168
constexpr int kGroupRows = kWarpgroupRows / kConsumers;
constexpr int kKeys = 128;
constexpr int kStages = 2;
constexpr int kLine = 128;  // bytes: 64 columns of bf16

/// Byte addresses in shared memory. A matrix [rows, kDim] is kDim / 64 blocks of [rows] lines.
template <int kDim>
struct Layout {
  static constexpr int kBlocks = kDim / 64;
  static constexpr int kQueryBytes = kBlocks * kGroupRows * kLine;  // one warpgroup's
  static constexpr int kTileBytes = kBlocks * kKeys * kLine;        // one stage of keys or values
  static constexpr int kShared = 1024 + kConsumers * kQueryBytes + 2 * kStages * kTileBytes + 64;

  explicit __device__ Layout(uint32_t shared)
      : queries((shared + 1023) & ~1023u),
        keys(queries + kConsumers * kQueryBytes),
        values(keys + kStages * kTileBytes),
        barriers(values + kStages * kTileBytes) {}
  __device__ uint32_t keys_full(int stage) const { return barriers + 8 * stage; }
  __device__ uint32_t keys_empty(int stage) const { return barriers + 16 + 8 * stage; }
  __device__ uint32_t values_full(int stage) const { return barriers + 32 + 8 * stage; }
  __device__ uint32_t values_empty(int stage) const { return barriers + 48 + 8 * stage; }

  uint32_t queries, keys, values, barriers;
};

/// What a block works on, in units of the sequence.
struct Work {
  AttentionTile tile;
  int head, kv_head;
  int first, end;  // steps of kKeys that some query of the block sees
};

__device__ Work find_work(const AttentionInput<BFloat16>& a) {
  Work w;
  w.head = blockIdx.x % a.heads;
  w.kv_head = w.head / a.group;
  w.tile = a.tiles[blockIdx.x / a.heads];
  w.first = max(0, w.tile.query - a.window + 1) / kKeys;
  w.end = (min(w.tile.query + kWarpgroupRows, w.tile.length) + kKeys - 1) / kKeys;
  return w;
}

/// Rows [0, valid) of `source`, zeros up to `rows` and kDim columns, as swizzled lines. `threads` neighbouring threads
/// share the work.
template <int kDim, int kRows, int kCopiers>
__device__ void copy_rows(uint32_t target, const BFloat16* source, int64_t stride, int valid, int head_dim,
                          int thread) {
  constexpr int kWords = kDim / 8;  // of a row
  constexpr int kStep = kCopiers / kWords;
  const int word = thread % kWords, first = thread / kWords;
  const bool inside = word * 8 < head_dim;
  const BFloat16* from = source + first * stride + word * 8;
  const uint32_t block = target + word / 8 * (kRows * kLine);
#pragma unroll 4
  for (int row = first; row < kRows; row += kStep, from += kStep * stride) {
    const bool real = inside && row < valid;
    copy_async(block + row * kLine + ((word ^ row) & 7) * 16, real ? from : source, real);
  }
}

template <int kDim>
__device__ void produce(const AttentionInput<BFloat16>& a, const Work& w, const Layout<kDim>& at) {
  const int thread = threadIdx.x % kWarpgroup;
  const BFloat16* k = a.k + w.tile.begin * a.k_stride + w.kv_head * a.head_dim;
  const BFloat16* v = a.v + w.tile.begin * a.v_stride + w.kv_head * a.head_dim;
  for (int step = w.first; step < w.end; ++step) {
    const int turn = step - w.first, stage = turn % kStages, parity = (turn / kStages & 1) ^ 1;
    const int64_t first = static_cast<int64_t>(step) * kKeys;
    const int valid = w.tile.length - step * kKeys;
    barrier_wait(at.keys_empty(stage), parity);
    copy_rows<kDim, kKeys, kWarpgroup>(at.keys + stage * Layout<kDim>::kTileBytes, k + first * a.k_stride, a.k_stride,
                                       valid, a.head_dim, thread);
    barrier_arrive_copies(at.keys_full(stage));
    barrier_wait(at.values_empty(stage), parity);
    copy_rows<kDim, kKeys, kWarpgroup>(at.values + stage * Layout<kDim>::kTileBytes, v + first * a.v_stride, a.v_stride,
                                       valid, a.head_dim, thread);
    barrier_arrive_copies(at.values_full(stage));
  }
  copy_commit();
  copy_wait<0>();  // a thread with copies in flight must not end
}

/// One consumer thread's part of its warpgroup's 64 rows: rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <int kDim>
struct Rows {
  float output[kDim / 2] = {};
  float score[kKeys / 2];
  uint32_t probability[kKeys / 16][4];
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {}, shrink[2];
};

/// Starts score = q k^T.
template <int kDim>
__device__ void start_scores(Rows<kDim>& r, uint64_t queries, uint64_t keys) {
  pin(r.score);
  products_begin();
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    const uint32_t along = d % 4 * 32;  // 16 columns of a line
    multiply_shared(r.score, advance(queries, d / 4 * kGroupRows * kLine + along),
                    advance(keys, d / 4 * kKeys * kLine + along), d > 0);
  }
  products_commit();
}

/// Starts output += probability v.
template <int kDim>
__device__ void start_output(Rows<kDim>& r, uint64_t values) {
  pin(r.output);
  products_begin();
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j) multiply_registers(r.output, r.probability[j], advance(values, j * 16 * kLine));
  products_commit();
}

/// Scores of invisible keys become -inf. `ahead`: first key of the step minus first query of the warp.
template <int kDim>
__device__ void mask_scores(Rows<kDim>& r, int ahead, int window) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int row = lane / 4 + i % 4 / 2 * 8, key = ahead + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (key > row || key <= row - window) r.score[i] = -INFINITY;
  }
}

/// Scores become unnormalised probabilities; shrink is what earlier output and sums must be multiplied by.
template <int kDim>
__device__ void update_softmax(Rows<kDim>& r, float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float now = r.largest[h];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) now = fmaxf(now, fmaxf(r.score[4 * n + 2 * h], r.score[4 * n + 2 * h + 1]));
    now = fmaxf(now, __shfl_xor_sync(kWholeWarp, now, 1));
    now = fmaxf(now, __shfl_xor_sync(kWholeWarp, now, 2));
    // A row that has seen no key yet keeps -inf; 0 in its place gives exp(-inf) = 0 instead of exp(-inf + inf).
    const float base = now == -INFINITY ? 0.0f : now;
    r.shrink[h] = exp2_fast((r.largest[h] - base) * scale);
    r.largest[h] = now;
    const float shift = base * scale;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const float low = exp2_fast(fmaf(r.score[4 * n + 2 * h], scale, -shift));
      const float high = exp2_fast(fmaf(r.score[4 * n + 2 * h + 1], scale, -shift));
      r.score[4 * n + 2 * h] = low;
      r.score[4 * n + 2 * h + 1] = high;
      sum += low + high;
    }
    r.total[h] = fmaf(r.total[h], r.shrink[h], sum);
  }
}

/// Rounds the probabilities into operands of the second product: accumulators of 16 keys are, lane by lane, one
/// operand.
template <int kDim>
__device__ void pack_probabilities(Rows<kDim>& r) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) r.probability[j][i] = pack_bf16(r.score[8 * j + 2 * i], r.score[8 * j + 2 * i + 1]);
}

template <int kDim>
__device__ void shrink_output(Rows<kDim>& r) {
  if (!__any_sync(kWholeWarp, r.shrink[0] != 1.0f || r.shrink[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) r.output[i] *= r.shrink[i % 4 / 2];
}

/// Normalises, rounds and stores the warp's 16 rows, by way of the shared memory of their queries so that stores are
/// whole 16-byte words.
template <int kDim>
__device__ void store_rows(Rows<kDim>& r, unsigned char* own, BFloat16* out, int64_t stride, int valid, int head_dim) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = r.total[h];
    total += __shfl_xor_sync(kWholeWarp, total, 1);
    total += __shfl_xor_sync(kWholeWarp, total, 2);
    const float inverse = 1.0f / total;
    const int row = 16 * warp + lane / 4 + 8 * h;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      *reinterpret_cast<uint32_t*>(own + (n / 8 * kGroupRows + row) * kLine + ((n ^ row) & 7) * 16 + lane % 4 * 4) =
          pack_bf16(r.output[4 * n + 2 * h] * inverse, r.output[4 * n + 2 * h + 1] * inverse);
  }
  __syncwarp();
  constexpr int kWords = kDim / 8;
  for (int i = lane; i < 16 * kWords; i += 32) {
    const int row = 16 * warp + i / kWords, word = i % kWords;
    if (row < valid && word * 8 < head_dim)
      *reinterpret_cast<uint4*>(out + row * stride + word * 8) =
          *reinterpret_cast<const uint4*>(own + (word / 8 * kGroupRows + row) * kLine + ((word ^ row) & 7) * 16);
  }
}

template <int kDim>
__device__ void consume(const AttentionInput<BFloat16>& a, const Work& w, const Layout<kDim>& at,
                        unsigned char* shared_base, uint32_t shared) {
  const int group = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup, warp = thread / 32;
  const bool speaker = threadIdx.x % 32 == 0;
  const int first_query = w.tile.query + group * kGroupRows, last_query = first_query + kGroupRows - 1;
  const int valid = w.tile.length - first_query;
  const uint32_t own = at.queries + group * Layout<kDim>::kQueryBytes;
  const BFloat16* q = a.q + (w.tile.begin + w.tile.query) * a.q_stride + w.head * a.head_dim;
  copy_rows<kDim, kGroupRows, kWarpgroup>(own, q + (valid > 0 ? group * kGroupRows * a.q_stride : 0), a.q_stride, valid,
                                          a.head_dim, thread);
  copy_commit();
  copy_wait<0>();
  publish_to_products();
  named_barrier(1 + group, kWarpgroup);

  const uint64_t queries = describe(own, 0, 8 * kLine);
  const uint64_t keys = describe(at.keys, 0, 8 * kLine), values = describe(at.values, kKeys * kLine, 8 * kLine);
  const float scale = a.scale * 1.4426950408889634f;
  const int warp_query = first_query + 16 * warp;
  const auto keys_ready = [&](int step) {
    const int turn = step - w.first;
    barrier_wait(at.keys_full(turn % kStages), turn / kStages & 1);
    publish_to_products();
  };
  const auto values_ready = [&](int step) {
    const int turn = step - w.first;
    barrier_wait(at.values_full(turn % kStages), turn / kStages & 1);
    publish_to_products();
  };
  const auto keys_done = [&](int step) {
    if (speaker) barrier_arrive(at.keys_empty((step - w.first) % kStages));
  };
  const auto values_done = [&](int step) {
    if (speaker) barrier_arrive(at.values_empty((step - w.first) % kStages));
  };
  // Steps that this warpgroup does not need are released as they come: early arrivals would end the wrong phase.
  const auto skip = [&](int begin, int end) {
    for (int step = begin; step < end; ++step) {
      keys_ready(step);
      __syncwarp();
      keys_done(step);
      values_ready(step);
      __syncwarp();
      values_done(step);
    }
  };
  const auto start_keys = [&](Rows<kDim>& r, int step) {
    keys_ready(step);
    start_scores(r, queries, advance(keys, (step - w.first) % kStages * Layout<kDim>::kTileBytes));
  };
  const auto start_values = [&](Rows<kDim>& r, int step) {
    values_ready(step);
    start_output(r, advance(values, (step - w.first) % kStages * Layout<kDim>::kTileBytes));
  };
  const auto soften = [&](Rows<kDim>& r, int step) {
    const int first_key = step * kKeys, last_key = first_key + kKeys - 1;
    if (last_key > warp_query || first_key <= warp_query + 15 - a.window)
      mask_scores(r, first_key - warp_query, a.window);
    update_softmax(r, scale);
  };

  if (valid <= 0) return skip(w.first, w.end);
  const int begin = max(w.first, max(0, first_query - a.window + 1) / kKeys);
  const int end = min(w.end, last_query / kKeys + 1);
  skip(w.first, begin);
  Rows<kDim> rows;
  start_keys(rows, begin);
  products_wait<0>();
  pin(rows.score);
  keys_done(begin);
  soften(rows, begin);
  pack_probabilities(rows);
  for (int step = begin; step + 1 < end; ++step) {
    start_keys(rows, step + 1);
    start_values(rows, step);
    products_wait<1>();
    pin(rows.score);
    keys_done(step + 1);
    soften(rows, step + 1);
    products_wait<0>();
    pin(rows.output);
    values_done(step);
    shrink_output(rows);
    pack_probabilities(rows);
  }
  start_values(rows, end - 1);
  products_wait<0>();
  pin(rows.output);
  values_done(end - 1);
  skip(end, w.end);
  named_barrier(1 + group, kWarpgroup);  // the queries' memory is free: no warp's product still reads it
  store_rows(rows, shared_base + (own - shared),
             a.out + (w.tile.begin + first_query) * a.out_stride + w.head * a.head_dim, a.out_stride, valid,
             a.head_dim);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) attend_warpgroups(AttentionInput<BFloat16> a) {
  extern __shared__ __align__(16) unsigned char warpgroup_shared[];
  const uint32_t shared = shared_address(warpgroup_shared);
  const Layout<kDim> at(shared);
  const Work work = find_work(a);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(at.keys_full(stage), kWarpgroup);  // the threads of the producer
      barrier_init(at.values_full(stage), kWarpgroup);
      barrier_init(at.keys_empty(stage), kConsumers * 4);  // the warps of the consumers
      barrier_init(at.values_empty(stage), kConsumers * 4);
    }
  }
  __syncthreads();
  if (threadIdx.x < kConsumers * kWarpgroup) {
    take_registers<kConsumerRegisters>();
    consume(a, work, at, warpgroup_shared, shared);
  } else {
    leave_registers<kProducerRegisters>();
    produce(a, work, at);
  }
}

template <int kDim>
void launch(const AttentionInput<BFloat16>& input, cudaStream_t stream) {
  constexpr int kShared = Layout<kDim>::kShared;
  SHARDQ_CUDA(cudaFuncSetAttribute(attend_warpgroups<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  attend_warpgroups<kDim><<<static_cast<unsigned>(input.tile_count * input.heads), kThreads, kShared, stream>>>(input);
  SHARDQ_LAUNCHED("attention on warpgroups");
}

}  // namespace

void launch_warpgroup_attention(const AttentionInput<BFloat16>& input, cudaStream_t stream) {
  if (input.head_dim <= 64) return launch<64>(input, stream);
  launch<128>(input, stream);
}

}  // namespace shardq
