// Mixture-of-experts routing: softmax and top-k, stable sort of slots by expert, gather and weighted combination of
// rows.
//
// route: one warp a token, its logits in registers. Choices are made on the logits, by repeated maximum of a key that
//   orders by value and then by lower index, so that they do not depend on how exp() rounds.
// sort_by_expert: counting sort. A warp owns kSegment consecutive slots: (1) counts its segment by expert, (2) counts
// are
//   scanned per expert over segments and then over experts, (3) the warp walks its segment again in order, 32 slots at
//   a time, and gives each slot the next place of its expert. Order inside an expert is the order of slots. A radix
//   sort would move keys and values through memory once per digit and leave the offsets to be searched.
// gather_rows, dispatch_rows, combine_rows: memory-bound copies in 16-byte words. Gathering for experts reads a token's
//   row top_k times, far apart, mostly from memory; scattering reads it once and holds it in registers: (1 + top_k)
//   instead of 2 top_k rows a token. A combination reads top_k rows a token in fixed order.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/environment_choice.hpp"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxExperts = 1024;
constexpr int kSegment = 1024;

// ---- route --------------------------------------------------------------------------------------

/// Larger for a larger value, then for a lower index; 0 is below every key. NaN counts as the smallest value.
__device__ uint64_t choice_key(float value, int index) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 and 0 are equal
  const uint32_t ordered = value != value ? 0u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

/// kHeld logits a lane; expert = lane + 32 i.
template <int kHeld, class T>
__global__ void __launch_bounds__(kThreads) route_tokens(const T* logits, int64_t stride, int64_t tokens, int experts,
                                                         int top_k, bool normalize, int32_t* ids, float* weights) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  uint64_t keys[kHeld];
  float values[kHeld];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int expert = lane + 32 * i;
    values[i] = expert < experts ? widen(logits[token * stride + expert]) : -INFINITY;
    keys[i] = expert < experts ? choice_key(values[i], expert) : 0;
    largest = fmaxf(largest, values[i]);
  }
  for (int distance = 16; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, distance));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (lane + 32 * i < experts) sum += expf(values[i] - largest);
  sum = warp_sum(sum);

  // Lane c % 32 keeps choice c; there can be more choices than lanes only where top_k > 32.
  float chosen = 0;
  for (int choice = 0; choice < top_k; ++choice) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) best = keys[i] > best ? keys[i] : best;
    for (int distance = 16; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(kWholeWarp, static_cast<unsigned long long>(best), distance);
      best = other > best ? other : best;
    }
    const int expert = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    float mine = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (keys[i] == best) {
        keys[i] = 0;
        mine = values[i];
      }
    }
    const float probability = expf(__shfl_sync(kWholeWarp, mine, expert % 32) - largest) / sum;
    chosen += probability;
    if (lane == choice % 32) {
      ids[token * top_k + choice] = expert;
      weights[token * top_k + choice] = probability;
    }
  }
  if (!normalize) return;
  for (int choice = lane; choice < top_k; choice += 32) weights[token * top_k + choice] /= chosen;
}

// ---- sort_by_expert -----------------------------------------------------------------------------

/// An id outside is left out of the counts, so that the total gives it away to the host.
__device__ bool valid_expert(int32_t id, int experts) {
  return 0 <= id && id < experts;
}

/// counts[expert][segment] = slots of the segment that chose the expert.
__global__ void __launch_bounds__(kThreads)
    count_segments(const int32_t* ids, int64_t slots, int experts, int segments, int32_t* counts) {
  extern __shared__ int32_t local[];  // [kWarps][experts]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int segment = blockIdx.x * kWarps + warp;
  int32_t* mine = local + warp * experts;
  for (int e = lane; e < experts; e += 32) mine[e] = 0;
  __syncwarp();
  if (segment >= segments) return;
  const int64_t begin = static_cast<int64_t>(segment) * kSegment, end = min(begin + kSegment, slots);
  for (int64_t slot = begin + lane; slot < end; slot += 32)
    if (valid_expert(ids[slot], experts)) atomicAdd(mine + ids[slot], 1);
  __syncwarp();
  for (int e = lane; e < experts; e += 32) counts[static_cast<int64_t>(e) * segments + segment] = mine[e];
}

/// Exclusive scan of each expert's counts over segments, in place; totals[expert]. One block an expert.
__global__ void __launch_bounds__(kThreads) scan_segments(int32_t* counts, int segments, int32_t* totals) {
  __shared__ int32_t warp_totals[kWarps];
  int32_t* row = counts + static_cast<int64_t>(blockIdx.x) * segments;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t before = 0;
  for (int begin = 0; begin < segments; begin += kThreads) {
    const int segment = begin + threadIdx.x;
    const int32_t count = segment < segments ? row[segment] : 0;
    int32_t inclusive = count;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t left = __shfl_up_sync(kWholeWarp, inclusive, distance);
      if (lane >= distance) inclusive += left;
    }
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    int32_t earlier = before;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) earlier += warp_totals[w];
      before += warp_totals[w];
    }
    if (segment < segments) row[segment] = earlier + inclusive - count;
    __syncthreads();
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

/// offsets[e] = sum of totals before e; experts + 1 values. One warp.
__global__ void scan_experts(const int32_t* totals, int experts, int64_t* offsets) {
  const int lane = threadIdx.x;
  int64_t before = 0;
  for (int begin = 0; begin < experts; begin += 32) {
    const int64_t count = begin + lane < experts ? totals[begin + lane] : 0;
    long long inclusive = count;
    for (int distance = 1; distance < 32; distance *= 2) {
      const long long left = __shfl_up_sync(kWholeWarp, inclusive, distance);
      if (lane >= distance) inclusive += left;
    }
    if (begin + lane < experts) offsets[begin + lane] = before + inclusive - count;
    before += __shfl_sync(kWholeWarp, inclusive, 31);
  }
  if (lane == 0) offsets[experts] = before;
}

__global__ void __launch_bounds__(kThreads)
    place_slots(const int32_t* ids, int64_t slots, int experts, int segments, const int32_t* counts,
                const int64_t* offsets, int32_t* order, int32_t* place) {
  extern __shared__ int32_t local[];  // [kWarps][experts]: the next free place of each expert for this warp's segment
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int segment = blockIdx.x * kWarps + warp;
  if (segment >= segments) return;
  int32_t* next = local + warp * experts;
  for (int e = lane; e < experts; e += 32)
    next[e] = static_cast<int32_t>(offsets[e]) + counts[static_cast<int64_t>(e) * segments + segment];
  __syncwarp();
  const int64_t begin = static_cast<int64_t>(segment) * kSegment, end = min(begin + kSegment, slots);
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t slot = first + lane;
    const bool real = slot < end && valid_expert(ids[slot], experts);
    const int expert = real ? ids[slot] : -1;
    const unsigned same = __match_any_sync(kWholeWarp, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int32_t at = real ? next[expert] + rank : 0;
    __syncwarp();
    if (real && rank == 0) next[expert] += __popc(same);
    __syncwarp();
    if (real) {
      order[at] = static_cast<int32_t>(slot);
      place[slot] = at;
    }
  }
}

// ---- gather and combine -------------------------------------------------------------------------

/// Rows as words of type Word; one warp a row, kAhead loads in flight a lane.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    gather_words(const Word* source, int64_t source_stride, const int32_t* order, int divisor, Word* target,
                 int64_t target_stride, int64_t rows, int words) {
  constexpr int kAhead = 4;
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const Word* from = source + static_cast<int64_t>(order[row] / divisor) * source_stride;
  Word* to = target + row * target_stride;
  for (int begin = lane; begin < words; begin += 32 * kAhead) {
    Word held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (begin + 32 * i < words) held[i] = from[begin + 32 * i];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (begin + 32 * i < words) to[begin + 32 * i] = held[i];
  }
}

/// Row r of `source` to rows places[r * copies ...] of `target`; one warp a row, kAhead loads in flight a lane.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    scatter_words(const Word* source, int64_t source_stride, const int32_t* places, int copies, Word* target,
                  int64_t target_stride, int64_t rows, int words) {
  constexpr int kAhead = 4;
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const Word* from = source + row * source_stride;
  const int32_t* mine = places + row * copies;
  for (int begin = lane; begin < words; begin += 32 * kAhead) {
    Word held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (begin + 32 * i < words) held[i] = from[begin + 32 * i];
    for (int copy = 0; copy < copies; ++copy) {
      Word* to = target + static_cast<int64_t>(mine[copy]) * target_stride;
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (begin + 32 * i < words) to[begin + 32 * i] = held[i];
    }
  }
}

/// gather_words or scatter_words; `rows` of that side which a warp owns.
template <class Word, class Kernel>
void launch_rows(Kernel kernel, MatrixView source, const int32_t* index, int64_t copies, MatrixView target,
                 int64_t rows, cudaStream_t stream) {
  const int64_t size = size_of(source.dtype), word = sizeof(Word);
  kernel<<<static_cast<unsigned>(ceil_div(rows, kWarps)), kThreads, 0, stream>>>(
      source.as<const Word>(), source.stride * size / word, index, static_cast<int>(copies), target.as<Word>(),
      target.stride * size / word, rows, static_cast<int>(source.cols * size / word));
}

/// SHARDQ_DISPATCH=scatter writes a token's row to all its places at once; otherwise rows are gathered.
bool scatters() {
  return environment_says("SHARDQ_DISPATCH", "scatter");
}

/// Calls launch(Word{}) with the widest word that both views are made of.
template <class Launch>
void with_word(MatrixView source, MatrixView target, const Launch& launch) {
  if (whole_words(source) && whole_words(target))
    launch(uint4{});
  else if (size_of(source.dtype) == 2)
    launch(uint16_t{});
  else if (size_of(source.dtype) == 4)
    launch(uint32_t{});
  else
    launch(uint8_t{});
}

/// A thread owns one word of one token's row: blockIdx.x tokens, blockIdx.y pieces of a row.
template <int kCount, class T>
__global__ void __launch_bounds__(kThreads)
    combine_words(const T* source, int64_t source_stride, const int32_t* place, const float* weights, int top_k,
                  T* target, int64_t target_stride, int words) {
  constexpr int kAhead = 4;
  const int word = blockIdx.y * blockDim.x + threadIdx.x;
  if (word >= words) return;
  const int64_t token = blockIdx.x, column = static_cast<int64_t>(word) * kCount;
  T* to = target + token * target_stride + column;
  const Pack<T, kCount> before = load_pack<kCount>(to);
  float sum[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) sum[j] = widen(before.values[j]);
  for (int begin = 0; begin < top_k; begin += kAhead) {
    Pack<T, kCount> rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (begin + i < top_k)
        rows[i] = load_pack<kCount>(source + place[token * top_k + begin + i] * source_stride + column);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i < top_k) {
        const float weight = weights[token * top_k + begin + i];
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] = sum[j] + weight * widen(rows[i].values[j]);
      }
    }
  }
  Pack<T, kCount> after;
#pragma unroll
  for (int j = 0; j < kCount; ++j) after.values[j] = narrow<T>(sum[j]);
  store_pack(to, after);
}

}  // namespace

void CudaBackend::route(MatrixView logits, const RouterSpec& router, int32_t* ids, float* weights) {
  SHARDQ_CHECK(logits.cols == router.experts && 0 < router.top_k && router.top_k <= router.experts, ExitCode::internal,
               "route: logits have {} columns for {} experts, top_k {}", logits.cols, router.experts, router.top_k);
  SHARDQ_CHECK(router.experts <= kMaxExperts, ExitCode::internal, "route: {} experts, at most {} are supported on CUDA",
               router.experts, kMaxExperts);
  if (logits.rows == 0) return;
  state_->use();
  const auto blocks = static_cast<unsigned>(ceil_div(logits.rows, kWarps));
  const int experts = static_cast<int>(router.experts), top_k = static_cast<int>(router.top_k);
  with_float_type(logits.dtype, "route", [&]<class T>(T) {
    const auto launch = [&]<int kHeld>(std::integral_constant<int, kHeld>) {
      route_tokens<kHeld><<<blocks, kThreads, 0, state_->compute>>>(
          logits.as<const T>(), logits.stride, logits.rows, experts, top_k, router.normalize_top_k, ids, weights);
    };
    if (experts <= 32) return launch(std::integral_constant<int, 1>{});
    if (experts <= 128) return launch(std::integral_constant<int, 4>{});
    if (experts <= 256) return launch(std::integral_constant<int, 8>{});
    launch(std::integral_constant<int, kMaxExperts / 32>{});
  });
  SHARDQ_LAUNCHED("route");
}

void CudaBackend::sort_by_expert(const int32_t* ids, int64_t slots, int64_t experts, int32_t* order, int32_t* place,
                                 std::span<int64_t> offsets) {
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == experts + 1, ExitCode::internal,
               "sort_by_expert: {} offsets for {} experts", offsets.size(), experts);
  SHARDQ_CHECK(slots <= INT32_MAX - kSegment && experts <= kMaxExperts, ExitCode::internal,
               "sort_by_expert: {} slots, {} experts, at most {} and {} are supported on CUDA", slots, experts,
               INT32_MAX - kSegment, kMaxExperts);
  if (slots == 0 || experts == 0) {
    std::fill(offsets.begin(), offsets.end(), 0);
    return;
  }
  state_->use();
  const int segments = static_cast<int>(ceil_div(slots, int64_t{kSegment})), count = static_cast<int>(experts);
  const auto blocks = static_cast<unsigned>(ceil_div(segments, kWarps));
  const size_t shared = sizeof(int32_t) * kWarps * experts;
  const DeviceArray<int32_t> counts(*state_, experts * segments, "sort_by_expert counts");
  const DeviceArray<int32_t> totals(*state_, experts, "sort_by_expert totals");
  const DeviceArray<int64_t> device_offsets(*state_, experts + 1, "sort_by_expert offsets");
  count_segments<<<blocks, kThreads, shared, state_->compute>>>(ids, slots, count, segments, counts.get());
  SHARDQ_LAUNCHED("sort_by_expert, counting");
  scan_segments<<<static_cast<unsigned>(experts), kThreads, 0, state_->compute>>>(counts.get(), segments, totals.get());
  scan_experts<<<1, 32, 0, state_->compute>>>(totals.get(), count, device_offsets.get());
  SHARDQ_LAUNCHED("sort_by_expert, scan");
  place_slots<<<blocks, kThreads, shared, state_->compute>>>(ids, slots, count, segments, counts.get(),
                                                             device_offsets.get(), order, place);
  SHARDQ_LAUNCHED("sort_by_expert, placing");
  state_->download(offsets.data(), device_offsets.get(), static_cast<int64_t>(offsets.size_bytes()));
  SHARDQ_CHECK(offsets.back() == slots, ExitCode::internal, "sort_by_expert: {} of {} ids are outside 0..{}",
               slots - offsets.back(), slots, experts - 1);
}

void CudaBackend::gather_rows(MatrixView source, const int32_t* order, int64_t divisor, MatrixView target) {
  SHARDQ_CHECK(source.cols == target.cols && source.dtype == target.dtype && 0 < divisor && divisor <= INT32_MAX,
               ExitCode::internal, "gather_rows: source has {} columns of {}, target {} of {}, divisor {}", source.cols,
               safetensors_name(source.dtype), target.cols, safetensors_name(target.dtype), divisor);
  if (target.rows == 0 || target.cols == 0) return;
  state_->use();
  with_word(source, target, [&]<class Word>(Word) {
    launch_rows<Word>(gather_words<Word>, source, order, divisor, target, target.rows, state_->compute);
  });
  SHARDQ_LAUNCHED("gather_rows");
}

void CudaBackend::dispatch_rows(MatrixView source, const int32_t* order, const int32_t* place, int64_t copies,
                                MatrixView target) {
  SHARDQ_CHECK(target.rows == source.rows * copies && source.cols == target.cols && source.dtype == target.dtype,
               ExitCode::internal, "dispatch_rows: {} copies of [{}, {}] of {} into [{}, {}] of {}", copies,
               source.rows, source.cols, safetensors_name(source.dtype), target.rows, target.cols,
               safetensors_name(target.dtype));
  if (!scatters()) return gather_rows(source, order, copies, target);
  if (target.rows == 0 || target.cols == 0) return;
  state_->use();
  with_word(source, target, [&]<class Word>(Word) {
    launch_rows<Word>(scatter_words<Word>, source, place, copies, target, source.rows, state_->compute);
  });
  SHARDQ_LAUNCHED("dispatch_rows");
}

void CudaBackend::combine_rows(MatrixView source, const int32_t* place, const float* weights, int64_t top_k,
                               MatrixView target) {
  SHARDQ_CHECK(source.cols == target.cols && source.dtype == target.dtype && source.rows == target.rows * top_k,
               ExitCode::internal, "combine_rows: source [{}, {}] of {}, target [{}, {}] of {}, top_k {}", source.rows,
               source.cols, safetensors_name(source.dtype), target.rows, target.cols, safetensors_name(target.dtype),
               top_k);
  if (target.rows == 0 || target.cols == 0) return;
  state_->use();
  with_float_type(target.dtype, "combine_rows", [&]<class T>(T) {
    const auto launch = [&]<int kCount>(std::integral_constant<int, kCount>) {
      const int words = static_cast<int>(target.cols / kCount);
      const int threads = std::min(kThreads, ceil_div(words, 32) * 32);
      const dim3 grid(static_cast<unsigned>(target.rows), static_cast<unsigned>(ceil_div(words, threads)));
      combine_words<kCount><<<grid, threads, 0, state_->compute>>>(source.as<const T>(), source.stride, place, weights,
                                                                   static_cast<int>(top_k), target.as<T>(),
                                                                   target.stride, words);
    };
    if (whole_words(source) && whole_words(target))
      launch(std::integral_constant<int, kPerAccess<T>>{});
    else
      launch(std::integral_constant<int, 1>{});
  });
  SHARDQ_LAUNCHED("combine_rows");
}

}  // namespace shardq
