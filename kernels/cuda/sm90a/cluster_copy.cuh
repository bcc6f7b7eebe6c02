#pragma once
// Clusters of blocks, the copy engine that serves them, and products of operands that lie along the lines: what
// warpgroup.cuh lacks for kernels of several blocks. sm_90a only. Source: PTX ISA 8.x, chapters on mbarrier,
// cp.async.bulk.tensor, wgmma and cluster barriers.
#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/sm90a/warpgroup.cuh"

namespace shardq {

// ---- clusters -------------------------------------------------------------------------------------

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// All threads of all blocks of the cluster; orders their shared memory accesses.
__device__ inline void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// ---- barriers in shared memory ----------------------------------------------------------------------

/// Makes initialised barriers visible to the cluster and to the copy engine; a cluster_barrier() must follow.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Arrives once and announces `bytes` that copies will bring.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives once at the barrier of the same address in block `rank` of the cluster. At the default scope, of the block:
/// a release for the cluster would flush all memory traffic of the multiprocessor, 1000 cycles and more, and what the
/// barrier guards here is read and written by the tensor cores and the copy engine only, which it orders itself.
__device__ inline void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// ---- copies -------------------------------------------------------------------------------------------

/// A box of a tensor to the same place in the shared memory of every block of `mask`; its bytes count at the barrier of
/// the same address there. Elements outside the tensor arrive as zero.
__device__ inline void copy_box(uint32_t target, const CUtensorMap* map, int32_t column, int32_t row, uint32_t barrier,
                                uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}
/// The same for this block alone.
__device__ inline void copy_box(uint32_t target, const CUtensorMap* map, int32_t column, int32_t row,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          target),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
/// 16 bytes of zeros.
__device__ inline void store_zeros(uint32_t target) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
}

// ---- products -----------------------------------------------------------------------------------------

#define SHARDQ_EIGHT(i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SHARDQ_PRODUCT(type)                                                                                       \
  asm volatile(                                                                                                    \
      "{\n"                                                                                                        \
      ".reg .pred keep;\n"                                                                                         \
      "setp.ne.b32 keep, %98, 0;\n"                                                                                \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                                                 \
      " {"                                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "                      \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "            \
      "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "            \
      "%57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, "            \
      "%76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, "            \
      "%95}, %96, %97, keep, 1, 1, 1, 1;\n"                                                                        \
      "}"                                                                                                          \
      : SHARDQ_EIGHT(0), SHARDQ_EIGHT(8), SHARDQ_EIGHT(16), SHARDQ_EIGHT(24), SHARDQ_EIGHT(32), SHARDQ_EIGHT(40),  \
        SHARDQ_EIGHT(48), SHARDQ_EIGHT(56), SHARDQ_EIGHT(64), SHARDQ_EIGHT(72), SHARDQ_EIGHT(80), SHARDQ_EIGHT(88) \
      : "l"(a), "l"(b), "r"(keep))

/// d = a b, or d += a b where `keep` is not zero: a [64, 16], b [16, 192], the 16 products one line each in both.
/// With g = lane / 4, t = lane % 4, thread l of warp w of the warpgroup holds in d[4 c + 2 r + s]: row 16 w + g + 8 r,
/// column 8 c + 2 t + s.
template <bool kHalf>
__device__ void multiply_lines(float (&d)[96], uint64_t a, uint64_t b, uint32_t keep) {
  if constexpr (kHalf)
    SHARDQ_PRODUCT("f16");
  else
    SHARDQ_PRODUCT("bf16");
}
#undef SHARDQ_PRODUCT
#undef SHARDQ_EIGHT

// ---- flags in global memory -----------------------------------------------------------------------------

__device__ inline int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ inline void store_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

}  // namespace shardq
