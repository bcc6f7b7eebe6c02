#pragma once
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

// Functions below run in host code and in CUDA kernels; both must round alike.
#ifdef __CUDACC__
#define SHARDQ_HD __host__ __device__
#else
#define SHARDQ_HD
#endif

namespace shardq {

/// Element types that a safetensors file can hold (whole-byte ones). Source: safetensors format, README.
enum class DType : uint8_t { boolean, u8, i8, f8_e4m3, f8_e5m2, u16, i16, f16, bf16, u32, i32, f32, u64, i64, f64 };

/// Bytes of one element.
int64_t size_of(DType dtype);
/// The spelling in safetensors headers: "BF16", "F32", "I32", ...
std::string_view safetensors_name(DType dtype);
/// The spelling in PyTorch and config.json: "bfloat16", "float32", ...
std::string_view torch_name(DType dtype);
/// Inverse of safetensors_name; nothing for an unknown spelling.
std::optional<DType> dtype_from_safetensors(std::string_view name);
/// Accepts "bfloat16", "torch.bfloat16", "float16", "float32".
std::optional<DType> dtype_from_torch(std::string_view name);
bool is_floating(DType dtype);

/// bfloat16 as its bit pattern; arithmetic happens in float.
struct BFloat16 {
  uint16_t bits;
};
/// IEEE binary16 as its bit pattern.
struct Float16 {
  uint16_t bits;
};

SHARDQ_HD inline uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}
SHARDQ_HD inline float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

SHARDQ_HD inline float to_float(BFloat16 value) { return bits_float(static_cast<uint32_t>(value.bits) << 16); }
/// Round to nearest, ties to even; NaN stays NaN.
SHARDQ_HD inline BFloat16 to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
SHARDQ_HD inline float round_to_bf16(float value) { return to_float(to_bf16(value)); }

SHARDQ_HD inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;  // 2^-24, exact
  return bits_float(sign | float_bits(magnitude));
}
/// Round to nearest, ties to even; overflow becomes infinity.
SHARDQ_HD inline Float16 to_f16(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Float16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return Float16{static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520 rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal: one exact addition aligns the mantissa and rounds it
    const float shifted = bits_float(magnitude) + 0.5f;
    return Float16{static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return Float16{static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}
SHARDQ_HD inline float round_to_f16(float value) { return to_float(to_f16(value)); }
SHARDQ_HD inline float to_float(float value) { return value; }

/// `value` rounded to a floating dtype (bf16, f16 or f32) and widened again.
SHARDQ_HD inline float round_to(DType dtype, float value) {
  return dtype == DType::bf16 ? round_to_bf16(value) : dtype == DType::f16 ? round_to_f16(value) : value;
}

}  // namespace shardq
