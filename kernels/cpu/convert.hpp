#pragma once
#include <cstdint>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "core/error.hpp"
#include "core/view.hpp"

// Rows of one dtype to and from float, exact one way and rounded to nearest even the other: the loops that stand
// between stored activations and single-precision BLAS.
namespace shardq::cpu {

inline void widen(const BFloat16* source, float* target, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) target[i] = bits_float(static_cast<uint32_t>(source[i].bits) << 16);
}

inline void widen(const Float16* source, float* target, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
#endif
  for (; i < n; ++i) target[i] = to_float(source[i]);
}

inline void widen(const float* source, float* target, int64_t n) {
  std::memcpy(target, source, n * sizeof(float));
}

inline void narrow(const float* source, BFloat16* target, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = float_bits(source[i]);
    const uint32_t nan = (bits >> 16) | 0x40u, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    target[i].bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
}

inline void narrow(const float* source, Float16* target, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) target[i] = to_f16(source[i]);
}

inline void narrow(const float* source, float* target, int64_t n) {
  std::memcpy(target, source, n * sizeof(float));
}

/// Calls f with a typed null pointer for the element type of a floating dtype.
template <class F>
auto with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bf16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::f16:
      return f(static_cast<Float16*>(nullptr));
    case DType::f32:
      return f(static_cast<float*>(nullptr));
    default:
      fail(ExitCode::internal, "cpu backend: expected bf16, f16 or f32, found {}", safetensors_name(dtype));
  }
}

}  // namespace shardq::cpu
