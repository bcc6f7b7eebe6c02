// H = V^T V with V lower triangular, for a stack of matrices in place: the reversed Cholesky without reversing
// anything.
//
// With R the upper triangular factor of H = R R^T, V = R^T. The last row comes first: V[j][j] = sqrt(S_jj) and
// V[j][k] = S_jk / V[j][j], where S is H less the products of all rows below. In blocks of 128 rows, from the last up:
//   update  S_b,c = H_b,c - sum over rows r below the block of V[r, b]^T V[r, c]   for all blocks c <= b  (tensor
//   cores) factor  the block on the diagonal solve   V_bb^T V_b,c = S_b,c for the blocks left of it
// The update is all but a few per cent of the operations: n^3 / 3 in all. cuSOLVER's batched routine runs 128 matrices
// of 2048 at 14 TFLOP/s (H200).
//
// Update: a block of 8 warps a tile of 128 x 128, floats split into two tf32 numbers as in block_update.cu. Both
// operands have their sum index along columns of memory, so tiles are [32 rows][128 columns]. A lane takes four
// neighbouring columns as one 16-byte word and spreads them over four fragment rows or columns: any numbering will do,
// as long as the result is stored by the same one, and it makes the stores 16-byte words too. A pitch of 136 floats
// keeps the four rows that a quarter of a warp reads in different banks. Factor: a block a matrix, in shared memory.
// Solve: a thread a column, strips of 32 rows in registers as in gptq_loop.cu.
#include <algorithm>

#include "kernels/cuda/cholesky.hpp"
#include "kernels/cuda/instructions.cuh"

namespace shardq {
namespace {

constexpr int kBlock = 128;

/// One step: the rows of block `block`.
struct Step {
  CholeskyBatch batch;
  int* info;
  int block;
  __device__ float* matrix(int64_t i) const { return batch.data + batch.which[i] * batch.matrix_stride; }
  __device__ int64_t first() const { return int64_t{block} * kBlock; }
  __device__ int rows() const { return static_cast<int>(min(int64_t{kBlock}, batch.n - first())); }
};

// ---- update -------------------------------------------------------------------------------------

constexpr int kUpdateThreads = 256;
constexpr int kDepth = 32;  // rows of V a stage
constexpr int kStages = 3;
constexpr int kPitch = kBlock + 8;
constexpr int kTileFloats = kDepth * kPitch;
constexpr int kUpdateBytes = kStages * 2 * kTileFloats * 4;
constexpr int kWarpRows = 32, kWarpCols = 64;

/// Rows [row, row + kDepth) of a block of columns; what lies outside the matrix arrives as zeros.
__device__ void fetch_tile(uint32_t target, const float* matrix, const CholeskyBatch& batch, int64_t row,
                           int64_t column) {
  constexpr int kWords = kBlock / 4;
#pragma unroll
  for (int i = 0; i < kDepth * kWords / kUpdateThreads; ++i) {
    const int index = threadIdx.x + i * kUpdateThreads, r = index / kWords, word = index % kWords;
    const bool valid = row + r < batch.n && column + word * 4 < batch.n;
    copy_async(target + (r * kPitch + word * 4) * 4,
               valid ? matrix + (row + r) * batch.stride + column + word * 4 : matrix, valid);
  }
}

/// Sums of a warp: [fragment of 16 rows][fragment of 8 columns][element].
using Fragments = float[2][8][4];

__device__ void multiply_stage(const float* a_tile, const float* b_tile, int warp_row, int warp_col, Fragments& total) {
  const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  Fragments sum;
#pragma unroll
  for (int step = 0; step < kDepth / 8; ++step) {
    // Elements (row of the fragment, k): a lane's word at k holds rows 4 group .. 4 group + 3 of the warp's 32.
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 word =
          *reinterpret_cast<const float4*>(a_tile + (step * 8 + half * 4 + lane) * kPitch + warp_row + 4 * group);
      const float values[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SplitFloat s = split_float(values[i]);
        high[i / 2][2 * half + i % 2] = s.high;
        low[i / 2][2 * half + i % 2] = s.low;
      }
    }
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {  // 32 of the warp's columns
      const float* source = b_tile + (step * 8 + lane) * kPitch + warp_col + 32 * quarter + 4 * group;
      const float4 near = *reinterpret_cast<const float4*>(source),
                   far = *reinterpret_cast<const float4*>(source + 4 * kPitch);
      const float values[2][4] = {{near.x, near.y, near.z, near.w}, {far.x, far.y, far.z, far.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SplitFloat b0 = split_float(values[0][i]), b1 = split_float(values[1][i]);
        const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float(&c)[4] = sum[m][4 * quarter + i];
          if (step == 0)
            multiply_add_tf32(c, low[m], b0.high, b1.high, zero);
          else
            multiply_add_tf32(c, low[m], b0.high, b1.high, c);
          multiply_add_tf32(c, high[m], b0.low, b1.low, c);
          multiply_add_tf32(c, high[m], b0.high, b1.high, c);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[m][n][i] += sum[m][n][i];
}

/// H -= totals. Element e of fragment (m, 4 q + i) is row 4 group + 2 m + e / 2 and column 32 q + 4 (2 lane + e % 2) +
/// i of the warp's tile.
__device__ void subtract_totals(const Step& step, float* matrix, int64_t first_row, int64_t first_col,
                                const Fragments& total) {
  const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int64_t row = first_row + 4 * group + 2 * m + upper;
      if (row >= step.batch.n) continue;
#pragma unroll
      for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64_t column = first_col + 32 * q + 4 * (2 * lane + e);
          float* target = matrix + row * step.batch.stride + column;
          const float t[4] = {total[m][4 * q][2 * upper + e], total[m][4 * q + 1][2 * upper + e],
                              total[m][4 * q + 2][2 * upper + e], total[m][4 * q + 3][2 * upper + e]};
          if (column + 3 <= row) {
            float4& word = *reinterpret_cast<float4*>(target);
            word = make_float4(word.x - t[0], word.y - t[1], word.z - t[2], word.w - t[3]);
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (column + i <= row) target[i] -= t[i];
          }
        }
    }
}

__global__ void __launch_bounds__(kUpdateThreads, 1) update_kernel(const __grid_constant__ Step step) {
  extern __shared__ float4 memory[];
  float* stages = reinterpret_cast<float*>(memory);
  float* matrix = step.matrix(blockIdx.y);
  const int64_t own = step.first(), other = int64_t{blockIdx.x} * kBlock, begin = own + kBlock;
  const int steps = static_cast<int>((step.batch.n - begin + kDepth - 1) / kDepth);
  const auto fetch = [&](int index) {
    if (index < steps) {
      const uint32_t target = shared_address(stages) + index % kStages * 2 * kTileFloats * 4;
      fetch_tile(target, matrix, step.batch, begin + int64_t{index} * kDepth, own);
      fetch_tile(target + kTileFloats * 4, matrix, step.batch, begin + int64_t{index} * kDepth, other);
    }
    copy_commit();  // an empty group keeps the count of groups equal to that of stages
  };
  const int warp = threadIdx.x / 32, warp_row = warp % 4 * kWarpRows, warp_col = warp / 4 * kWarpCols;
  Fragments total = {};
#pragma unroll
  for (int index = 0; index < kStages - 1; ++index) fetch(index);
#pragma unroll 1
  for (int index = 0; index < steps; ++index) {
    copy_wait<kStages - 2>();
    __syncthreads();  // the stage has arrived for all; and all are done with the one that is fetched over next
    fetch(index + kStages - 1);
    const float* stage = stages + index % kStages * 2 * kTileFloats;
    multiply_stage(stage, stage + kTileFloats, warp_row, warp_col, total);
  }
  subtract_totals(step, matrix, own + warp_row, other + warp_col, total);
}

// ---- factor -------------------------------------------------------------------------------------

constexpr int kFactorThreads = 256;
constexpr int kFactorPitch = kBlock + 16;  // two neighbouring rows, 16 columns each, meet different banks
constexpr int kFactorBytes = kBlock * kFactorPitch * 4;

__global__ void __launch_bounds__(kFactorThreads) factor_kernel(const __grid_constant__ Step step) {
  extern __shared__ float4 memory[];
  float* s = reinterpret_cast<float*>(memory);
  float* block = step.matrix(blockIdx.x) + step.first() * (step.batch.stride + 1);
  const int rows = step.rows(), upper = threadIdx.x / 16, left = threadIdx.x % 16;
  for (int r = upper; r < rows; r += 16)
    for (int c = left; c <= r; c += 16) s[r * kFactorPitch + c] = block[r * step.batch.stride + c];
  __syncthreads();
  for (int j = rows - 1; j >= 0; --j) {
    float* row = s + j * kFactorPitch;
    const float square = row[j], pivot = sqrtf(square);
    __syncthreads();  // all have read the diagonal
    if (threadIdx.x == j) {
      row[j] = pivot;
      if (!(square > 0.0f && pivot < INFINITY))
        atomicCAS(&step.info[blockIdx.x], 0, static_cast<int>(step.first()) + j + 1);
    } else if (threadIdx.x < j) {
      row[threadIdx.x] = row[threadIdx.x] / pivot;
    }
    __syncthreads();
    for (int r = upper; r < j; r += 16)
      for (int c = left; c <= r; c += 16) s[r * kFactorPitch + c] = __fmaf_rn(-row[r], row[c], s[r * kFactorPitch + c]);
    __syncthreads();
  }
  for (int r = upper; r < rows; r += 16)
    for (int c = left; c <= r; c += 16) block[r * step.batch.stride + c] = s[r * kFactorPitch + c];
}

// ---- solve --------------------------------------------------------------------------------------

constexpr int kSolveThreads = 128;
constexpr int kStrip = 32;
constexpr int kSolveBytes = (kBlock * kBlock + kBlock + (kBlock - kStrip) * kSolveThreads) * 4;

/// p[i] -= v[i] * x over a strip.
__device__ void subtract_row(const float* v, float x, float (&p)[kStrip], int count) {
#pragma unroll
  for (int q = 0; q < kStrip / 4; ++q) {
    if (4 * q >= count) continue;
    const float4 word = reinterpret_cast<const float4*>(v)[q];
    p[4 * q] = __fmaf_rn(-word.x, x, p[4 * q]);
    if (4 * q + 1 < count) p[4 * q + 1] = __fmaf_rn(-word.y, x, p[4 * q + 1]);
    if (4 * q + 2 < count) p[4 * q + 2] = __fmaf_rn(-word.z, x, p[4 * q + 2]);
    if (4 * q + 3 < count) p[4 * q + 3] = __fmaf_rn(-word.w, x, p[4 * q + 3]);
  }
}

__global__ void __launch_bounds__(kSolveThreads) solve_kernel(const __grid_constant__ Step step) {
  extern __shared__ float4 memory[];
  float* v = reinterpret_cast<float*>(memory);     // the block on the diagonal, zeros elsewhere
  float* inverse = v + kBlock * kBlock;            // of its pivots; 0 past the last row
  float* solved = inverse + kBlock + threadIdx.x;  // rows 32 .. 127 of this thread's column
  float* matrix = step.matrix(blockIdx.y);
  const float* block = matrix + step.first() * (step.batch.stride + 1);
  const int rows = step.rows();
  for (int i = threadIdx.x; i < kBlock * kBlock; i += kSolveThreads) {
    const int r = i / kBlock, c = i % kBlock;
    v[i] = r < rows && c < r ? block[r * step.batch.stride + c] : 0.0f;
  }
  for (int r = threadIdx.x; r < kBlock; r += kSolveThreads)
    inverse[r] = r < rows ? 1.0f / block[r * (step.batch.stride + 1)] : 0.0f;
  __syncthreads();
  // Blocks left of the diagonal are whole: every thread has a column.
  float* column = matrix + step.first() * step.batch.stride + int64_t{blockIdx.x} * kSolveThreads + threadIdx.x;
#pragma unroll 1
  for (int first = kBlock - kStrip; first >= 0; first -= kStrip) {
    float p[kStrip];
#pragma unroll
    for (int i = 0; i < kStrip; ++i) p[i] = first + i < rows ? column[(first + i) * step.batch.stride] : 0.0f;
#pragma unroll 2
    for (int r = first + kStrip; r < kBlock; ++r)
      subtract_row(v + r * kBlock + first, solved[(r - kStrip) * kSolveThreads], p, kStrip);
#pragma unroll
    for (int i = kStrip - 1; i >= 0; --i) {
      p[i] *= inverse[first + i];
      subtract_row(v + (first + i) * kBlock + first, p[i], p, i);
    }
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      if (first + i < rows) column[(first + i) * step.batch.stride] = p[i];
      if (first > 0) solved[(first + i - kStrip) * kSolveThreads] = p[i];
    }
  }
}

}  // namespace

/// Experts are narrower than this, and wider matrices come alone.
constexpr int64_t kReproducibleColumns = 4096;

bool blocked_cholesky_accepts(const CudaBackend::State& state, const CholeskyBatch& batch) {
  // Each step has at least one tile a matrix: with few matrices most of the card would wait. Where the choice must not
  // depend on their number, the size alone decides.
  const bool pays = state.reproducible ? batch.n <= kReproducibleColumns : batch.count >= 8;
  return state.compute_capability >= 80 && state.shared_memory_per_block >= kSolveBytes && pays && batch.n > kBlock &&
         batch.n % 4 == 0 && batch.stride % 4 == 0 && batch.matrix_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(batch.data) % 16 == 0;
}

void blocked_cholesky(CudaBackend::State& state, const CholeskyBatch& batch, int* info) {
  SHARDQ_CUDA(cudaFuncSetAttribute(update_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kUpdateBytes));
  SHARDQ_CUDA(cudaFuncSetAttribute(factor_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFactorBytes));
  SHARDQ_CUDA(cudaFuncSetAttribute(solve_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSolveBytes));
  const auto count = static_cast<unsigned>(batch.count);
  const int blocks = static_cast<int>(ceil_div(batch.n, kBlock));
  for (int block = blocks - 1; block >= 0; --block) {
    const Step step{batch, info, block};
    if (block + 1 < blocks) {
      update_kernel<<<dim3(static_cast<unsigned>(block + 1), count), kUpdateThreads, kUpdateBytes, state.compute>>>(
          step);
      SHARDQ_LAUNCHED("factorize (update)");
    }
    factor_kernel<<<count, kFactorThreads, kFactorBytes, state.compute>>>(step);
    SHARDQ_LAUNCHED("factorize (factor)");
    if (block > 0) {
      solve_kernel<<<dim3(static_cast<unsigned>(block), count), kSolveThreads, kSolveBytes, state.compute>>>(step);
      SHARDQ_LAUNCHED("factorize (solve)");
    }
  }
}

}  // namespace shardq
