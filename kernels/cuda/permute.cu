// Columns of a stack into another order, or back. Bound by memory: each element is read and written once.
//
// Mapping: a block holds a few whole rows in shared memory. One side of it, the rows as they lie, moves along lines;
// the other side is a gather (or, on the way back, a scatter) in shared memory, again along lines of device memory. A
// thread looks an entry of the order up once for all its rows.
#include <algorithm>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/vector.cuh"

namespace shardq {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kStagedBytes = 40 << 10;  // a block; several fit a multiprocessor
constexpr int kMostRows = 16;

template <class T>
struct Permutation {
  const T* source;
  T* target;
  int64_t source_stride, source_matrix_stride, target_stride, target_matrix_stride;
  const int32_t* order;
  int64_t rows, cols;
  int block_rows;  // that fit shared memory, at least 1
  bool back;
  bool words;   // rows on the straight side consist of 16-byte words
  bool groups;  // rows on the other side start on 4 bytes
};

/// Rows as they lie, to or from shared memory: few enough for indices of 32 bits, whose division is cheap.
template <class T>
__device__ void copy_rows(T* target, int64_t target_stride, const T* source, int64_t source_stride, int rows,
                          int64_t cols, bool words) {
  constexpr int kWord = 16 / sizeof(T);
  if (words) {
    const int per_row = static_cast<int>(cols / kWord), total = rows * per_row;
#pragma unroll 4
    for (int i = threadIdx.x; i < total; i += kThreads) {
      const int r = i / per_row, c = i % per_row * kWord;
      *reinterpret_cast<uint4*>(target + r * target_stride + c) =
          *reinterpret_cast<const uint4*>(source + r * source_stride + c);
    }
  } else {
    for (int r = 0; r < rows; ++r)
      for (int64_t c = threadIdx.x; c < cols; c += kThreads)
        target[r * target_stride + c] = source[r * source_stride + c];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) permute_kernel(const Permutation<T> p) {
  extern __shared__ uint4 memory[];
  T* staged = reinterpret_cast<T*>(memory);
  const int64_t e = blockIdx.y, first = int64_t{blockIdx.x} * p.block_rows;
  const int rows = static_cast<int>(min(int64_t{p.block_rows}, p.rows - first));
  const T* source = p.source + e * p.source_matrix_stride + first * p.source_stride;
  T* target = p.target + e * p.target_matrix_stride + first * p.target_stride;
  const int32_t* order = p.order + e * p.cols;
  if (!p.back) {
    copy_rows(staged, p.cols, source, p.source_stride, rows, p.cols, p.words);
    __syncthreads();
  }
  // Neighbouring threads take neighbouring groups of 4 bytes.
  constexpr int kPer = 4 / sizeof(T), kBits = 8 * sizeof(T);
  for (int64_t base = int64_t{threadIdx.x} * kPer; base < p.cols; base += kThreads * kPer) {
    int column[kPer];
    const int valid = static_cast<int>(min(int64_t{kPer}, p.cols - base));
#pragma unroll
    for (int i = 0; i < kPer; ++i) column[i] = i < valid ? order[base + i] : 0;
    const bool whole = p.groups && valid == kPer;
    for (int r = 0; r < rows; ++r) {
      T* line = staged + r * p.cols;
      uint32_t word = 0;  // as one register: elements kept apart are stored apart
      if (p.back) {
        const T* from = source + r * p.source_stride + base;
        if (whole) {
          word = *reinterpret_cast<const uint32_t*>(from);
        } else {
#pragma unroll
          for (int i = 0; i < kPer; ++i)
            if (i < valid) word |= static_cast<uint32_t>(from[i]) << (kBits * i);
        }
#pragma unroll
        for (int i = 0; i < kPer; ++i)
          if (i < valid) line[column[i]] = static_cast<T>(word >> (kBits * i));
      } else {
        T* to = target + r * p.target_stride + base;
#pragma unroll
        for (int i = 0; i < kPer; ++i) word |= static_cast<uint32_t>(line[column[i]]) << (kBits * i);
        if (whole) {
          *reinterpret_cast<uint32_t*>(to) = word;
        } else {
#pragma unroll
          for (int i = 0; i < kPer; ++i)
            if (i < valid) to[i] = static_cast<T>(word >> (kBits * i));
        }
      }
    }
  }
  if (p.back) {
    __syncthreads();
    copy_rows(target, p.target_stride, staged, p.cols, rows, p.cols, p.words);
  }
}

/// Rows that no block can hold: straight from and to device memory.
template <class T>
__global__ void __launch_bounds__(kThreads) permute_long_kernel(const Permutation<T> p) {
  const int64_t e = blockIdx.y, r = blockIdx.x;
  const T* source = p.source + e * p.source_matrix_stride + r * p.source_stride;
  T* target = p.target + e * p.target_matrix_stride + r * p.target_stride;
  const int32_t* order = p.order + e * p.cols;
  for (int64_t j = threadIdx.x; j < p.cols; j += kThreads) {
    if (p.back)
      target[order[j]] = source[j];
    else
      target[j] = source[order[j]];
  }
}

template <class T>
void permute(const CudaBackend::State& state, StackView source, const int32_t* order, bool back, StackView target) {
  const int64_t row_bytes = source.cols * static_cast<int64_t>(sizeof(T));
  const StackView straight = back ? target : source, other = back ? source : target;
  constexpr int64_t kWord = 16 / sizeof(T);
  Permutation<T> p{.source = source.as<T>(),
                   .target = target.as<T>(),
                   .source_stride = source.stride,
                   .source_matrix_stride = source.matrix_stride,
                   .target_stride = target.stride,
                   .target_matrix_stride = target.matrix_stride,
                   .order = order,
                   .rows = source.rows,
                   .cols = source.cols,
                   .block_rows = static_cast<int>(std::clamp<int64_t>(kStagedBytes / row_bytes, 1, kMostRows)),
                   .back = back,
                   .words = whole_words(straight.data) && straight.stride % kWord == 0 &&
                            straight.matrix_stride % kWord == 0 && source.cols % kWord == 0,
                   .groups = reinterpret_cast<uintptr_t>(other.data) % 4 == 0 && other.stride * sizeof(T) % 4 == 0 &&
                             other.matrix_stride * sizeof(T) % 4 == 0};
  const auto count = static_cast<unsigned>(source.count);
  const int64_t staged = p.block_rows * row_bytes;
  if (staged > state.shared_memory_per_block) {
    permute_long_kernel<T><<<dim3(static_cast<unsigned>(source.rows), count), kThreads, 0, state.compute>>>(p);
  } else {
    SHARDQ_CUDA(cudaFuncSetAttribute(permute_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(std::max<int64_t>(staged, kStagedBytes))));
    const dim3 grid(static_cast<unsigned>(ceil_div(source.rows, p.block_rows)), count);
    permute_kernel<T><<<grid, kThreads, static_cast<size_t>(staged), state.compute>>>(p);
  }
  SHARDQ_LAUNCHED("permute_columns");
}

}  // namespace

void CudaBackend::permute_columns(StackView source, const int32_t* order, bool back, StackView target) {
  const int64_t size = size_of(source.dtype);
  SHARDQ_CHECK(source.count == target.count && source.rows == target.rows && source.cols == target.cols &&
                   source.dtype == target.dtype && (size == 1 || size == 2 || size == 4),
               ExitCode::internal, "permute_columns: [{}, {}, {}] {} into [{}, {}, {}] {}", source.count, source.rows,
               source.cols, safetensors_name(source.dtype), target.count, target.rows, target.cols,
               safetensors_name(target.dtype));
  if (source.count == 0 || source.rows == 0 || source.cols == 0) return;
  state_->use();
  if (size == 1)
    permute<uint8_t>(*state_, source, order, back, target);
  else if (size == 2)
    permute<uint16_t>(*state_, source, order, back, target);
  else
    permute<uint32_t>(*state_, source, order, back, target);
}

}  // namespace shardq
