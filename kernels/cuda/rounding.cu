// Rounding to nearest, dequantization, and blocks of columns as floats. All bound by memory: one pass over the
// elements, neighbouring threads on neighbouring columns.
#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/vector.cuh"
#include "kernels/grid.hpp"

namespace shardq {
namespace {

constexpr int kThreads = 256;

/// Scales and zero points of a stack of matrices, [count * rows, groups].
struct GroupGrid {
  const float* scales;
  const int8_t* zeros;  // or null
  int64_t groups;
  int group_size;
  __device__ ScaleZero at(int64_t row, int column) const {
    const int64_t index = row * groups + column / group_size;
    return {scales[index], zeros ? zeros[index] : 0};
  }
};

GroupGrid group_grid(const float* scales, const int8_t* zeros, int64_t group_size, int64_t cols, const Grid& grid,
                     const char* operation) {
  SHARDQ_CHECK(group_size > 0 && cols % group_size == 0, ExitCode::internal,
               "{}: groups of {} do not divide {} columns", operation, group_size, cols);
  SHARDQ_CHECK(grid.symmetric || zeros, ExitCode::internal, "{}: an asymmetric grid needs zeros", operation);
  return {scales, grid.symmetric ? nullptr : zeros, cols / group_size, static_cast<int>(group_size)};
}

/// Rows on y, where a stack may have more of them than a grid has places, the kernel strides.
dim3 columns_by_rows(int64_t column_blocks, int64_t rows, int64_t count) {
  return dim3(static_cast<unsigned>(column_blocks), static_cast<unsigned>(std::min<int64_t>(rows, 65535)),
              static_cast<unsigned>(count));
}

/// A stack as kernels see it.
template <class T>
struct Stack {
  T* data;
  int64_t rows, cols, stride, matrix_stride;
  __device__ T* row(int64_t e, int64_t r) const { return data + e * matrix_stride + r * stride; }
};
template <class T>
Stack<T> stack_of(StackView view) {
  return {view.as<T>(), view.rows, view.cols, view.stride, view.matrix_stride};
}

template <class T>
__global__ void __launch_bounds__(kThreads) round_kernel(Stack<const T> w, const int32_t* order, GroupGrid groups,
                                                         Grid grid, int8_t* codes, Stack<float> residual) {
  const int position = blockIdx.x * kThreads + threadIdx.x;
  if (position >= w.cols) return;
  const int64_t e = blockIdx.z;
  const int column = order ? order[e * w.cols + position] : position;
  for (int64_t r = blockIdx.y; r < w.rows; r += gridDim.y) {
    const int64_t row = e * w.rows + r;
    const ScaleZero s = groups.at(row, column);
    const float value = widen(w.row(e, r)[column]);
    const int code = quantize_code(value, s.scale, s.zero, grid);
    codes[row * w.cols + column] = static_cast<int8_t>(code);
    if (residual.data) residual.row(e, r)[position] = value - dequantize_code(code, s.scale, s.zero, grid.scale_dtype);
  }
}

/// kCount neighbouring codes a thread, all of one group.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const int8_t* codes, GroupGrid groups, DType scale_dtype, Stack<T> w) {
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kCount;
  if (column >= w.cols) return;
  const int64_t e = blockIdx.z;
  for (int64_t r = blockIdx.y; r < w.rows; r += gridDim.y) {
    const int64_t row = e * w.rows + r;
    const ScaleZero s = groups.at(row, column);
    const auto code = load_pack<kCount>(codes + row * w.cols + column);
    Pack<T, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      values.values[i] = narrow<T>(dequantize_code(code.values[i], s.scale, s.zero, scale_dtype));
    store_pack<kCount>(w.row(e, r) + column, values);
  }
}

/// One warp a row: a block of columns is narrow.
template <class T>
__global__ void __launch_bounds__(kThreads)
    load_columns_kernel(Stack<const T> weight, int64_t begin, Stack<float> target) {
  const int64_t e = blockIdx.y, r = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (r >= target.rows) return;
  const T* source = weight.row(e, r) + begin;
  float* out = target.row(e, r);
#pragma unroll 4
  for (int64_t j = threadIdx.x % 32; j < target.cols; j += 32) out[j] = widen(source[j]);
}

}  // namespace

void CudaBackend::round_to_nearest(StackView w, const int32_t* order, const float* scales, const int8_t* zeros,
                                   int64_t group_size, const Grid& grid, int8_t* codes, StackView residual) {
  const GroupGrid groups = group_grid(scales, zeros, group_size, w.cols, grid, "round_to_nearest");
  SHARDQ_CHECK(!residual.data || (residual.count == w.count && residual.rows == w.rows && residual.cols == w.cols &&
                                  residual.dtype == DType::f32),
               ExitCode::internal, "round_to_nearest: residual [{}, {}, {}] for weights [{}, {}, {}]", residual.count,
               residual.rows, residual.cols, w.count, w.rows, w.cols);
  if (w.count == 0 || w.rows == 0 || w.cols == 0) return;
  state_->use();
  with_float_type(w.dtype, "round_to_nearest", [&]<class T>(T) {
    round_kernel<T><<<columns_by_rows(ceil_div(w.cols, kThreads), w.rows, w.count), kThreads, 0, state_->compute>>>(
        stack_of<const T>(w), order, groups, grid, codes, stack_of<float>(residual));
  });
  SHARDQ_LAUNCHED("round_to_nearest");
}

void CudaBackend::dequantize(const int8_t* codes, const float* scales, const int8_t* zeros, int64_t group_size,
                             const Grid& grid, StackView w) {
  const GroupGrid groups = group_grid(scales, zeros, group_size, w.cols, grid, "dequantize");
  if (w.count == 0 || w.rows == 0 || w.cols == 0) return;
  state_->use();
  with_float_type(w.dtype, "dequantize", [&]<class T>(T) {
    constexpr int kWide = kPerAccess<T>;
    const bool wide = group_size % kWide == 0 && w.stride % kWide == 0 && w.matrix_stride % kWide == 0 &&
                      whole_words(w.data) && whole_words(codes);
    const auto launch = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      dequantize_kernel<T, kCount>
          <<<columns_by_rows(ceil_div(w.cols, kThreads * kCount), w.rows, w.count), kThreads, 0, state_->compute>>>(
              codes, groups, grid.scale_dtype, stack_of<T>(w));
    };
    if (wide)
      launch(std::integral_constant<int, kWide>{});
    else
      launch(std::integral_constant<int, 1>{});
  });
  SHARDQ_LAUNCHED("dequantize");
}

void CudaBackend::load_columns(StackView weight, int64_t begin, StackView target) {
  SHARDQ_CHECK(weight.count == target.count && weight.rows == target.rows && begin >= 0 &&
                   begin + target.cols <= weight.cols && target.dtype == DType::f32,
               ExitCode::internal, "load_columns: columns {} + {} of [{}, {}, {}] into [{}, {}, {}]", begin,
               target.cols, weight.count, weight.rows, weight.cols, target.count, target.rows, target.cols);
  if (target.count == 0 || target.rows == 0 || target.cols == 0) return;
  state_->use();
  with_float_type(weight.dtype, "load_columns", [&]<class T>(T) {
    const dim3 grid(static_cast<unsigned>(ceil_div(target.rows, kThreads / 32)), static_cast<unsigned>(target.count));
    load_columns_kernel<T>
        <<<grid, kThreads, 0, state_->compute>>>(stack_of<const T>(weight), begin, stack_of<float>(target));
  });
  SHARDQ_LAUNCHED("load_columns");
}

}  // namespace shardq
