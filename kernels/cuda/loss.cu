// Per token: -log softmax(logits)[target] and the first index of the largest logit.
//
// Memory-bound: a row (up to 152,000 logits) is read once. Every thread keeps a running maximum and the sum of
// exponentials relative to it, rescaled when the maximum grows; exponentials are computed in fp32 and summed in fp64,
// since a float sum over such a vocabulary loses three digits.
#include <vector>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kThreads = 256;

/// What one thread has seen of a row.
struct Running {
  float largest = -INFINITY;
  int at = 0;      ///< where the largest was first seen
  double sum = 0;  ///< of exp(logit - base())

  /// 0 where nothing above -inf was seen: exp(-inf - 0) = 0 is what such logits count.
  __device__ float base() const { return largest == -INFINITY ? 0.0f : largest; }

  template <int kCount>
  __device__ void absorb(const float (&logits)[kCount], int first) {
    float here = logits[0];
#pragma unroll
    for (int j = 1; j < kCount; ++j) here = fmaxf(here, logits[j]);
    if (here > largest) {  // rare after the first few words
      int offset = 0;
#pragma unroll
      for (int j = kCount - 1; j >= 0; --j)
        if (logits[j] == here) offset = j;
      sum *= exp_of(largest - here);
      largest = here;
      at = first + offset;
    }
    const float from = base();
    float part = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) part += exp_of(logits[j] - from);
    sum += part;
  }
  /// Good to |x| 2^-24: large |x| counts little in the sum.
  static __device__ float exp_of(float x) {
    return exp2_fast(x * 1.4426950408889634f);
  }
};

/// Largest value of the block and its lowest index; every thread gets them. A NaN never wins. No value above -inf:
/// index 0.
__device__ void block_argmax(float& value, int& index) {
  __shared__ float values[kThreads / 32];
  __shared__ int indices[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kWholeWarp, value, distance);
    const int other_index = __shfl_xor_sync(kWholeWarp, index, distance);
    if (other > value || (other == value && other_index < index)) value = other, index = other_index;
  }
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value, indices[threadIdx.x / 32] = index;
  __syncthreads();
  value = values[0], index = indices[0];
  for (int i = 1; i < kThreads / 32; ++i)
    if (values[i] > value || (values[i] == value && indices[i] < index)) value = values[i], index = indices[i];
  if (value == -INFINITY) index = 0;
}

/// One block a row, kAhead words in flight a thread.
template <int kCount, class T>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows(const T* logits, int64_t stride, int cols,
                                                               const int32_t* targets, double* losses, int32_t* best) {
  constexpr int kAhead = 4;
  const T* row = logits + blockIdx.x * stride;
  const int words = cols / kCount;
  Running own;
  for (int begin = threadIdx.x; begin < words; begin += kThreads * kAhead) {
    Pack<T, kCount> packs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int word = begin + i * kThreads;
      if (word < words) packs[i] = load_pack<kCount>(row + static_cast<int64_t>(word) * kCount);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int word = begin + i * kThreads;
      if (word >= words) break;
      float values[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = widen(packs[i].values[j]);
      own.absorb(values, word * kCount);
    }
  }
  float largest = own.largest;
  int at = own.at;
  block_argmax(largest, at);
  const float base = largest == -INFINITY ? 0.0f : largest;
  // Where a thread saw nothing, its base means nothing either, and the factor may be infinite.
  const double sum = block_sum(own.sum == 0 ? 0.0 : own.sum * Running::exp_of(own.base() - base));
  if (threadIdx.x == 0) {
    losses[blockIdx.x] = log(sum) + static_cast<double>(base) - static_cast<double>(widen(row[targets[blockIdx.x]]));
    best[blockIdx.x] = at;
  }
}

}  // namespace

void CudaBackend::cross_entropy(MatrixView logits, const int32_t* targets_host, double* losses, int32_t* best) {
  for (int64_t t = 0; t < logits.rows; ++t)
    SHARDQ_CHECK(0 <= targets_host[t] && targets_host[t] < logits.cols, ExitCode::internal,
                 "cross_entropy: target {} of {} classes at row {}", targets_host[t], logits.cols, t);
  SHARDQ_CHECK(logits.rows <= INT32_MAX && logits.cols < INT32_MAX, ExitCode::internal,
               "cross_entropy: [{}, {}] is too large", logits.rows, logits.cols);
  if (logits.rows == 0) return;
  state_->use();
  const DeviceArray<int32_t> targets(*state_, std::span<const int32_t>(targets_host, logits.rows),
                                     "cross_entropy targets");
  const DeviceArray<double> device_losses(*state_, logits.rows, "cross_entropy losses");
  const DeviceArray<int32_t> device_best(*state_, logits.rows, "cross_entropy choices");
  with_float_type(logits.dtype, "cross_entropy", [&]<class T>(T) {
    const auto rows = static_cast<unsigned>(logits.rows);
    const int cols = static_cast<int>(logits.cols);
    if (whole_words(logits))
      cross_entropy_rows<kPerAccess<T>><<<rows, kThreads, 0, state_->compute>>>(
          logits.as<T>(), logits.stride, cols, targets.get(), device_losses.get(), device_best.get());
    else
      cross_entropy_rows<1><<<rows, kThreads, 0, state_->compute>>>(logits.as<T>(), logits.stride, cols, targets.get(),
                                                                    device_losses.get(), device_best.get());
    SHARDQ_LAUNCHED("cross_entropy");
  });
  state_->download(losses, device_losses.get(), logits.rows * static_cast<int64_t>(sizeof(double)));
  state_->download(best, device_best.get(), logits.rows * static_cast<int64_t>(sizeof(int32_t)));
}

}  // namespace shardq
