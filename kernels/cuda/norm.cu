// y = x / sqrt(mean(x^2) + eps) * weight, row by row, in fp32, rounded once.
//
// Memory-bound: a row is read once and written once (the weight stays in L1). A group of `group` threads holds a whole
// row in registers, up to kHeld 16-byte words a thread, so that the second pass over the row costs no memory access.
// Short rows (head_dim), a word a thread, share a warp, and a group takes kHeld of them, so that as much is in flight
// as for long rows (hidden), which take one block. Rows that are not made of whole 16-byte words, or too long for
// registers, take the plain kernel, which reads them twice. cuBLAS and cuDNN have no such operation for strided views
// with weights of another type.
#include <algorithm>
#include <bit>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kThreads = 256;
constexpr int kHeld = 4;
constexpr int kMaxGroup = 1024;

template <class T, class W>
struct NormRows {
  const T* x;
  int64_t x_stride;
  const W* weight;
  T* y;
  int64_t y_stride;
  int64_t rows;
  int cols;
  float eps;
};

__device__ float inverse_rms(float squares, int cols, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(cols) + eps);
}

/// `group` threads a row: 32, or the whole block.
template <class T, class W>
__global__ void norm_in_registers(NormRows<T, W> n, int group) {
  constexpr int kCount = kPerAccess<T>;
  const int lane = threadIdx.x & (group - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / group) + threadIdx.x / group;
  const int words = n.cols / kCount;
  Pack<T, kCount> held[kHeld];
  float squares = 0;
  if (row < n.rows) {
    const T* source = n.x + row * n.x_stride;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = lane + i * group;
      if (word < words) held[i] = load_pack<kCount>(source + word * kCount);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (lane + i * group < words) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const float value = widen(held[i].values[j]);
          squares = fmaf(value, value, squares);
        }
      }
    }
  }
  squares = group <= 32 ? warp_sum(squares, group) : block_sum(squares);
  if (row >= n.rows) return;
  const float inverse = inverse_rms(squares, n.cols, n.eps);
  T* target = n.y + row * n.y_stride;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int word = lane + i * group;
    if (word < words) {
      Pack<W, kCount> weight = load_pack<kCount>(n.weight + word * kCount);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        held[i].values[j] = narrow<T>(widen(held[i].values[j]) * inverse * widen(weight.values[j]));
      store_pack(target + word * kCount, held[i]);
    }
  }
}

/// kHeld rows for each group of `group` threads (a power of two, at most 32); a row is at most `group` words.
template <class T, class W>
__global__ void __launch_bounds__(kThreads) norm_short_rows(NormRows<T, W> n, int group) {
  constexpr int kCount = kPerAccess<T>;
  const int word = threadIdx.x & (group - 1), groups = kThreads / group;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * groups * kHeld + threadIdx.x / group;
  const bool inside = word < n.cols / kCount;
  Pack<T, kCount> held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t row = first + i * groups;
    if (inside && row < n.rows) held[i] = load_pack<kCount>(n.x + row * n.x_stride + word * kCount);
  }
  Pack<W, kCount> weight;
  if (inside) weight = load_pack<kCount>(n.weight + word * kCount);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t row = first + i * groups;
    const bool real = inside && row < n.rows;
    float squares = 0;
    if (real) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) squares = fmaf(widen(held[i].values[j]), widen(held[i].values[j]), squares);
    }
    const float inverse = inverse_rms(warp_sum(squares, group), n.cols, n.eps);
    if (real) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        held[i].values[j] = narrow<T>(widen(held[i].values[j]) * inverse * widen(weight.values[j]));
      store_pack(n.y + row * n.y_stride + word * kCount, held[i]);
    }
  }
}

/// One block a row, element by element.
template <class T, class W>
__global__ void norm_plain(NormRows<T, W> n) {
  const T* source = n.x + blockIdx.x * n.x_stride;
  T* target = n.y + blockIdx.x * n.y_stride;
  float squares = 0;
  for (int j = threadIdx.x; j < n.cols; j += blockDim.x) squares = fmaf(widen(source[j]), widen(source[j]), squares);
  const float inverse = inverse_rms(block_sum(squares), n.cols, n.eps);
  for (int j = threadIdx.x; j < n.cols; j += blockDim.x)
    target[j] = narrow<T>(widen(source[j]) * inverse * widen(n.weight[j]));
}

template <class T, class W>
void launch_norm(const NormRows<T, W>& n, bool whole, cudaStream_t stream) {
  const int words = ceil_div(n.cols, kPerAccess<T>);
  if (!whole || words > kMaxGroup * kHeld) {
    const int threads = std::clamp(ceil_div(n.cols, 32) * 32, 32, kThreads);
    norm_plain<<<static_cast<unsigned>(n.rows), threads, 0, stream>>>(n);
  } else if (words <= 32) {
    const int group = static_cast<int>(std::bit_ceil(static_cast<unsigned>(words)));
    const int64_t rows_a_block = kThreads / group * kHeld;
    norm_short_rows<<<static_cast<unsigned>(ceil_div(n.rows, rows_a_block)), kThreads, 0, stream>>>(n, group);
  } else {
    // A warp's worth of lanes first, then more words a lane, then more warps.
    const int group = std::max(32, static_cast<int>(std::bit_ceil(static_cast<unsigned>(words))) / kHeld);
    const int threads = group == 32 ? kThreads : group;
    norm_in_registers<<<static_cast<unsigned>(ceil_div(n.rows, threads / group)), threads, 0, stream>>>(n, group);
  }
  SHARDQ_LAUNCHED("rms_norm");
}

}  // namespace

void CudaBackend::rms_norm(MatrixView x, const void* weight, DType weight_dtype, float eps, MatrixView y) {
  SHARDQ_CHECK(x.rows == y.rows && x.cols == y.cols && x.dtype == y.dtype, ExitCode::internal,
               "rms_norm: x is [{}, {}] of {}, y is [{}, {}] of {}", x.rows, x.cols, safetensors_name(x.dtype), y.rows,
               y.cols, safetensors_name(y.dtype));
  SHARDQ_CHECK(x.rows <= INT32_MAX && x.cols <= INT32_MAX, ExitCode::internal, "rms_norm: [{}, {}] is too large",
               x.rows, x.cols);
  if (x.rows == 0 || x.cols == 0) return;
  state_->use();
  const bool whole = whole_words(x) && whole_words(y) && whole_words(weight);
  with_float_type(x.dtype, "rms_norm x", [&]<class T>(T) {
    with_float_type(weight_dtype, "rms_norm weight", [&]<class W>(W) {
      launch_norm<T, W>({x.as<T>(), x.stride, static_cast<const W*>(weight), y.as<T>(), y.stride, x.rows,
                         static_cast<int>(x.cols), eps},
                        whole, state_->compute);
    });
  });
}

}  // namespace shardq
