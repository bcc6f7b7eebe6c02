// Linear layers by cuBLAS; block updates too, where block_update.cu does not take them.
//
// cuBLAS knows column-major matrices only. A row-major matrix read that way is its transpose, so y = x w^T is asked for
// as y^T = (w^T)^T x^T: first operand w, transposed; second operand x.
#include <algorithm>

#include "kernels/cuda/block_update.hpp"
#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/environment_choice.hpp"
#include "kernels/cuda/vector.cuh"

namespace shardq {
namespace {

constexpr int kThreads = 256;

cudaDataType_t blas_type(DType dtype, const char* operation) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    case DType::f32:
      return CUDA_R_32F;
    default:
      fail(ExitCode::internal, "{}: expected bf16, f16 or f32, found {}", operation, safetensors_name(dtype));
  }
}

int blas_int(int64_t value, const char* operation) {
  SHARDQ_CHECK(value >= 0 && value <= INT32_MAX, ExitCode::internal, "{}: extent {} does not fit cuBLAS", operation,
               value);
  return static_cast<int>(value);
}

/// cuBLAS takes no row stride below the row length, which a view of few rows may have.
int leading(int64_t stride, int64_t cols, const char* operation) {
  return std::max(blas_int(std::max(stride, cols), operation), 1);
}

void check_linear(MatrixView x, int64_t w_rows, int64_t w_cols, DType w_dtype, MatrixView y, const char* operation) {
  SHARDQ_CHECK(x.cols == w_cols && y.cols == w_rows && x.rows == y.rows, ExitCode::internal,
               "{}: x [{}, {}] times w [{}, {}] does not give y [{}, {}]", operation, x.rows, x.cols, w_rows, w_cols,
               y.rows, y.cols);
  SHARDQ_CHECK(x.dtype == w_dtype && (y.dtype == x.dtype || y.dtype == DType::f32), ExitCode::internal,
               "{}: x {} and w {} must have one dtype, and y {} that one or F32", operation, safetensors_name(x.dtype),
               safetensors_name(w_dtype), safetensors_name(y.dtype));
}

/// y = x w^T + beta y, accumulated in fp32 (never TF32), on a side stream or (-1) the compute stream.
/// For some small shapes the library rounds the product to y's dtype before it adds y (seen for 64 x 96 x 128, bf16).
template <class State>
void multiply(State& state, int stream, MatrixView x, MatrixView w, float beta, MatrixView y, const char* operation) {
  state.planned_gemm(stream, {.transpose_a = true,
                              .transpose_b = false,
                              .m = w.rows,
                              .n = x.rows,
                              .k = w.cols,
                              .type = blas_type(w.dtype, operation),
                              .out = blas_type(y.dtype, operation),
                              .a = w.data,
                              .b = x.data,
                              .c = y.data,
                              .lda = leading(w.stride, w.cols, operation),
                              .ldb = leading(x.stride, x.cols, operation),
                              .ldc = leading(y.stride, y.cols, operation),
                              .beta = beta});
}

/// y = bias, or y += bias, on every row.
template <class Y, class B>
__global__ void __launch_bounds__(kThreads)
    bias_kernel(const B* bias, Y* y, int64_t rows, int64_t cols, int64_t stride, bool accumulate) {
  const int64_t c = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (c >= cols) return;
  const float value = widen(bias[c]);
  for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
    Y& out = y[r * stride + c];
    out = narrow<Y>(accumulate ? widen(out) + value : value);
  }
}

void spread_bias(cudaStream_t stream, const void* bias, DType bias_dtype, MatrixView y, bool accumulate) {
  const dim3 grid(static_cast<unsigned>(ceil_div(y.cols, kThreads)),
                  static_cast<unsigned>(std::min<int64_t>(y.rows, 65535)));
  with_float_type(y.dtype, "linear", [&]<class Y>(Y) {
    with_float_type(bias_dtype, "linear", [&]<class B>(B) {
      bias_kernel<Y, B>
          <<<grid, kThreads, 0, stream>>>(static_cast<const B*>(bias), y.as<Y>(), y.rows, y.cols, y.stride, accumulate);
    });
  });
  SHARDQ_LAUNCHED("linear (bias)");
}

void zero_rows(cudaStream_t stream, MatrixView y) {
  const size_t size = static_cast<size_t>(size_of(y.dtype));
  SHARDQ_CUDA(cudaMemset2DAsync(y.data, static_cast<size_t>(y.stride) * size, 0, static_cast<size_t>(y.cols) * size,
                                static_cast<size_t>(y.rows), stream));
}

__global__ void __launch_bounds__(kThreads)
    row_loss_kernel(const float* work, int64_t stride, int64_t matrix_stride, const float* pivots, int64_t rows,
                    int64_t n, float* losses) {
  // One block a row; (work R)_j^2 is summed in double, so that the order of threads does not show.
  const int64_t r = blockIdx.x, e = blockIdx.y;
  const float* value = work + e * matrix_stride + r * stride;
  double sum = 0;
  for (int64_t j = threadIdx.x; j < n; j += kThreads) {
    const float term = value[j] * pivots[e * n + j];
    sum += static_cast<double>(term) * term;
  }
  __shared__ double partial[kThreads];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) losses[e * rows + r] = static_cast<float>(partial[0]);
}

/// SHARDQ_UPDATE=library takes cuBLAS in fp32 for block updates: for comparison, and a way out.
bool library_update_is_wanted() {
  return environment_says("SHARDQ_UPDATE", "library");
}

}  // namespace

void CudaBackend::linear(MatrixView x, MatrixView w, const void* bias, MatrixView y, bool accumulate) {
  check_linear(x, w.rows, w.cols, w.dtype, y, "linear");
  if (y.rows == 0 || y.cols == 0) return;
  state_->use();
  // The bias is laid down first and the product added to it, in most shapes with one rounding. Where y accumulates too,
  // y + bias is rounded to y's dtype in between.
  if (bias) spread_bias(state_->compute, bias, w.dtype, y, accumulate);
  const bool add = accumulate || bias;
  if (x.cols == 0) {
    if (!add) zero_rows(state_->compute, y);
    return;
  }
  multiply(*state_, -1, x, w, add ? 1.0f : 0.0f, y, "linear");
}

void CudaBackend::linear_stack(MatrixView x, StackView w, std::span<const int64_t> offsets, MatrixView y) {
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == w.count + 1, ExitCode::internal,
               "linear_stack: {} matrices need {} offsets, found {}", w.count, w.count + 1, offsets.size());
  check_linear(x, w.rows, w.cols, w.dtype, y, "linear_stack");
  SHARDQ_CHECK(offsets.front() >= 0 && offsets.back() <= x.rows && std::is_sorted(offsets.begin(), offsets.end()),
               ExitCode::internal, "linear_stack: offsets [{}, {}) outside {} rows, or not ascending", offsets.front(),
               offsets.back(), x.rows);
  if (w.rows == 0 || w.count == 0 || offsets.back() == offsets.front()) return;
  state_->use();
  if (w.cols == 0) return zero_rows(state_->compute, y.row_range(offsets.front(), offsets.back()));

  const int64_t rows = offsets[1] - offsets[0];
  bool equal = w.count > 1 && !state_->reproducible;
  for (int64_t e = 0; e < w.count; ++e) equal = equal && offsets[e + 1] - offsets[e] == rows;
  if (equal) {
    const char* operation = "linear_stack";
    const float alpha = 1.0f, beta = 0.0f;
    const MatrixView x0 = x.row_range(offsets[0], offsets[1]), y0 = y.row_range(offsets[0], offsets[1]);
    SHARDQ_CUBLAS(cublasGemmStridedBatchedEx(
        state_->blas, CUBLAS_OP_T, CUBLAS_OP_N, blas_int(w.rows, operation), blas_int(rows, operation),
        blas_int(w.cols, operation), &alpha, w.data, blas_type(w.dtype, operation),
        leading(w.stride, w.cols, operation), w.matrix_stride, x0.data, blas_type(x.dtype, operation),
        leading(x.stride, x.cols, operation), rows * x.stride, &beta, y0.data, blas_type(y.dtype, operation),
        leading(y.stride, y.cols, operation), rows * y.stride, blas_int(w.count, operation), CUBLAS_COMPUTE_32F,
        CUBLAS_GEMM_DEFAULT));
    return;
  }
  // One expert alone leaves multiprocessors idle at the end of its tiles: the next ones fill them from other streams.
  constexpr int kStreams = 4;
  const int streams = w.count == 1 ? 0 : static_cast<int>(std::min<int64_t>(kStreams, w.count));
  if (streams > 0) state_->fork(streams);
  int next = 0;
  for (int64_t e = 0; e < w.count; ++e) {
    if (offsets[e + 1] == offsets[e]) continue;
    multiply(*state_, streams > 0 ? next++ % streams : -1, x.row_range(offsets[e], offsets[e + 1]), w[e], 0.0f,
             y.row_range(offsets[e], offsets[e + 1]), "linear_stack");
  }
  if (streams > 0) state_->join(streams);
}

void CudaBackend::block_update(StackView residual, StackView factor, StackView target) {
  SHARDQ_CHECK(residual.count == factor.count && residual.count == target.count && residual.rows == target.rows &&
                   residual.cols == factor.cols && factor.rows == target.cols && residual.dtype == DType::f32 &&
                   factor.dtype == DType::f32 && target.dtype == DType::f32,
               ExitCode::internal, "block_update: f32 residual [{}, {}, {}], factor [{}, {}, {}], target [{}, {}, {}]",
               residual.count, residual.rows, residual.cols, factor.count, factor.rows, factor.cols, target.count,
               target.rows, target.cols);
  if (target.count == 0 || target.rows == 0 || target.cols == 0 || residual.cols == 0) return;
  state_->use();
  if (!library_update_is_wanted() && tensor_update_accepts(*state_, residual, factor, target))
    return tensor_update(*state_, residual, factor, target);
  const char* operation = "block_update";
  const float one = 1.0f;
  SHARDQ_CUBLAS(cublasGemmStridedBatchedEx(
      state_->blas, CUBLAS_OP_T, CUBLAS_OP_N, blas_int(target.cols, operation), blas_int(target.rows, operation),
      blas_int(residual.cols, operation), &one, factor.data, CUDA_R_32F, leading(factor.stride, factor.cols, operation),
      factor.matrix_stride, residual.data, CUDA_R_32F, leading(residual.stride, residual.cols, operation),
      residual.matrix_stride, &one, target.data, CUDA_R_32F, leading(target.stride, target.cols, operation),
      target.matrix_stride, blas_int(target.count, operation), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

void CudaBackend::quadratic_loss(StackView residual, StackView factor, const float* pivots, StackView work,
                                 float* losses) {
  SHARDQ_CHECK(residual.count == factor.count && residual.cols == factor.cols && factor.rows == factor.cols &&
                   work.count == residual.count && work.rows == residual.rows && work.cols == residual.cols,
               ExitCode::internal, "quadratic_loss: residual [{}, {}, {}], factor [{}, {}, {}]", residual.count,
               residual.rows, residual.cols, factor.count, factor.rows, factor.cols);
  if (residual.count == 0 || residual.rows == 0 || residual.cols == 0) return;
  state_->use();
  // work = D (I + T): the factor stores zeros on and above its diagonal.
  for (int64_t e = 0; e < residual.count; ++e)
    SHARDQ_CUDA(cudaMemcpy2DAsync(work[e].data, static_cast<size_t>(work.stride) * sizeof(float), residual[e].data,
                                  static_cast<size_t>(residual.stride) * sizeof(float),
                                  static_cast<size_t>(residual.cols) * sizeof(float),
                                  static_cast<size_t>(residual.rows), cudaMemcpyDeviceToDevice, state_->compute));
  block_update(residual, factor, work);
  const dim3 grid(static_cast<unsigned>(residual.rows), static_cast<unsigned>(residual.count));
  row_loss_kernel<<<grid, kThreads, 0, state_->compute>>>(work.as<float>(), work.stride, work.matrix_stride, pivots,
                                                          residual.rows, residual.cols, losses);
  SHARDQ_LAUNCHED("quadratic_loss");
}

}  // namespace shardq
