// Elementwise operations on matrices: out = silu(gate) * up, and x += y.
//
// Memory-bound: three words moved (two read, one written) per word of the result. A thread takes kWords
// neighbouring-by- block 16-byte words, so that several loads are in flight. Views may be column ranges of wider
// matrices, so a word's row and column come from a division by the words of a row.
#include <algorithm>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/vector.cuh"

namespace shardq {

namespace {

constexpr int kThreads = 256;
constexpr int kWords = 2;
constexpr int64_t kMaxWords = int64_t{1} << 31;  // word indices are 32-bit: their division is the dearest instruction

template <class T>
struct Elementwise {
  const T* a;
  int64_t a_stride;
  const T* b;
  int64_t b_stride;
  T* out;
  int64_t out_stride;
  uint32_t words;  ///< rows * words_a_row
  uint32_t words_a_row;
};

/// The model that is being imitated stores silu(gate) before it multiplies; hence the rounding in the middle.
struct SiluMul {
  template <class T>
  static __device__ T apply(T gate, T up) {
    const float g = widen(gate);
    return narrow<T>(widen(narrow<T>(__fdividef(g, 1.0f + expf(-g)))) * widen(up));
  }
};

struct Add {
  template <class T>
  static __device__ T apply(T x, T y) {
    return narrow<T>(widen(x) + widen(y));
  }
};

template <class Operation, int kCount, class T>
__global__ void __launch_bounds__(kThreads) elementwise(Elementwise<T> e) {
  Pack<T, kCount> a[kWords], b[kWords];
  int64_t row[kWords], column[kWords];
  const uint32_t first = blockIdx.x * (kThreads * kWords) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint32_t word = first + i * kThreads, quotient = word / e.words_a_row;
    row[i] = quotient;
    column[i] = static_cast<int64_t>(word - quotient * e.words_a_row) * kCount;
    if (word < e.words) {
      a[i] = load_pack<kCount>(e.a + row[i] * e.a_stride + column[i]);
      b[i] = load_pack<kCount>(e.b + row[i] * e.b_stride + column[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (first + i * kThreads < e.words) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) a[i].values[j] = Operation::apply(a[i].values[j], b[i].values[j]);
      store_pack(e.out + row[i] * e.out_stride + column[i], a[i]);
    }
  }
}

template <class Operation>
void launch_elementwise(MatrixView a, MatrixView b, MatrixView out, const char* operation, cudaStream_t stream) {
  SHARDQ_CHECK(a.rows == out.rows && b.rows == out.rows && a.cols == out.cols && b.cols == out.cols, ExitCode::internal,
               "{}: operands [{}, {}] and [{}, {}], result [{}, {}]", operation, a.rows, a.cols, b.rows, b.cols,
               out.rows, out.cols);
  SHARDQ_CHECK(a.dtype == out.dtype && b.dtype == out.dtype, ExitCode::internal,
               "{}: operands of {} and {}, result of {}", operation, safetensors_name(a.dtype),
               safetensors_name(b.dtype), safetensors_name(out.dtype));
  if (out.rows == 0 || out.cols == 0) return;
  with_float_type(out.dtype, operation, [&]<class T>(T) {
    const bool whole = whole_words(a) && whole_words(b) && whole_words(out);
    const int64_t words_a_row = out.cols / (whole ? kPerAccess<T> : 1);
    const int64_t most = std::max<int64_t>(1, kMaxWords / words_a_row);  // rows a launch
    for (int64_t begin = 0; begin < out.rows; begin += most) {
      const int64_t end = std::min(out.rows, begin + most), words = (end - begin) * words_a_row;
      const Elementwise<T> e{a.row_range(begin, end).template as<T>(),
                             a.stride,
                             b.row_range(begin, end).template as<T>(),
                             b.stride,
                             out.row_range(begin, end).template as<T>(),
                             out.stride,
                             static_cast<uint32_t>(words),
                             static_cast<uint32_t>(words_a_row)};
      const auto blocks = static_cast<unsigned>(ceil_div(words, kThreads * kWords));
      if (whole)
        elementwise<Operation, kPerAccess<T>><<<blocks, kThreads, 0, stream>>>(e);
      else
        elementwise<Operation, 1><<<blocks, kThreads, 0, stream>>>(e);
    }
  });
}

}  // namespace

void CudaBackend::silu_mul(MatrixView gate, MatrixView up, MatrixView out) {
  state_->use();
  launch_elementwise<SiluMul>(gate, up, out, "silu_mul", state_->compute);
  SHARDQ_LAUNCHED("silu_mul");
}

void CudaBackend::add(MatrixView x, MatrixView y) {
  state_->use();
  launch_elementwise<Add>(x, y, x, "add", state_->compute);
  SHARDQ_LAUNCHED("add");
}

}  // namespace shardq
