// Gram sums on Hopper's tensor cores:  h[e] += x_e^T x_e, lower triangle, for a ragged stack, in one launch.
//
// Why no library call: cuBLAS computes the square or needs one call a panel and expert, chooses a kernel for every
// ragged count anew, and its accumulators run over all tokens of a call. Tensor cores cut off the low bits of every
// partial sum: sums of positive terms, such as the diagonal, come out too small by 3.4e-9 a token (H200, 2026-11-30).
// Here the accumulators are added to totals in ordinary fp32, in registers too, every kChainSteps * 64 tokens.
//
// A panel of 256 rows and 192 columns of h is the work of a cluster of two blocks: each block has 128 of the rows
// (operand A: 128 columns of x) and all 192 columns (operand B). Both read the same B, so each fetches half of it and
// the copy engine delivers it to both. 192 columns and not 256, because totals take as many registers as accumulators.
//
// A block: one warpgroup whose first thread feeds a ring of stages (64 rows of x: 128 + 192 columns, 40 KiB), two
// warpgroups that multiply 64 x 192 each. Blocks stay for the whole launch and go through the units (a panel of a
// segment) with a stride; the next unit is fetched while the last one is added to h. x is row-major, so both operands
// have their M and N along lines and the tokens, k, one line each: no transposition anywhere.
//
// A segment need not have a multiple of 64 rows: its last stage then holds rows of the next segment, which the
// multiplying threads overwrite with zeros before use. Segments of one matrix are added in a fixed order, kept by a
// counter a panel and block, so that results do not depend on timing. Blocks wait for one another there, hence all of
// them must be resident.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/cuda_check.hpp"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/sm90a/cluster_copy.cuh"
#include "kernels/cuda/sm90a/gram_panels.hpp"

namespace shardq {
namespace {

constexpr int kPanelRows = 256, kPanelCols = 192;
constexpr int kBlocks = 2;  // of a cluster
constexpr int kBlockRows = kPanelRows / kBlocks;
constexpr int kStepRows = 64;    // tokens a stage
constexpr int kChainSteps = 40;  // stages an accumulator
constexpr int kLineCols = 64;    // columns in a line of 128 bytes
constexpr int kLineBytes = 128;
constexpr int kGroupBytes = 8 * kLineBytes;
constexpr int kSliceBytes = kStepRows * kLineBytes;  // 64 columns of a stage
constexpr int kBoxRows = kStepRows / kBlocks;        // what one copy brings: half a slice
constexpr int kBoxBytes = kBoxRows * kLineBytes;
constexpr int kSlicesA = kBlockRows / kLineCols, kSlicesB = kPanelCols / kLineCols;
constexpr int kStageBytes = (kSlicesA + kSlicesB) * kSliceBytes;
constexpr int kStages = 5;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kMultipliers = 2 * kGroup;
constexpr int kThreads = kGroup + kMultipliers;
constexpr int kAccumulators = 64 * kPanelCols / kGroup;
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;  // and room to align

struct Job {
  float* h;
  int64_t n, stride, matrix_stride;
  const GramSegment* segments;
  const uint32_t* panels;
  int* turns;
  int64_t panel_count, units;
  bool pairs;  // two neighbouring elements of h can be accessed at once
};

/// A place in the ring of stages. The same sequence of places passes by the feeding and the multiplying threads.
struct Place {
  int stage = 0;
  int parity = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Addresses in shared memory.
struct Ring {
  uint32_t stages, full, empty;
  __device__ uint32_t a(const Place& at) const { return stages + at.stage * kStageBytes; }
  __device__ uint32_t b(const Place& at) const { return a(at) + kSlicesA * kSliceBytes; }
  __device__ uint32_t full_at(const Place& at) const { return full + at.stage * 8; }
  __device__ uint32_t empty_at(const Place& at) const { return empty + at.stage * 8; }
};

/// A segment and a panel of its matrix.
struct Unit {
  GramSegment segment;
  int64_t panel;
  int row, column;  // first row and column of the panel
  __device__ int steps() const { return (segment.rows + kStepRows - 1) / kStepRows; }
};
__device__ Unit unit_at(const Job& job, int64_t index) {
  Unit unit{job.segments[index / job.panel_count], index % job.panel_count, 0, 0};
  const uint32_t place = job.panels[unit.panel];
  unit.row = static_cast<int>(place >> 16) * kPanelRows;
  unit.column = static_cast<int>(place & 0xffff) * kPanelCols;
  return unit;
}

/// The feeding thread. A stage is free when the multiplying warps of BOTH blocks have released it, since what is
/// fetched here lands in both.
__device__ void feed(const CUtensorMap& map, const Job& job, const Ring& ring, int rank) {
  constexpr uint16_t kBoth = 3;
  Place at;
  for (int64_t index = blockIdx.x / kBlocks; index < job.units; index += gridDim.x / kBlocks) {
    const Unit unit = unit_at(job, index);
    const int rows_of_h = unit.row + rank * kBlockRows;
    int row = static_cast<int>(unit.segment.row);
#pragma unroll 1
    for (int i = unit.steps(); i > 0; --i, row += kStepRows, at.next()) {
      barrier_wait(ring.empty_at(at), at.parity ^ 1);
      barrier_expect(ring.full_at(at), kStageBytes);
#pragma unroll
      for (int box = 0; box < kSlicesA * kBlocks; ++box)
        copy_box(ring.a(at) + box * kBoxBytes, &map, rows_of_h + box / kBlocks * kLineCols,
                 row + box % kBlocks * kBoxRows, ring.full_at(at));
#pragma unroll
      for (int slice = 0; slice < kSlicesB; ++slice)
        copy_box(ring.b(at) + slice * kSliceBytes + rank * kBoxBytes, &map, unit.column + slice * kLineCols,
                 row + rank * kBoxRows, ring.full_at(at), kBoth);
    }
  }
}

/// Zeros in place of the rows of a stage from `valid` on. A row is one line of every slice, whatever the swizzle.
__device__ void clear_rows(const Ring& ring, const Place& at, int valid, int thread) {
  const int words = (kStepRows - valid) * 8;  // of 16 bytes, a slice
  for (int i = thread; i < (kSlicesA + kSlicesB) * words; i += kMultipliers)
    store_zeros(ring.a(at) + i / words * kSliceBytes + valid * kLineBytes + i % words * 16);
  publish_to_products();
  named_barrier(1, kMultipliers);
}

__device__ void release(const Ring& ring, const Place& at) {
  if (threadIdx.x % 32 < kBlocks) barrier_arrive_at(ring.empty_at(at), threadIdx.x % 32);
}

/// Adds a thread's totals for one row of the panel to h. Reads and writes pass by the first-level cache: the row may
/// have been written by another multiprocessor.
template <int kHalfRow>
__device__ void add_row(const Job& job, const Unit& unit, int row, int column, const float (&total)[kAccumulators]) {
  if (row >= job.n) return;
  float* target = job.h + unit.segment.matrix * job.matrix_stride + row * job.stride + column;
  const int last = min(static_cast<int>(job.n) - 1, row);  // the last column wanted
  if (job.pairs && last >= unit.column + kPanelCols - 1) {
    constexpr int kBatch = 12;
#pragma unroll
    for (int batch = 0; batch < kPanelCols / 8; batch += kBatch) {
      float2 old[kBatch];
#pragma unroll
      for (int c = 0; c < kBatch; ++c) old[c] = __ldcg(reinterpret_cast<const float2*>(target + 8 * (batch + c)));
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const int at = 4 * (batch + c) + 2 * kHalfRow;
        __stcg(reinterpret_cast<float2*>(target + 8 * (batch + c)),
               make_float2(old[c].x + total[at], old[c].y + total[at + 1]));
      }
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < kPanelCols / 8; ++c)
#pragma unroll
    for (int s = 0; s < 2; ++s)
      if (column + 8 * c + s <= last)
        __stcg(target + 8 * c + s, __ldcg(target + 8 * c + s) + total[4 * c + 2 * kHalfRow + s]);
}

__device__ void add_to_matrix(const Job& job, const Unit& unit, int rank, int thread,
                              const float (&total)[kAccumulators]) {
  int* turn = job.turns + (unit.segment.matrix * job.panel_count + unit.panel) * kBlocks + rank;
  if (unit.segment.turn > 0) {
    if (thread == 0)
      while (load_acquire(turn) != unit.segment.turn) {
      }
    named_barrier(1, kMultipliers);
  }
  const int lane = thread % 32;
  const int row = unit.row + rank * kBlockRows + thread / 32 * 16 + lane / 4, column = unit.column + lane % 4 * 2;
  add_row<0>(job, unit, row, column, total);
  add_row<1>(job, unit, row + 8, column, total);
  if (unit.segment.more) {
    // The release covers what the barrier lets this thread see: the stores of all.
    named_barrier(1, kMultipliers);
    if (thread == 0) store_release(turn, unit.segment.turn + 1);
  }
}

/// Sums of up to kChainSteps stages in one accumulator. Leaves all stages released.
template <bool kHalf>
__device__ void multiply_chain(const Ring& ring, Place& at, int steps, int rows, int thread,
                               float (&sum)[kAccumulators]) {
  const int group = thread / kGroup;
  Place before = at;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    barrier_wait(ring.full_at(at), at.parity);
    if (rows < kStepRows) clear_rows(ring, at, rows, thread);
    rows -= kStepRows;
    const uint64_t a = describe(ring.a(at) + group * kSliceBytes, kSliceBytes, kGroupBytes),
                   b = describe(ring.b(at), kSliceBytes, kGroupBytes);
    products_begin();
#pragma unroll
    for (int k = 0; k < kStepRows / 16; ++k)
      multiply_lines<kHalf>(sum, advance(a, 2 * k * kGroupBytes), advance(b, 2 * k * kGroupBytes), i > 0 || k > 0);
    products_commit();
    if (i > 0) {
      products_wait<1>();
      release(ring, before);
    }
    before = at;
    at.next();
  }
  products_wait<0>();
  pin(sum);
  release(ring, before);
}

/// The multiplying warpgroups; `thread` counts over both.
template <bool kHalf>
__device__ void multiply(const Job& job, const Ring& ring, int rank, int thread) {
  float sum[kAccumulators], total[kAccumulators];
  Place at;
#pragma unroll 1
  for (int64_t index = blockIdx.x / kBlocks; index < job.units; index += gridDim.x / kBlocks) {
    const Unit unit = unit_at(job, index);
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) total[i] = 0.0f;
#pragma unroll 1
    for (int done = 0; done < unit.steps(); done += kChainSteps) {
      multiply_chain<kHalf>(ring, at, min(kChainSteps, unit.steps() - done), unit.segment.rows - done * kStepRows,
                            thread, sum);
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) total[i] += sum[i];
    }
    add_to_matrix(job, unit, rank, thread, total);
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
    for (Place at; at.parity == 0; at.next()) {
      barrier_init(ring.full_at(at), 1);
      barrier_init(ring.empty_at(at), kBlocks * kMultipliers / 32);
    }
    barrier_init_fence();
  }
  cluster_barrier();
  if (threadIdx.x < kGroup) {
    leave_registers<24>();
    if (threadIdx.x == 0) feed(map, job, ring, rank);
  } else {
    take_registers<240>();
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
  const cuuint32_t box[] = {kLineCols, kBoxRows}, every[] = {1, 1};
  const CUresult status =
      encode(&map, x.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
             x.data, extents, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  SHARDQ_CHECK(status == CUDA_SUCCESS, ExitCode::internal, "no tensor map for x [{}, {}] with stride {}: CUDA error {}",
               x.rows, x.cols, x.stride, static_cast<int>(status));
  return map;
}

/// Clusters that a device holds at one time.
template <bool kHalf>
int resident_clusters() {
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
  return clusters;
}

template <bool kHalf>
void launch(cudaStream_t stream, const CUtensorMap& map, const Job& job) {
  const int64_t clusters = std::min<int64_t>(job.units, resident_clusters<kHalf>());
  gram_kernel<kHalf><<<static_cast<unsigned>(kBlocks * clusters), kThreads, kSharedBytes, stream>>>(map, job);
  SHARDQ_LAUNCHED("accumulate_gram");
}

}  // namespace

bool gram_accepts(const MatrixView& x) {
  return (x.dtype == DType::bf16 || x.dtype == DType::f16) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
         x.stride % 8 == 0 && x.rows < INT32_MAX && x.cols <= 65535 * kPanelCols;
}

int64_t gram_clusters() {
  return resident_clusters<false>();
}

std::vector<uint32_t> gram_panels(int64_t n) {
  // Bands of 8 rows of panels, column by column: what runs at one time needs few columns of x.
  constexpr int64_t kBand = 8;
  const int64_t rows = (n + kPanelRows - 1) / kPanelRows;
  std::vector<uint32_t> panels;
  for (int64_t band = 0; band < rows; band += kBand) {
    const int64_t end = std::min(band + kBand, rows), last = std::min(n, end * kPanelRows);
    for (int64_t column = 0; column * kPanelCols < last; ++column)
      for (int64_t row = std::max(band, column * kPanelCols / kPanelRows); row < end; ++row)
        panels.push_back(static_cast<uint32_t>(row << 16 | column));
  }
  return panels;
}

std::vector<GramSegment> gram_segments(std::span<const int64_t> offsets, int64_t panels, int64_t clusters) {
  // In units of a stage of 64 rows: a unit of work costs its stages and about eight more to be added to h. All clusters
  // should have equally much, and long segments cost least: the best of a few lengths.
  constexpr double kAddition = 8;
  constexpr int64_t kShortest = 4096, kLongest = 32768, kReproducible = 8192;
  const auto cost = [&](int64_t longest) {
    double total = 0, largest = 0;
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      const int64_t rows = offsets[e + 1] - offsets[e];
      if (rows == 0) continue;
      const int64_t pieces = (rows + longest - 1) / longest;
      const double one = static_cast<double>(rows) / static_cast<double>(pieces * kStepRows) + kAddition;
      total += one * static_cast<double>(pieces * panels);
      largest = std::max(largest, one);
    }
    const double share = total / static_cast<double>(clusters);
    // Equal units come in whole rounds; ragged ones, longest first, leave a gap of about half a unit.
    return offsets.size() == 2 ? largest * std::ceil(share / largest - 1e-9) : std::max(share, largest) + largest / 2;
  };
  int64_t best = clusters == 0 ? kReproducible : kLongest;
  for (int64_t longest = kShortest; clusters > 0 && longest <= kLongest; longest += 1024)
    if (cost(longest) < cost(best)) best = longest;

  std::vector<GramSegment> segments;
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0) continue;
    const int64_t pieces = (rows + best - 1) / best, even = (rows + pieces - 1) / pieces,
                  step = (even + kStepRows - 1) / kStepRows * kStepRows;
    for (int64_t t = 0; t < rows; t += step)
      segments.push_back({.row = offsets[e] + t,
                          .rows = static_cast<int32_t>(std::min(step, rows - t)),
                          .matrix = static_cast<int32_t>(e),
                          .turn = static_cast<int32_t>(t / step),
                          .more = t + step < rows});
  }
  std::stable_sort(segments.begin(), segments.end(), [](const GramSegment& a, const GramSegment& b) {
    return a.turn != b.turn ? a.turn < b.turn : a.rows > b.rows;
  });
  return segments;
}

void launch_gram(cudaStream_t stream, const GramCall& call) {
  const Job job{.h = call.h.as<float>(),
                .n = call.h.cols,
                .stride = call.h.stride,
                .matrix_stride = call.h.matrix_stride,
                .segments = call.segments,
                .panels = call.panels,
                .turns = call.turns,
                .panel_count = call.panel_count,
                .units = call.panel_count * call.segment_count,
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
