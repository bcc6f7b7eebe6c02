#pragma once
#include "kernels/cuda/quotient.hpp"
#include "kernels/cuda/vector.cuh"
#include "kernels/grid.hpp"

namespace shardq {

/// round_to by the hardware's conversions.
template <DType kDType>
__device__ float rounded_to(float value) {
  if constexpr (kDType == DType::bf16) return widen(narrow<BFloat16>(value));
  if constexpr (kDType == DType::f16) return widen(narrow<Float16>(value));
  return value;
}

/// 1 / x to one unit in the last place.
__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Bounds of the codes as floats.
struct CodeRange {
  float lowest, highest;
};
inline CodeRange code_range(const Grid& grid) {
  return {static_cast<float>(grid.qmin()), static_cast<float>(grid.qmax())};
}

/// Code and quantized value nearest to p: quantize_code and dequantize_code of grid.hpp bit for bit (finite p), without
/// conversions to integer. `kFast`: by divide(), with inverse = reciprocal(scale); else by IEEE division.
template <DType kScale, bool kZero, bool kFast>
__device__ float quantized(float p, float scale, float inverse, float zero, CodeRange range, uint32_t& code_bits) {
  float t = kFast ? divide(p, scale, inverse) : __fdiv_rn(p, scale);
  if constexpr (kZero) t = __fadd_rn(t, zero);
  t = fminf(fmaxf(t, range.lowest), range.highest);
  const Rounded code = round_even(t);
  code_bits = code.bits;
  // Codes and zeros are small integers: their difference is exact.
  return rounded_to<kScale>(__fmul_rn(kZero ? __fsub_rn(code.value, zero) : code.value, scale));
}

/// Calls body with a constant of the stored scale dtype.
template <DType kDType>
struct ScaleType {
  static constexpr DType value = kDType;
};
template <class Body>
void with_scale_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::bf16:
      return body(ScaleType<DType::bf16>{});
    case DType::f16:
      return body(ScaleType<DType::f16>{});
    case DType::f32:
      return body(ScaleType<DType::f32>{});
    default:
      fail(ExitCode::internal, "scales are stored as bf16, f16 or f32, found {}", safetensors_name(dtype));
  }
}

}  // namespace shardq
