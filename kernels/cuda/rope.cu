// Rotary position embedding in place: pairs (i, i + half) of every head turn by the angle of their position.
//
//   low' = low cos - high sin,   high' = high cos + low sin        (fp32, rounded once, multiplications not contracted)
//
// Memory-bound: every element is read once and written once. A thread holds the cosines and sines of one 16-byte chunk
// of half a head and walks over every kLanes-th head with them, so that the tables (8 bytes a pair, against 4 bytes a
// pair of bf16 data) are read once for many heads.
#include <algorithm>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kThreads = 256;
constexpr int kHeadLanes = 4;  // head lanes a token: with 32 heads a thread turns 8 of them

template <class T>
struct Rotation {
  T* x;
  int64_t stride;
  const float* cosine;
  const float* sine;
  const int32_t* positions;
  int64_t threads;  ///< tokens * lanes * chunks
  int heads, half;
  int lanes;   ///< threads that share the heads of a token
  int chunks;  ///< pieces of half a head
};

template <int kCount, class T>
__global__ void __launch_bounds__(kThreads) rotate(Rotation<T> r) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= r.threads) return;
  const int a_token = r.lanes * r.chunks;
  const int64_t token = thread / a_token;
  const int rest = static_cast<int>(thread - token * a_token);
  const int first_head = rest / r.chunks, column = (rest - first_head * r.chunks) * kCount;
  const int64_t angle = static_cast<int64_t>(r.positions[token]) * r.half + column;
  float cosine[kCount], sine[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    cosine[j] = r.cosine[angle + j];
    sine[j] = r.sine[angle + j];
  }
#pragma unroll 2
  for (int head = first_head; head < r.heads; head += r.lanes) {
    T* data = r.x + token * r.stride + static_cast<int64_t>(head) * 2 * r.half + column;
    Pack<T, kCount> low = load_pack<kCount>(data), high = load_pack<kCount>(data + r.half);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float a = widen(low.values[j]), b = widen(high.values[j]);
      low.values[j] = narrow<T>(a * cosine[j] - b * sine[j]);
      high.values[j] = narrow<T>(b * cosine[j] + a * sine[j]);
    }
    store_pack(data, low);
    store_pack(data + r.half, high);
  }
}

}  // namespace

void CudaBackend::rope(MatrixView x, int64_t head_dim, const float* cosine, const float* sine,
                       const int32_t* positions) {
  SHARDQ_CHECK(head_dim > 0 && head_dim % 2 == 0 && x.cols % head_dim == 0, ExitCode::internal,
               "rope: {} columns are no whole heads of even size {}", x.cols, head_dim);
  if (x.rows == 0 || x.cols == 0) return;
  state_->use();
  with_float_type(x.dtype, "rope", [&]<class T>(T) {
    const int heads = static_cast<int>(x.cols / head_dim), half = static_cast<int>(head_dim / 2);
    const bool whole = whole_words(x) && half % kPerAccess<T> == 0;
    const int chunks = half / (whole ? kPerAccess<T> : 1), lanes = std::min(heads, kHeadLanes);
    const int64_t threads = x.rows * lanes * chunks;
    const Rotation<T> r{x.as<T>(), x.stride, cosine, sine, positions, threads, heads, half, lanes, chunks};
    const auto blocks = static_cast<unsigned>(ceil_div(threads, kThreads));
    if (whole)
      rotate<kPerAccess<T>><<<blocks, kThreads, 0, state_->compute>>>(r);
    else
      rotate<1><<<blocks, kThreads, 0, state_->compute>>>(r);
    SHARDQ_LAUNCHED("rope");
  });
}

}  // namespace shardq
