// P += D T^T for a block of columns, in fp32 precision on tensor cores.
//
// A float is split into two tf32 numbers of 11 bits, x = hi + lo, and D T is summed as lo hi + hi lo + hi hi: three
// tensor-core products, with an error of about 2^-21 of each |d t|, at twice the speed of the fp32 units. Tensor cores
// cut off the low bits of every partial sum; to keep that from adding up, each 32 columns of K are summed from zero and
// then added to totals in ordinary fp32.
//
// Mapping: a block of 8 warps computes 128 rows by 128 columns; a warp 32 by 64, as 2 x 8 fragments, totals and the
// current sums in registers. D and T arrive as floats, 32 of K a stage, three stages deep, and are split on the way
// from shared memory to the fragments. K may be numbered as we like as long as D and T agree: lane t of a row takes
// elements 4t .. 4t + 3 of 16 as one 16-byte word and uses them as the four that two fragments want. In shared memory
// the 16-byte words of odd rows are exchanged by word ^= 4, so that rows in pairs meet different banks. Few rows do not
// fill the card: K is then cut into pieces whose results are added in a fixed order by a second kernel.
#include <algorithm>

#include "kernels/cuda/block_update.hpp"
#include "kernels/cuda/instructions.cuh"

namespace shardq {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;  // rows of D, and of T
constexpr int kDepth = 32;  // of K a stage
constexpr int kStages = 3;
constexpr int kWords = kDepth / 4;
constexpr int kTileBytes = kTile * kDepth * 4;
constexpr int kSharedBytes = kStages * 2 * kTileBytes;
constexpr int kWarpRows = 32, kWarpCols = 64;
constexpr int kRowFragments = kWarpRows / 16, kColFragments = kWarpCols / 8;

struct Job {
  const float *d, *t;
  float* p;
  float* partial;  // [pieces, count, rows, width], where K is cut
  int64_t d_stride, d_matrix_stride, t_stride, t_matrix_stride, p_stride, p_matrix_stride;
  int64_t rows, width, k, piece;
  int pieces;
  bool pairs;  // two neighbouring elements of p can be accessed at once
};

/// Byte offset of a 16-byte word in a tile.
__device__ int word_offset(int row, int word) {
  return (row * kWords + (word ^ (row & 1) << 2)) * 16;
}

/// One tile of a stage: rows past `rows` and columns past `end` arrive as zeros.
__device__ void fetch_tile(uint32_t target, const float* source, int64_t stride, int64_t first_row, int64_t rows,
                           int64_t k, int64_t end) {
#pragma unroll
  for (int i = 0; i < kTile * kWords / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, row = index / kWords, word = index % kWords;
    const bool valid = first_row + row < rows && k + word * 4 < end;
    copy_async(target + word_offset(row, word), valid ? source + (first_row + row) * stride + k + word * 4 : source,
               valid);
  }
}

__device__ float4 read_word(const char* tile, int row, int word) {
  return *reinterpret_cast<const float4*>(tile + word_offset(row, word));
}

/// Adds a stage to the warp's totals.
__device__ void multiply_stage(const char* d_tile, const char* t_tile, int warp_row, int warp_col,
                               float (&total)[kRowFragments][kColFragments][4]) {
  const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  float sum[kRowFragments][kColFragments][4];
#pragma unroll
  for (int half = 0; half < kDepth / 16; ++half) {
    // Fragments of D for two steps of 8: [fragment][step].
    uint32_t high[kRowFragments][2][4], low[kRowFragments][2][4];
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
      const float4 upper = read_word(d_tile, warp_row + m * 16 + group, half * 4 + lane),
                   lower = read_word(d_tile, warp_row + m * 16 + group + 8, half * 4 + lane);
      const float values[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const SplitFloat s = split_float(values[step][i]);
          high[m][step][i] = s.high;
          low[m][step][i] = s.low;
        }
    }
#pragma unroll
    for (int n = 0; n < kColFragments; ++n) {
      const float4 t = read_word(t_tile, warp_col + n * 8 + group, half * 4 + lane);
      const SplitFloat s[2][2] = {{split_float(t.x), split_float(t.y)}, {split_float(t.z), split_float(t.w)}};
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
          float(&c)[4] = sum[m][n];
          const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (half == 0 && step == 0)
            multiply_add_tf32(c, low[m][step], s[step][0].high, s[step][1].high, zero);
          else
            multiply_add_tf32(c, low[m][step], s[step][0].high, s[step][1].high, c);
          multiply_add_tf32(c, high[m][step], s[step][0].low, s[step][1].low, c);
          multiply_add_tf32(c, high[m][step], s[step][0].high, s[step][1].high, c);
        }
    }
  }
#pragma unroll
  for (int m = 0; m < kRowFragments; ++m)
#pragma unroll
    for (int n = 0; n < kColFragments; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[m][n][i] += sum[m][n][i];
}

/// Elements (row, column) and (row, column + 1): added to p, or stored as part of a piece.
__device__ void put_pair(const Job& job, float* target, int64_t column, bool whole, float first, float second) {
  if (whole) {
    float2* pair = reinterpret_cast<float2*>(target + column);
    const float2 old = job.partial ? make_float2(0.0f, 0.0f) : *pair;
    *pair = make_float2(old.x + first, old.y + second);
    return;
  }
  if (column < job.width) target[column] = (job.partial ? 0.0f : target[column]) + first;
  if (column + 1 < job.width) target[column + 1] = (job.partial ? 0.0f : target[column + 1]) + second;
}

__device__ void put_totals(const Job& job, int64_t matrix, int piece, int64_t first_row, int64_t first_col,
                           const float (&total)[kRowFragments][kColFragments][4]) {
  const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kRowFragments; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first_row + m * 16 + half * 8 + group;
      if (row >= job.rows) continue;
      float* target = job.partial ? job.partial + ((piece * gridDim.z + matrix) * job.rows + row) * job.width
                                  : job.p + matrix * job.p_matrix_stride + row * job.p_stride;
#pragma unroll
      for (int n = 0; n < kColFragments; ++n) {
        const int64_t column = first_col + n * 8 + 2 * lane;
        put_pair(job, target, column, job.pairs && column + 1 < job.width, total[m][n][2 * half],
                 total[m][n][2 * half + 1]);
      }
    }
}

__global__ void __launch_bounds__(kThreads, 1) update_kernel(const __grid_constant__ Job job) {
  extern __shared__ float4 memory[];
  char* stages = reinterpret_cast<char*>(memory);
  const int64_t matrix = blockIdx.z, first_row = int64_t{blockIdx.x} * kTile;
  const int piece = blockIdx.y % job.pieces;
  const int64_t first_col = int64_t{blockIdx.y / job.pieces} * kTile;
  const int64_t begin = piece * job.piece, end = min(begin + job.piece, job.k);
  const int steps = static_cast<int>((end - begin + kDepth - 1) / kDepth);
  const float *d = job.d + matrix * job.d_matrix_stride, *t = job.t + matrix * job.t_matrix_stride;
  const auto fetch = [&](int step) {
    if (step < steps) {
      const uint32_t target = shared_address(stages) + step % kStages * 2 * kTileBytes;
      fetch_tile(target, d, job.d_stride, first_row, job.rows, begin + step * kDepth, end);
      fetch_tile(target + kTileBytes, t, job.t_stride, first_col, job.width, begin + step * kDepth, end);
    }
    copy_commit();  // an empty group keeps the count of groups equal to that of steps
  };
  const int warp = threadIdx.x / 32, warp_row = warp % 4 * kWarpRows, warp_col = warp / 4 * kWarpCols;
  float total[kRowFragments][kColFragments][4] = {};
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) fetch(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();  // the stage has arrived for all; and all are done with the one that is fetched over next
    fetch(step + kStages - 1);
    const char* stage = stages + step % kStages * 2 * kTileBytes;
    multiply_stage(stage, stage + kTileBytes, warp_row, warp_col, total);
  }
  put_totals(job, matrix, piece, first_row + warp_row, first_col + warp_col, total);
}

/// p += pieces, in their order.
__global__ void __launch_bounds__(kThreads) add_pieces_kernel(const __grid_constant__ Job job) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, e = blockIdx.y;
  if (index >= job.rows * job.width) return;
  const int64_t row = index / job.width, column = index % job.width;
  float& p = job.p[e * job.p_matrix_stride + row * job.p_stride + column];
  float sum = p;
  for (int piece = 0; piece < job.pieces; ++piece)
    sum += job.partial[(static_cast<int64_t>(piece) * gridDim.y + e) * job.rows * job.width + index];
  p = sum;
}

bool words(const StackView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride % 4 == 0 && view.matrix_stride % 4 == 0;
}

/// K a piece where the cut must not depend on the rows and matrices at hand.
constexpr int64_t kReproduciblePiece = 1024;

/// Pieces of K: enough of them to fill the last round of blocks, not so many that adding them up costs more.
int choose_pieces(int64_t tiles, int64_t k, int multiprocessors) {
  int best = 1;
  double best_cost = 1e300;
  for (int pieces = 1; pieces <= 16 && (pieces == 1 || k / pieces >= 256); ++pieces) {
    const int64_t rounds = ceil_div(tiles * pieces, multiprocessors);
    const double cost =
        static_cast<double>(rounds) * (static_cast<double>(k) / pieces + 64) + (pieces > 1 ? 32.0 * pieces : 0);
    if (cost < best_cost) best = pieces, best_cost = cost;
  }
  return best;
}

}  // namespace

bool tensor_update_accepts(const CudaBackend::State& state, StackView residual, StackView factor, StackView target) {
  return state.compute_capability >= 80 && kSharedBytes <= state.shared_memory_per_block && words(residual) &&
         words(factor) && residual.cols % 4 == 0 && residual.cols >= kDepth && target.cols >= 8 &&
         (target.rows >= 8 || state.reproducible);
}

void tensor_update(CudaBackend::State& state, StackView residual, StackView factor, StackView target) {
  const int64_t row_tiles = ceil_div(target.rows, kTile), col_tiles = ceil_div(target.cols, kTile), k = residual.cols;
  const int wanted = state.reproducible ? static_cast<int>(std::clamp<int64_t>(k / kReproduciblePiece, 1, 8))
                                        : choose_pieces(row_tiles * col_tiles * target.count, k, state.multiprocessors);
  const int64_t piece = ceil_div(ceil_div(k, wanted), kDepth) * kDepth;
  const int pieces = static_cast<int>(ceil_div(k, piece));
  const DeviceArray<float> partial(state, pieces > 1 ? pieces * target.count * target.rows * target.cols : 0,
                                   "pieces of a block update");
  const Job job{.d = residual.as<float>(),
                .t = factor.as<float>(),
                .p = target.as<float>(),
                .partial = partial.get(),
                .d_stride = residual.stride,
                .d_matrix_stride = residual.matrix_stride,
                .t_stride = factor.stride,
                .t_matrix_stride = factor.matrix_stride,
                .p_stride = target.stride,
                .p_matrix_stride = target.matrix_stride,
                .rows = target.rows,
                .width = target.cols,
                .k = k,
                .piece = piece,
                .pieces = pieces,
                .pairs = pieces > 1 ? target.cols % 2 == 0
                                    : target.stride % 2 == 0 && target.matrix_stride % 2 == 0 &&
                                          reinterpret_cast<uintptr_t>(target.data) % 8 == 0};
  SHARDQ_CUDA(cudaFuncSetAttribute(update_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const dim3 grid(static_cast<unsigned>(row_tiles), static_cast<unsigned>(col_tiles * pieces),
                  static_cast<unsigned>(target.count));
  update_kernel<<<grid, kThreads, kSharedBytes, state.compute>>>(job);
  SHARDQ_LAUNCHED("block_update");
  if (pieces == 1) return;
  const dim3 add_grid(static_cast<unsigned>(ceil_div(target.rows * target.cols, kThreads)),
                      static_cast<unsigned>(target.count));
  add_pieces_kernel<<<add_grid, kThreads, 0, state.compute>>>(job);
  SHARDQ_LAUNCHED("block_update (pieces)");
}

}  // namespace shardq
