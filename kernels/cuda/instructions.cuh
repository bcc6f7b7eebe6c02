#pragma once
// Instructions that CUDA C++ has no function for: asynchronous copies, matrix fragments, tensor-core products, fast
// exponentials. sm_80 and later.
#include <cuda_bf16.h>

#include <cstdint>

namespace shardq {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// 16 bytes from global to shared memory past the registers; zeros instead where `valid` is false (nothing is read
/// then).
__device__ inline void copy_async(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}
/// Closes this thread's group of copies.
__device__ inline void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
__device__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Afterwards word i of
/// lane l holds elements (l / 4, 2 (l % 4) + {0, 1}) of matrix i.
__device__ inline void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
/// The same, transposed: word i of lane l holds elements (2 (l % 4) + {0, 1}, l / 4) of matrix i.
__device__ inline void load_matrices_transposed(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

/// d += a b for a [16, 16] and b [16, 8] in bf16, d [16, 8] in fp32. With g = lane / 4, t = lane % 4: d holds (g, 2t),
/// (g, 2t+1), (g+8, 2t), (g+8, 2t+1); a holds rows g, g+8, g, g+8 at columns 2t.. (first two) and 2t+8..; b holds
/// column g at rows 2t.. and 2t+8...
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d = c + a b for a [16, 8] and b [8, 8] in tf32 (fp32 whose low 13 bits are ignored), c and d [16, 8] in fp32, placed
/// as above: a holds (g, t), (g+8, t), (g, t+4), (g+8, t+4); b holds (t, g), (t+4, g).
__device__ inline void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "
      "%12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/// A float as the sum of two tf32 numbers: x rounded to 11 bits, and what is left (exact; its bits beyond 11 are
/// ignored by a product, 2^-22 of x at most).
struct SplitFloat {
  uint32_t high, low;
};
__device__ inline SplitFloat split_float(float x) {
  const uint32_t high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

/// 2^x; 0 for -inf, subnormal results flushed.
__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Two floats rounded to bf16, `low` in the low half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace shardq
