// Arithmetic on stacks of lower triangles: scaling, sums, diagonals, packing. All bound by memory.
//
// Mapping: one thread block takes rows i and n - 1 - i of a matrix, together n + 1 elements, so that all blocks have
// equal work; neighbouring threads take neighbouring columns. No library knows triangles of row-major stacks.
#include "kernels/cuda/cuda_state.hpp"

namespace shardq {
namespace {

constexpr int kThreads = 256;

/// What a kernel needs to know of a stack of square f32 matrices.
struct Squares {
  float* data;
  int64_t n, stride, matrix_stride;
  __device__ float* row(int64_t matrix, int64_t r) const { return data + matrix * matrix_stride + r * stride; }
};

Squares squares(StackView h, const char* operation) {
  SHARDQ_CHECK(h.rows == h.cols && h.dtype == DType::f32, ExitCode::internal,
               "{}: expected a stack of square f32 matrices, found [{}, {}, {}] {}", operation, h.count, h.rows, h.cols,
               safetensors_name(h.dtype));
  return {h.as<float>(), h.rows, h.stride, h.matrix_stride};
}

/// One block a pair of rows (x) and matrix (y).
dim3 row_pairs(int64_t n, int64_t count) {
  return dim3(static_cast<unsigned>((n + 1) / 2), static_cast<unsigned>(count));
}

/// body(row, column) over the two rows of this block.
template <class Body>
__device__ void for_each_lower(int64_t n, Body&& body) {
  const int64_t first = blockIdx.x, second = n - 1 - first;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c <= first; c += kThreads) body(first, c);
  if (second == first) return;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c <= second; c += kThreads) body(second, c);
}

__global__ void __launch_bounds__(kThreads)
    blend_kernel(Squares h, const float* own, const float* shared, const float* pool, int64_t pool_stride) {
  const int64_t e = blockIdx.y;
  const float a = own[e], b = pool ? shared[e] : 0.0f;
  for_each_lower(h.n, [&](int64_t r, int64_t c) {
    float* value = h.row(e, r) + c;
    *value = pool ? a * *value + b * pool[r * pool_stride + c] : *value * a;
  });
}

/// Matrices are added in ascending order, whatever the split of a stack over calls.
__global__ void __launch_bounds__(kThreads) sum_kernel(Squares h, int64_t count, float* pool, int64_t pool_stride) {
  for_each_lower(h.n, [&](int64_t r, int64_t c) {
    float sum = pool[r * pool_stride + c];
    const float* value = h.row(0, r) + c;
#pragma unroll 8
    for (int64_t e = 0; e < count; ++e) sum += value[e * h.matrix_stride];
    pool[r * pool_stride + c] = sum;
  });
}

__global__ void __launch_bounds__(kThreads) diagonal_kernel(Squares h, float* diagonal) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x, e = blockIdx.y;
  if (r < h.n) diagonal[e * h.n + r] = h.row(e, r)[r];
}

template <bool kPack>
__global__ void __launch_bounds__(kThreads) pack_kernel(Squares h, float* packed) {
  const int64_t e = blockIdx.y;
  float* base = packed + e * (h.n * (h.n + 1) / 2);
  for_each_lower(h.n, [&](int64_t r, int64_t c) {
    float& full = h.row(e, r)[c];
    float& flat = base[r * (r + 1) / 2 + c];
    if constexpr (kPack)
      flat = full;
    else
      full = flat;
  });
}

}  // namespace

void CudaBackend::scale_and_blend(StackView h, std::span<const float> own, std::span<const float> shared,
                                  MatrixView pool) {
  const Squares matrices = squares(h, "scale_and_blend");
  const bool blend = pool.data != nullptr;
  SHARDQ_CHECK(
      static_cast<int64_t>(own.size()) == h.count && (!blend || static_cast<int64_t>(shared.size()) == h.count),
      ExitCode::internal, "scale_and_blend: {} matrices, {} and {} factors", h.count, own.size(), shared.size());
  SHARDQ_CHECK(!blend || (pool.rows == h.rows && pool.cols == h.cols && pool.dtype == DType::f32), ExitCode::internal,
               "scale_and_blend: pool [{}, {}] for matrices [{}, {}]", pool.rows, pool.cols, h.rows, h.cols);
  if (h.count == 0 || h.rows == 0) return;
  state_->use();
  const DeviceArray<float> own_device(*state_, own, "blend factors");
  const DeviceArray<float> shared_device(*state_, blend ? shared : std::span<const float>{}, "blend factors");
  blend_kernel<<<row_pairs(h.rows, h.count), kThreads, 0, state_->compute>>>(
      matrices, own_device.get(), shared_device.get(), blend ? pool.as<float>() : nullptr, pool.stride);
  SHARDQ_LAUNCHED("scale_and_blend");
}

void CudaBackend::sum_stack(StackView h, MatrixView pool) {
  const Squares matrices = squares(h, "sum_stack");
  SHARDQ_CHECK(pool.rows == h.rows && pool.cols == h.cols && pool.dtype == DType::f32, ExitCode::internal,
               "sum_stack: pool [{}, {}] for matrices [{}, {}]", pool.rows, pool.cols, h.rows, h.cols);
  if (h.rows == 0 || h.count == 0) return;
  state_->use();
  sum_kernel<<<row_pairs(h.rows, 1), kThreads, 0, state_->compute>>>(matrices, h.count, pool.as<float>(), pool.stride);
  SHARDQ_LAUNCHED("sum_stack");
}

void CudaBackend::diagonals(StackView h, float* host) {
  const Squares matrices = squares(h, "diagonals");
  if (h.count == 0 || h.rows == 0) return;
  state_->use();
  const DeviceArray<float> diagonal(*state_, h.count * h.rows, "diagonals");
  const dim3 grid(static_cast<unsigned>(ceil_div(h.rows, kThreads)), static_cast<unsigned>(h.count));
  diagonal_kernel<<<grid, kThreads, 0, state_->compute>>>(matrices, diagonal.get());
  SHARDQ_LAUNCHED("diagonals");
  state_->download(host, diagonal.get(), h.count * h.rows * static_cast<int64_t>(sizeof(float)));
}

void CudaBackend::pack_lower(StackView h, float* packed) {
  const Squares matrices = squares(h, "pack_lower");
  if (h.count == 0 || h.rows == 0) return;
  state_->use();
  pack_kernel<true><<<row_pairs(h.rows, h.count), kThreads, 0, state_->compute>>>(matrices, packed);
  SHARDQ_LAUNCHED("pack_lower");
}

void CudaBackend::unpack_lower(const float* packed, StackView h) {
  const Squares matrices = squares(h, "unpack_lower");
  if (h.count == 0 || h.rows == 0) return;
  state_->use();
  pack_kernel<false>
      <<<row_pairs(h.rows, h.count), kThreads, 0, state_->compute>>>(matrices, const_cast<float*>(packed));
  SHARDQ_LAUNCHED("unpack_lower");
}

}  // namespace shardq
