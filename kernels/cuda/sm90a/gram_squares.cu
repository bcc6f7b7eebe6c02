// Gram sums on Hopper's tensor cores:  h[e] += x_e^T x_e, lower triangle, for a ragged stack, in one launch.
//
// Why no library call: cuBLAS computes the square or needs one call a panel and expert, chooses a kernel for every
// ragged count anew, and its accumulators run over all tokens of a call.
//
// Squares of 256 x 256 that touch the triangle are the units of work, once for every segment of at most a few thousand
// rows: tensor cores cut off the low bits of every partial sum, so long sums of positive terms come out too small by
// about rows * 2^-30; segments are added to h in ordinary fp32. A cluster of two blocks takes a square: each block 128
// rows of it (operand A: 128 columns of x) and all 256 columns (operand B). Both read the same B, so each fetches half
// of it and the copy engine delivers it to both.
//
// A block: one warpgroup whose first thread feeds a ring of 4 stages (64 rows of x: 128 + 256 columns, 48 KiB), two
// warpgroups that multiply 64 x 256 each, accumulators in registers. Blocks stay for the whole launch and go through
// the units with a stride; the next unit is fetched while the last one is added to h. x is row-major, so both operands
// have their M and N contiguous and the tokens, k, as lines: no transposition anywhere.
//
// A segment need not have a multiple of 64 rows: the last stage then holds rows of the next segment, which the
// multiplying threads overwrite with zeros before use. Sums of one matrix are ordered by a counter a square and block,
// so that results do not depend on timing. Blocks wait for one another there, hence all of them must be resident.
#include "kernels/cuda/cuda_check.hpp"
#include "kernels/cuda/sm90a/cluster_copy.cuh"
#include "kernels/cuda/sm90a/gram_squares.hpp"
#include "kernels/cuda/instructions.cuh"

namespace shardq {
namespace {

constexpr int kStages = 4;
constexpr int kStepRows = 64;  // tokens a stage
constexpr int kBoxCols = 64;   // columns in a 128-byte line
constexpr int kBoxBytes = kStepRows * kBoxCols * 2;
constexpr int kGroupBytes = 1024;        // 8 lines
constexpr int kBoxesA = 2, kBoxesB = 4;  // 128 and 256 columns
constexpr int kStageBytes = (kBoxesA + kBoxesB) * kBoxBytes;
constexpr int kBlocks = 2;  // of a cluster
constexpr int kBlockRows = 128;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kMultipliers = 2 * kGroup;
constexpr int kThreads = kGroup + kMultipliers;
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;  // and room to align

struct Job {
  float* h;
  int64_t n, stride, matrix_stride;
  const GramSegment* segments;
  const uint32_t* squares;
  int* turns;
  int64_t square_count, units;
  bool pairs;  // two neighbouring elements of h can be accessed at once
};

/// Addresses in shared memory.
struct Ring {
  uint32_t stages, full, empty;
  __device__ uint32_t a(uint32_t step) const { return stages + step % kStages * kStageBytes; }
  __device__ uint32_t b(uint32_t step) const { return a(step) + kBoxesA * kBoxBytes; }
  __device__ uint32_t full_at(uint32_t step) const { return full + step % kStages * 8; }
  __device__ uint32_t empty_at(uint32_t step) const { return empty + step % kStages * 8; }
  static __device__ uint32_t parity(uint32_t step) { return step / kStages & 1; }
};

/// A segment and a square of its matrix.
struct Unit {
  GramSegment segment;
  int64_t square;
  int row, column;  // first row and column of the square
  __device__ int steps() const { return (segment.rows + kStepRows - 1) / kStepRows; }
};
__device__ Unit unit_at(const Job& job, int64_t index) {
  Unit unit{job.segments[index / job.square_count], index % job.square_count, 0, 0};
  const uint32_t place = job.squares[unit.square];
  unit.row = static_cast<int>(place >> 16) * static_cast<int>(kGramSquare);
  unit.column = static_cast<int>(place & 0xffff) * static_cast<int>(kGramSquare);
  return unit;
}

/// The feeding thread. A stage is free when the multiplying warps of BOTH blocks have released it, since what is
/// fetched here lands in both.
__device__ void feed(const CUtensorMap& map, const Job& job, const Ring& ring, int rank) {
  constexpr uint16_t kBoth = 3;
  uint32_t step = 0;
  for (int64_t index = blockIdx.x / kBlocks; index < job.units; index += gridDim.x / kBlocks) {
    const Unit unit = unit_at(job, index);
    const int row_columns = unit.row + rank * kBlockRows, half = rank * kBoxesB / kBlocks;
    for (int i = 0; i < unit.steps(); ++i, ++step) {
      const int row = static_cast<int>(unit.segment.row) + i * kStepRows;
      barrier_wait_cluster(ring.empty_at(step), Ring::parity(step) ^ 1);
      barrier_expect(ring.full_at(step), kStageBytes);
      for (int box = 0; box < kBoxesA; ++box)
        copy_box(ring.a(step) + box * kBoxBytes, &map, row_columns + box * kBoxCols, row, ring.full_at(step));
      for (int box = half; box < half + kBoxesB / kBlocks; ++box)
        copy_box(ring.b(step) + box * kBoxBytes, &map, unit.column + box * kBoxCols, row, ring.full_at(step), kBoth);
    }
  }
}

/// Zeros in place of the rows of a stage from `valid` on. A row is one line of every box, whatever the swizzle.
__device__ void clear_rows(const Ring& ring, uint32_t step, int valid, int thread) {
  const int words = (kStepRows - valid) * 8;  // of 16 bytes, a box
  for (int i = thread; i < (kBoxesA + kBoxesB) * words; i += kMultipliers)
    store_zeros(ring.a(step) + i / words * kBoxBytes + valid * 128 + i % words * 16);
  publish_to_products();
  named_barrier(1, kMultipliers);
}

__device__ void release(const Ring& ring, uint32_t step) {
  if (threadIdx.x % 32 == 0)
    for (int block = 0; block < kBlocks; ++block) barrier_arrive_at(ring.empty_at(step), block);
}

/// Adds a thread's accumulators for one row of the square to h. Reads and writes pass by the first-level cache: the row
/// may have been written by another multiprocessor.
template <int kHalfRow>
__device__ void add_row(const Job& job, const Unit& unit, int row, int column, const float (&sum)[128]) {
  if (row >= job.n) return;
  float* target = job.h + unit.segment.matrix * job.matrix_stride + row * job.stride + column;
  const int last = min(static_cast<int>(job.n) - 1, row);  // the last column wanted
  if (job.pairs && last >= unit.column + static_cast<int>(kGramSquare) - 1) {
#pragma unroll
    for (int batch = 0; batch < 32; batch += 16) {
      float2 old[16];
#pragma unroll
      for (int c = 0; c < 16; ++c) old[c] = __ldcg(reinterpret_cast<const float2*>(target + 8 * (batch + c)));
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        const int at = 4 * (batch + c) + 2 * kHalfRow;
        __stcg(reinterpret_cast<float2*>(target + 8 * (batch + c)),
               make_float2(old[c].x + sum[at], old[c].y + sum[at + 1]));
      }
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < 32; ++c)
#pragma unroll
    for (int s = 0; s < 2; ++s)
      if (column + 8 * c + s <= last)
        __stcg(target + 8 * c + s, __ldcg(target + 8 * c + s) + sum[4 * c + 2 * kHalfRow + s]);
}

__device__ void add_to_matrix(const Job& job, const Unit& unit, int rank, int thread, const float (&sum)[128]) {
  int* turn = job.turns + (unit.segment.matrix * job.square_count + unit.square) * kBlocks + rank;
  if (unit.segment.turn > 0) {
    if (thread == 0)
      while (load_acquire(turn) != unit.segment.turn) {
      }
    named_barrier(1, kMultipliers);
  }
  const int lane = thread % 32;
  const int row = unit.row + rank * kBlockRows + thread / 32 * 16 + lane / 4, column = unit.column + lane % 4 * 2;
  add_row<0>(job, unit, row, column, sum);
  add_row<1>(job, unit, row + 8, column, sum);
  if (unit.segment.more) {
    __threadfence();
    named_barrier(1, kMultipliers);
    if (thread == 0) store_release(turn, unit.segment.turn + 1);
  }
}

/// The multiplying warpgroups; `thread` counts over both.
template <bool kHalf>
__device__ void multiply(const Job& job, const Ring& ring, int rank, int thread) {
  const int group = thread / kGroup;
  float sum[128];
  uint32_t step = 0;
  for (int64_t index = blockIdx.x / kBlocks; index < job.units; index += gridDim.x / kBlocks) {
    const Unit unit = unit_at(job, index);
    const int steps = unit.steps();
    for (int i = 0; i < steps; ++i, ++step) {
      barrier_wait_cluster(ring.full_at(step), Ring::parity(step));
      const int valid = unit.segment.rows - i * kStepRows;
      if (valid < kStepRows) clear_rows(ring, step, valid, thread);
      const uint64_t a = describe(ring.a(step) + group * kBoxBytes, kBoxBytes, kGroupBytes),
                     b = describe(ring.b(step), kBoxBytes, kGroupBytes);
      products_begin();
#pragma unroll
      for (int k = 0; k < kStepRows / 16; ++k)
        multiply_lines<kHalf>(sum, advance(a, 2 * k * kGroupBytes), advance(b, 2 * k * kGroupBytes), i > 0 || k > 0);
      products_commit();
      if (i > 0) {
        products_wait<1>();
        release(ring, step - 1);
      }
    }
    products_wait<0>();
    pin(sum);
    release(ring, step - 1);
    add_to_matrix(job, unit, rank, thread, sum);
  }
}

template <bool kHalf>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    gram_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Job job) {
  extern __shared__ char memory[];
  const uint32_t base = (shared_address(memory) + 1023) / 1024 * 1024;
  const Ring ring{base, base + kStages * kStageBytes, base + kStages * kStageBytes + kStages * 8};
  const int rank = static_cast<int>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(ring.full_at(stage), 1);
      barrier_init(ring.empty_at(stage), kBlocks * kMultipliers / 32);
    }
    barrier_init_fence();
  }
  cluster_barrier();
  if (threadIdx.x < kGroup) {
    leave_registers<40>();
    if (threadIdx.x == 0) feed(map, job, ring, rank);
  } else {
    take_registers<232>();
    multiply<kHalf>(job, ring, rank, static_cast<int>(threadIdx.x) - kGroup);
  }
  // No block leaves while the other may still write into its shared memory.
  __syncwarp();
  cluster_barrier();
}

CUtensorMap tensor_map(const MatrixView& x) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    SHARDQ_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    SHARDQ_CHECK(function && found == cudaDriverEntryPointSuccess, ExitCode::internal,
                 "the driver has no cuTensorMapEncodeTiled (CUDA 12 or later is needed)");
    return reinterpret_cast<Encode>(function);
  }();
  CUtensorMap map;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(x.cols), static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(x.stride) * 2};
  const cuuint32_t box[] = {kBoxCols, kStepRows}, every[] = {1, 1};
  const CUresult status =
      encode(&map, x.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
             x.data, extents, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  SHARDQ_CHECK(status == CUDA_SUCCESS, ExitCode::internal, "no tensor map for x [{}, {}] with stride {}: CUDA error {}",
               x.rows, x.cols, x.stride, static_cast<int>(status));
  return map;
}

template <bool kHalf>
void launch(cudaStream_t stream, const CUtensorMap& map, const Job& job) {
  static const int clusters = [] {
    SHARDQ_CUDA(cudaFuncSetAttribute(gram_kernel<kHalf>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kBlocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kBlocks, 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
    int resident = 0;
    SHARDQ_CUDA(cudaOccupancyMaxActiveClusters(&resident, gram_kernel<kHalf>, &config));
    SHARDQ_CHECK(resident > 0, ExitCode::internal, "the Gram kernel does not fit this device");
    return resident;
  }();
  const auto blocks = static_cast<unsigned>(kBlocks * (job.units < clusters ? job.units : clusters));
  gram_kernel<kHalf><<<blocks, kThreads, kSharedBytes, stream>>>(map, job);
  SHARDQ_LAUNCHED("accumulate_gram");
}

}  // namespace

std::vector<uint32_t> gram_square_order(int64_t n) {
  // Bands of 8 rows of squares, column by column: what runs at one time needs few columns of x.
  constexpr int64_t kBand = 8;
  const int64_t edge = (n + kGramSquare - 1) / kGramSquare;
  std::vector<uint32_t> order;
  for (int64_t band = 0; band < edge; band += kBand) {
    const int64_t end = band + kBand < edge ? band + kBand : edge;
    for (int64_t column = 0; column < end; ++column)
      for (int64_t row = column > band ? column : band; row < end; ++row)
        order.push_back(static_cast<uint32_t>(row << 16 | column));
  }
  return order;
}

bool gram_accepts(const MatrixView& x) {
  return (x.dtype == DType::bf16 || x.dtype == DType::f16) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
         x.stride % 8 == 0 && x.rows < INT32_MAX && x.cols <= 65535 * kGramSquare;
}

void launch_gram(cudaStream_t stream, const GramCall& call) {
  const int64_t squares = gram_squares(call.h.cols);
  const Job job{.h = call.h.as<float>(),
                .n = call.h.cols,
                .stride = call.h.stride,
                .matrix_stride = call.h.matrix_stride,
                .segments = call.segments,
                .squares = call.squares,
                .turns = call.turns,
                .square_count = squares,
                .units = squares * call.segment_count,
                .pairs = call.h.stride % 2 == 0 && call.h.matrix_stride % 2 == 0 &&
                         reinterpret_cast<uintptr_t>(call.h.data) % 8 == 0};
  if (job.units == 0) return;
  const CUtensorMap map = tensor_map(call.x);
  if (call.x.dtype == DType::f16)
    launch<true>(stream, map, job);
  else
    launch<false>(stream, map, job);
}

}  // namespace shardq
