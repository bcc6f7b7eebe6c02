#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/error.hpp"
#include "core/view.hpp"

namespace shardq {

/// `kCount` elements that one instruction moves: 16 bytes where a view allows it, else one element.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

template <class T>
constexpr int kPerAccess = 16 / static_cast<int>(sizeof(T));

/// True where every row of `view` starts on 16 bytes and holds a whole number of 16-byte words.
inline bool whole_words(const MatrixView& view) {
  const int64_t size = size_of(view.dtype);
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride * size % 16 == 0 && view.cols * size % 16 == 0;
}
inline bool whole_words(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

__device__ inline float widen(float value) {
  return value;
}
__device__ inline float widen(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float widen(Float16 value) {
  return __half2float(__ushort_as_half(value.bits));
}

/// Rounds to nearest even; the hardware's conversions agree with to_bf16 and to_f16 but for the payload of a NaN.
template <class T>
__device__ T narrow(float value);
template <>
__device__ inline float narrow<float>(float value) {
  return value;
}
template <>
__device__ inline BFloat16 narrow<BFloat16>(float value) {
  return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
template <>
__device__ inline Float16 narrow<Float16>(float value) {
  return Float16{__half_as_ushort(__float2half_rn(value))};
}

template <int kCount, class T>
__device__ Pack<T, kCount> load_pack(const T* source) {
  return *reinterpret_cast<const Pack<T, kCount>*>(source);
}
template <int kCount, class T>
__device__ void store_pack(T* target, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(target) = pack;
}

/// Calls `body` with a value of the element type that `dtype` names.
template <class Body>
void with_float_type(DType dtype, const char* operation, Body&& body) {
  switch (dtype) {
    case DType::bf16:
      return body(BFloat16{});
    case DType::f16:
      return body(Float16{});
    case DType::f32:
      return body(float{});
    default:
      fail(ExitCode::internal, "{}: expected bf16, f16 or f32, found {}", operation, safetensors_name(dtype));
  }
}

}  // namespace shardq
