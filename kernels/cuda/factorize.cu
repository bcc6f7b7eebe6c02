// Reversed Cholesky, batched.  J H J = L L^T with J the reversal of order; R = J L J is upper triangular and H = R R^T.
// By cuSOLVER; stacks of even matrices, on request, in place by our own kernels (cholesky.cu):
//
// Let A[a][b] = H[n-1-a][n-1-b] be the reversed matrix, stored row-major for b >= a only. cuSOLVER reads memory
// column-major and sees the lower triangle of the symmetric A; its factor L(b, a) lands at A[a][b]. Then
// R(k, j) = L(n-1-k, n-1-j) lies at A[n-1-j][n-1-k]: turning the array by 180 degrees puts R(k, j) at row j, column k,
// and dividing row j by R(j, j) gives T^T. Everything happens in the factor's own memory.
//
// Our kernels move each element once each way (load: 4 n^2 bytes read and written a matrix; finish: the same), a block
// a row or a pair of rows. Under an activation order a row of H is gathered through shared memory, after the lower
// triangle was mirrored into the upper one (which is nobody's): gathering columns from a triangle would cost a 32-byte
// sector an element.
#include <algorithm>

#include "kernels/cuda/cholesky.hpp"
#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/environment_choice.hpp"

namespace shardq {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 32;

/// Device-side description of the matrices to factorise; entry i stands for matrix which[i].
struct Batch {
  float* h;
  int64_t h_stride, h_matrix_stride;
  float* factor;
  int64_t stride, matrix_stride;
  const int64_t* which;
  const int32_t* order;  // or null
  int64_t n;
  __device__ float* factor_row(int64_t i, int64_t r) const { return factor + which[i] * matrix_stride + r * stride; }
  __device__ float* h_row(int64_t i, int64_t r) const { return h + which[i] * h_matrix_stride + r * h_stride; }
};

/// h[c][r] = h[r][c] for r > c. One tile of 32 x 32 a block, read and written along rows.
__global__ void mirror_kernel(Batch batch) {
  if (blockIdx.x > blockIdx.y) return;
  __shared__ float tile[kTile][kTile + 1];
  const int64_t row0 = int64_t{blockIdx.y} * kTile, col0 = int64_t{blockIdx.x} * kTile;
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int64_t r = row0 + i, c = col0 + threadIdx.x;
    if (r < batch.n && c <= r) tile[i][threadIdx.x] = batch.h_row(blockIdx.z, r)[c];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += blockDim.y) {
    const int64_t r = col0 + i, c = row0 + threadIdx.x;
    if (c < batch.n && c > r) batch.h_row(blockIdx.z, r)[c] = tile[threadIdx.x][i];
  }
}

__device__ float damped(float diagonal, float damping) {
  return diagonal == 0.0f ? 1.0f : diagonal + damping;
}

/// Row a of the matrix: reversed, with zeros left of its diagonal; or as it is, as far as the diagonal. `kStaged`: H's
/// row passes through shared memory.
template <bool kStaged, bool kReversed>
__global__ void __launch_bounds__(kThreads) load_kernel(Batch batch, const float* damping) {
  extern __shared__ float staged[];
  const int64_t n = batch.n, a = blockIdx.x, i = blockIdx.y, last = n - 1;
  const int32_t* order = batch.order ? batch.order + batch.which[i] * n : nullptr;
  const auto column = [&](int64_t place) {
    const int64_t position = kReversed ? last - place : place;
    return order ? order[position] : position;
  };
  const float* source = batch.h_row(i, column(a));
  if constexpr (kStaged) {
    for (int64_t c = threadIdx.x; c < n; c += kThreads) staged[c] = source[c];
    __syncthreads();
    source = staged;
  }
  float* target = batch.factor_row(i, a);
#pragma unroll 4
  for (int64_t b = threadIdx.x; b < (kReversed ? n : a + 1); b += kThreads) {
    float value = 0.0f;
    if (!kReversed || b >= a) value = source[column(b)];
    target[b] = b == a ? damped(value, damping[i]) : value;
  }
}

/// Takes the pivots out, before their places are overwritten. cuSOLVER tests pivots for sign only: a NaN, or an
/// infinite one, is a failure too.
__global__ void __launch_bounds__(kThreads) pivot_kernel(Batch batch, float* pivots, int* info) {
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x, i = blockIdx.y, last = batch.n - 1;
  if (j >= batch.n) return;
  const float pivot = batch.factor_row(i, last - j)[last - j];
  pivots[batch.which[i] * batch.n + j] = pivot;
  if (!(pivot > 0.0f && pivot < INFINITY)) atomicCAS(&info[i], 0, static_cast<int>(j) + 1);
}

/// Turns the array by 180 degrees: each thread takes elements right of the diagonal to their mirrored places and leaves
/// zeros. Rows a and n-1-a a block, for equal work.
__global__ void __launch_bounds__(kThreads) finish_kernel(Batch batch, const float* pivots, const int* info) {
  const int64_t n = batch.n, i = blockIdx.y, last = n - 1;
  if (info[i] != 0) return;
  const auto turn = [&](int64_t a) {
    float *from = batch.factor_row(i, a), *to = batch.factor_row(i, last - a);
    const float pivot = pivots[batch.which[i] * n + last - a];
#pragma unroll 4
    for (int64_t b = a + threadIdx.x; b < n; b += kThreads) {
      const float value = from[b];
      if (b > a) to[last - b] = __fdiv_rn(value, pivot);
      from[b] = 0.0f;
    }
  };
  const int64_t first = blockIdx.x, second = last - first;
  turn(first);
  if (second != first) turn(second);
}

/// V to T^T where cholesky.cu left it: row j is divided by its pivot, and zeros follow from the diagonal on.
__global__ void __launch_bounds__(kThreads) scale_kernel(Batch batch, float* pivots, const int* info) {
  const int64_t n = batch.n, i = blockIdx.y, last = n - 1;
  if (info[i] != 0) return;
  const auto scale = [&](int64_t j) {
    float* row = batch.factor_row(i, j);
    const float pivot = row[j];
    __syncthreads();  // all have read it
    if (threadIdx.x == 0) pivots[batch.which[i] * n + j] = pivot;
#pragma unroll 4
    for (int64_t k = threadIdx.x; k < n; k += kThreads) row[k] = k < j ? __fdiv_rn(row[k], pivot) : 0.0f;
  };
  const int64_t first = blockIdx.x, second = last - first;
  scale(first);
  if (second != first) scale(second);
}

/// (H200, fp32) 128 matrices of 2048: 25 ms batched, 46 ms over 16 streams; 16 of 4096: 32 ms batched, 20 ms over
/// streams.
bool prefers_batched(const CudaBackend::State& state, int64_t n, int64_t count) {
  if (state.reproducible) return n <= 512;
  return count > 1 && (n <= 512 || (n <= 2560 && count >= 24));
}

void factorize_batched(CudaBackend::State& state, const std::vector<float*>& matrices, int n, int stride, int* info) {
  const DeviceArray<float*> pointers(state, std::span<float* const>(matrices), "pointers of factors");
  state.fork(1);
  SHARDQ_CUSOLVER(cusolverDnSpotrfBatched(state.side_solver(0), CUBLAS_FILL_MODE_LOWER, n, pointers.get(), stride, info,
                                          static_cast<int>(matrices.size())));
  state.join(1);
}

void factorize_over_streams(CudaBackend::State& state, const std::vector<float*>& matrices, int64_t n, int64_t stride,
                            int* info) {
  const int streams =
      static_cast<int>(std::min<int64_t>(CudaBackend::State::kSides, static_cast<int64_t>(matrices.size())));
  cusolverDnParams_t parameters = nullptr;
  SHARDQ_CUSOLVER(cusolverDnCreateParams(&parameters));
  size_t device_bytes = 0, host_bytes = 0;
  SHARDQ_CUSOLVER(cusolverDnXpotrf_bufferSize(state.side_solver(0), parameters, CUBLAS_FILL_MODE_LOWER, n, CUDA_R_32F,
                                              matrices[0], stride, CUDA_R_32F, &device_bytes, &host_bytes));
  const size_t device_step = (device_bytes + 255) / 256 * 256;
  const DeviceArray<char> workspace(state, static_cast<int64_t>(device_step) * streams, "workspace of Cholesky");
  std::vector<std::vector<char>> host_workspace(static_cast<size_t>(streams), std::vector<char>(host_bytes));
  for (int s = 0; s < streams; ++s) state.side_solver(s);
  state.fork(streams);
  for (size_t i = 0; i < matrices.size(); ++i) {
    const int s = static_cast<int>(i) % streams;
    SHARDQ_CUSOLVER(cusolverDnXpotrf(state.side_solver(s), parameters, CUBLAS_FILL_MODE_LOWER, n, CUDA_R_32F,
                                     matrices[i], stride, CUDA_R_32F, workspace.get() + s * device_step, device_bytes,
                                     host_workspace[static_cast<size_t>(s)].data(), host_bytes, info + i));
  }
  state.join(streams);
  // The host workspaces are in use until the streams are done.
  if (host_bytes > 0) SHARDQ_CUDA(cudaStreamSynchronize(state.compute));
  SHARDQ_CUSOLVER(cusolverDnDestroyParams(parameters));
}

template <bool kReversed>
void launch_load(const CudaBackend::State& state, const Batch& batch, int64_t count, const float* damping) {
  if (batch.order) {
    const auto tiles = static_cast<unsigned>(ceil_div(batch.n, kTile));
    mirror_kernel<<<dim3(tiles, tiles, static_cast<unsigned>(count)), dim3(kTile, 8), 0, state.compute>>>(batch);
    SHARDQ_LAUNCHED("factorize (mirror)");
  }
  const dim3 grid(static_cast<unsigned>(batch.n), static_cast<unsigned>(count));
  const int64_t row_bytes = batch.n * static_cast<int64_t>(sizeof(float));
  if (batch.order && row_bytes <= state.shared_memory_per_block) {
    const auto kernel = load_kernel<true, kReversed>;
    SHARDQ_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(state.shared_memory_per_block)));
    kernel<<<grid, kThreads, static_cast<size_t>(row_bytes), state.compute>>>(batch, damping);
  } else {
    load_kernel<false, kReversed><<<grid, kThreads, 0, state.compute>>>(batch, damping);
  }
  SHARDQ_LAUNCHED("factorize (load)");
}

void factorize_by_library(CudaBackend::State& state, const Batch& batch, std::span<const int64_t> which,
                          StackView factor, float* pivots, int* info) {
  const int64_t n = batch.n, count = static_cast<int64_t>(which.size());
  std::vector<float*> matrices;
  for (int64_t e : which) matrices.push_back(factor[e].as<float>());
  if (prefers_batched(state, n, count))
    factorize_batched(state, matrices, static_cast<int>(n), static_cast<int>(factor.stride), info);
  else
    factorize_over_streams(state, matrices, n, factor.stride, info);
  const dim3 pivot_grid(static_cast<unsigned>(ceil_div(n, kThreads)), static_cast<unsigned>(count));
  pivot_kernel<<<pivot_grid, kThreads, 0, state.compute>>>(batch, pivots, info);
  SHARDQ_LAUNCHED("factorize (pivots)");
  const dim3 finish_grid(static_cast<unsigned>((n + 1) / 2), static_cast<unsigned>(count));
  finish_kernel<<<finish_grid, kThreads, 0, state.compute>>>(batch, pivots, info);
  SHARDQ_LAUNCHED("factorize (finish)");
}

/// SHARDQ_FACTOR=library takes cuSOLVER for stacks too: for comparison, and a way out.
bool library_is_wanted() {
  return environment_says("SHARDQ_FACTOR", "library");
}

}  // namespace

void CudaBackend::factorize(StackView h, const int32_t* order, std::span<const int64_t> which,
                            std::span<const float> damping, StackView factor, float* pivots, std::span<int> status) {
  const int64_t n = h.cols, count = static_cast<int64_t>(which.size());
  SHARDQ_CHECK(h.rows == n && factor.rows == n && factor.cols == n && factor.count == h.count && factor.stride >= n &&
                   h.dtype == DType::f32 && factor.dtype == DType::f32,
               ExitCode::internal, "factorize: f32 h [{}, {}, {}], factor [{}, {}, {}] with stride {}", h.count, h.rows,
               h.cols, factor.count, factor.rows, factor.cols, factor.stride);
  SHARDQ_CHECK(which.size() == damping.size() && which.size() == status.size(), ExitCode::internal,
               "factorize: {} matrices, {} dampings, {} statuses", which.size(), damping.size(), status.size());
  for (int64_t e : which)
    SHARDQ_CHECK(0 <= e && e < h.count, ExitCode::internal, "factorize: matrix {} of {}", e, h.count);
  if (n == 0 || count == 0) return;
  state_->use();
  const DeviceArray<int64_t> which_device(*state_, which, "matrices to factorise");
  const DeviceArray<float> damping_device(*state_, damping, "dampings");
  const DeviceArray<int> info(*state_, count, "statuses of Cholesky");
  SHARDQ_CUDA(cudaMemsetAsync(info.get(), 0, static_cast<size_t>(count) * sizeof(int), state_->compute));
  const Batch batch{h.as<float>(),      h.stride,      h.matrix_stride,
                    factor.as<float>(), factor.stride, factor.matrix_stride,
                    which_device.get(), order,         n};
  const CholeskyBatch own{factor.as<float>(), factor.stride, factor.matrix_stride, which_device.get(), count, n};
  if (!library_is_wanted() && blocked_cholesky_accepts(*state_, own)) {
    launch_load<false>(*state_, batch, count, damping_device.get());
    blocked_cholesky(*state_, own, info.get());
    const dim3 grid(static_cast<unsigned>((n + 1) / 2), static_cast<unsigned>(count));
    scale_kernel<<<grid, kThreads, 0, state_->compute>>>(batch, pivots, info.get());
    SHARDQ_LAUNCHED("factorize (scale)");
  } else {
    launch_load<true>(*state_, batch, count, damping_device.get());
    factorize_by_library(*state_, batch, which, factor, pivots, info.get());
  }
  state_->download(status.data(), info.get(), count * static_cast<int64_t>(sizeof(int)));
}

}  // namespace shardq
