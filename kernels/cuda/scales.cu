// Search of scales and zero points.
//
// Mapping: one thread a row of one group, 128 rows a block; the group passes through shared memory in pieces of 128
// columns, read along rows and used along columns (pitch 129: no bank conflicts). Each thread sums its error over
// columns in ascending order, which is the order of the CPU backend: the same scale wins, bit for bit (with norm 2).
// Work: about 18 instructions a weight and candidate, 21 candidates: bound by arithmetic. Errors only grow, so a
// candidate is dropped as soon as no row of the warp can win by it.
#include <algorithm>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/quantize.cuh"

namespace shardq {
namespace {

constexpr int kRows = 128;
constexpr int kColumns = 128;
constexpr int kPitch = kColumns + 1;
constexpr int kCheckEvery = 32;

struct Search {
  const void* weight;
  DType dtype;
  int64_t rows, cols, stride, matrix_stride;
  const float* importance;  // [count, cols], or null
  int steps;
  float norm;
  Grid grid;
  CodeRange range;
  int64_t group_size, groups;
  float* scales;
  int8_t* zeros;
};

struct Shared {
  float tile[kRows * kPitch];
  float importance[kColumns];
  // Errors of all candidates so far, [candidate][row], follow where a group has several pieces.
  __device__ float* errors() { return reinterpret_cast<float*>(this + 1); }
  static int64_t bytes(int64_t group_size, int steps) {
    const int64_t errors = group_size > kColumns && steps > 0 ? int64_t{steps + 1} * kRows : 0;
    return static_cast<int64_t>(sizeof(Shared)) + errors * static_cast<int64_t>(sizeof(float));
  }
};

template <class T>
__device__ void stage_rows(const Search& s, int64_t first_column, int columns, float* tile) {
  const int lane = threadIdx.x % 32;
  const T* base = static_cast<const T*>(s.weight) + blockIdx.z * s.matrix_stride + first_column;
#pragma unroll 4
  for (int i = threadIdx.x / 32; i < kRows; i += kRows / 32) {
    const int64_t r = min(int64_t{blockIdx.x} * kRows + i, s.rows - 1);
    for (int j = lane; j < columns; j += 32) tile[i * kPitch + j] = widen(base[r * s.stride + j]);
  }
}

/// A piece of the group into shared memory. All threads of the block call.
__device__ void stage(const Search& s, int64_t first_column, int columns, Shared& shared) {
  __syncthreads();
  if (s.dtype == DType::bf16)
    stage_rows<BFloat16>(s, first_column, columns, shared.tile);
  else if (s.dtype == DType::f16)
    stage_rows<Float16>(s, first_column, columns, shared.tile);
  else
    stage_rows<float>(s, first_column, columns, shared.tile);
  for (int j = threadIdx.x; j < columns; j += kRows)
    shared.importance[j] = s.importance ? s.importance[blockIdx.z * s.cols + first_column + j] : 1.0f;
  __syncthreads();
}

/// error + importance_j * |Q_j - W_j|^norm for one column.
template <DType kScale, bool kZero, bool kFast, bool kSquare>
__device__ float add_error(const Search& s, float w, float importance, ScaleZero grid, float inverse, float error) {
  uint32_t code;
  const float value =
      quantized<kScale, kZero, kFast>(w, grid.scale, inverse, static_cast<float>(grid.zero), s.range, code);
  const float difference = fabsf(value - w);
  return error + importance * (kSquare ? difference * difference : powf(difference, s.norm));
}

/// Adds the errors of a piece. Stops early, at a value of at least `bound`, where all rows of the warp have reached
/// their bounds.
template <DType kScale, bool kZero, bool kFast>
__device__ float measure(const Search& s, const Shared& shared, int columns, ScaleZero grid, float error, float bound) {
  const float* w = shared.tile + threadIdx.x * kPitch;
  const float inverse = kFast ? reciprocal(grid.scale) : 0.0f;
  for (int begin = 0; begin < columns; begin += kCheckEvery) {
    const int end = min(begin + kCheckEvery, columns);
    if (s.norm == 2.0f) {
#pragma unroll 8
      for (int j = begin; j < end; ++j)
        error = add_error<kScale, kZero, kFast, true>(s, w[j], shared.importance[j], grid, inverse, error);
    } else {
#pragma unroll 1
      for (int j = begin; j < end; ++j)
        error = add_error<kScale, kZero, kFast, false>(s, w[j], shared.importance[j], grid, inverse, error);
    }
    if (__all_sync(0xffffffffu, error >= bound)) break;
  }
  return error;
}

template <DType kScale, bool kZero>
__device__ float measure(const Search& s, const Shared& shared, int columns, ScaleZero grid, float error, float bound) {
  // The whole warp takes one way: measure() votes.
  if (__all_sync(0xffffffffu, kScale != DType::f32 && divides_fast(grid.scale)))
    return measure<kScale, kZero, kScale != DType::f32>(s, shared, columns, grid, error, bound);
  return measure<kScale, kZero, false>(s, shared, columns, grid, error, bound);
}

__device__ ScaleZero candidate(const Search& s, float lowest, float highest, int step) {
  const float shrink = 1.0f - 0.025f * static_cast<float>(step);
  return scale_of_range(lowest * shrink, highest * shrink, s.grid);
}

template <DType kScale, bool kZero>
__global__ void __launch_bounds__(kRows) scales_kernel(const __grid_constant__ Search s) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int64_t group_begin = blockIdx.y * s.group_size;
  const int pieces = static_cast<int>((s.group_size + kColumns - 1) / kColumns);
  const auto columns_of = [&](int piece) {
    return static_cast<int>(min(int64_t{kColumns}, s.group_size - int64_t{piece} * kColumns));
  };
  const float* w = shared.tile + threadIdx.x * kPitch;
  float lowest = 0.0f, highest = 0.0f;
  for (int piece = 0; piece < pieces; ++piece) {
    const int columns = columns_of(piece);
    stage(s, group_begin + int64_t{piece} * kColumns, columns, shared);
    for (int j = 0; j < columns; ++j) {
      lowest = w[j] < lowest ? w[j] : lowest;
      highest = w[j] > highest ? w[j] : highest;
    }
  }

  ScaleZero best = candidate(s, lowest, highest, 0);
  if (s.steps > 0) {
    float best_error = INFINITY;
    for (int piece = 0; piece < pieces; ++piece) {
      const int columns = columns_of(piece);
      const bool last = piece + 1 == pieces;
      if (pieces > 1) stage(s, group_begin + int64_t{piece} * kColumns, columns, shared);
      for (int step = 0; step <= s.steps; ++step) {
        const ScaleZero grid = candidate(s, lowest, highest, step);
        float* running = shared.errors() + step * kRows + threadIdx.x;
        const float error = measure<kScale, kZero>(s, shared, columns, grid, piece == 0 ? 0.0f : *running,
                                                   last ? best_error : INFINITY);
        if (!last) {
          *running = error;
        } else if (step == 0 || error < best_error) {
          best = grid;
          best_error = error;
        }
      }
    }
  }
  const int64_t r = int64_t{blockIdx.x} * kRows + threadIdx.x;
  if (r >= s.rows) return;
  const int64_t index = (blockIdx.z * s.rows + r) * s.groups + blockIdx.y;
  s.scales[index] = best.scale;
  if (s.zeros) s.zeros[index] = static_cast<int8_t>(best.zero);
}

}  // namespace

void CudaBackend::find_scales(StackView w, const float* importance, int shrink_steps, float norm, const Grid& grid,
                              int64_t group_size, float* scales, int8_t* zeros) {
  SHARDQ_CHECK(group_size > 0 && w.cols % group_size == 0, ExitCode::internal,
               "find_scales: groups of {} do not divide {} columns", group_size, w.cols);
  SHARDQ_CHECK(grid.symmetric || zeros, ExitCode::internal, "find_scales: an asymmetric grid needs zeros");
  SHARDQ_CHECK(w.dtype == DType::bf16 || w.dtype == DType::f16 || w.dtype == DType::f32, ExitCode::internal,
               "find_scales: expected bf16, f16 or f32, found {}", safetensors_name(w.dtype));
  const int64_t groups = w.cols / group_size, bytes = Shared::bytes(group_size, shrink_steps);
  SHARDQ_CHECK(groups <= 65535 && bytes <= state_->shared_memory_per_block, ExitCode::internal,
               "find_scales: {} groups a row and {} shrink steps are more than the kernel holds", groups, shrink_steps);
  if (w.count == 0 || w.rows == 0 || w.cols == 0) return;
  state_->use();
  const Search search{.weight = w.data,
                      .dtype = w.dtype,
                      .rows = w.rows,
                      .cols = w.cols,
                      .stride = w.stride,
                      .matrix_stride = w.matrix_stride,
                      .importance = importance,
                      .steps = shrink_steps,
                      .norm = norm,
                      .grid = grid,
                      .range = code_range(grid),
                      .group_size = group_size,
                      .groups = groups,
                      .scales = scales,
                      .zeros = zeros};
  const dim3 blocks(static_cast<unsigned>(ceil_div(w.rows, kRows)), static_cast<unsigned>(groups),
                    static_cast<unsigned>(w.count));
  with_scale_type(grid.scale_dtype, [&](auto scale) {
    constexpr DType kScale = decltype(scale)::value;
    const auto kernel = grid.symmetric ? scales_kernel<kScale, false> : scales_kernel<kScale, true>;
    SHARDQ_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    kernel<<<blocks, kRows, static_cast<size_t>(bytes), state_->compute>>>(search);
  });
  SHARDQ_LAUNCHED("find_scales");
}

}  // namespace shardq
