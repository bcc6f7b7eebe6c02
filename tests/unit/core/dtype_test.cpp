#include "core/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace shardq {
namespace {

/// A finite half-width float by the definition: (-1)^s m 2^e, exact in double.
double value_of(uint32_t bits, int mantissa_bits, int exponent_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto mantissa = static_cast<double>(bits & ((1u << mantissa_bits) - 1));
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return bits >> (mantissa_bits + exponent_bits) ? -magnitude : magnitude;
}
double bf16_value(uint32_t bits) {
  return value_of(bits, 7, 8);
}
double f16_value(uint32_t bits) {
  return value_of(bits, 10, 5);
}

bool bf16_finite(uint32_t bits) {
  return (bits & 0x7f80) != 0x7f80;
}
bool f16_finite(uint32_t bits) {
  return (bits & 0x7c00) != 0x7c00;
}

TEST(DType, EveryHalfWidthPatternWidensExactly) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const float b = to_float(BFloat16{pattern}), h = to_float(Float16{pattern});
    if (bf16_finite(bits)) {
      ASSERT_EQ(static_cast<double>(b), bf16_value(bits)) << bits;
    } else {
      ASSERT_EQ(std::isnan(b), (bits & 0x7f) != 0) << bits;
      ASSERT_TRUE(std::isnan(b) || (std::isinf(b) && std::signbit(b) == (bits >> 15 != 0))) << bits;
    }
    if (f16_finite(bits)) {
      ASSERT_EQ(static_cast<double>(h), f16_value(bits)) << bits;
      ASSERT_EQ(std::signbit(h), bits >> 15 != 0) << bits;  // -0 too
    } else {
      ASSERT_EQ(std::isnan(h), (bits & 0x3ff) != 0) << bits;
      ASSERT_EQ(std::signbit(h), bits >> 15 != 0) << bits;
    }
  }
}

TEST(DType, EveryHalfWidthPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const float b = to_float(BFloat16{pattern}), h = to_float(Float16{pattern});
    ASSERT_TRUE(std::isnan(b) ? std::isnan(to_float(to_bf16(b))) : to_bf16(b).bits == pattern) << bits;
    ASSERT_TRUE(std::isnan(h) ? std::isnan(to_float(to_f16(h))) : to_f16(h).bits == pattern) << bits;
  }
}

/// Between two neighbouring patterns: just below the midpoint goes down, just above goes up, the midpoint itself to the
/// even pattern.
template <class Value, class Round>
void check_neighbours(uint32_t largest, Value value, Round round) {
  for (uint32_t low = 0; low < largest; ++low) {
    const auto middle = static_cast<float>((value(low) + value(low + 1)) / 2);  // at most 12 or 9 bits: exact in float
    const uint32_t even = low % 2 == 0 ? low : low + 1;
    const float below = std::nextafter(middle, 0.0f),
                above = std::nextafter(middle, std::numeric_limits<float>::infinity());
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float s = sign ? -1.0f : 1.0f;
      ASSERT_EQ(round(s * middle), sign | even) << low;
      ASSERT_EQ(round(s * below), sign | low) << low;
      ASSERT_EQ(round(s * above), sign | (low + 1)) << low;
    }
  }
}

TEST(DType, RoundsToNearestTiesToEven) {
  // bf16 subnormals have midpoints that are float subnormals, exact all the same.
  check_neighbours(0x7f7f, bf16_value, [](float x) { return to_bf16(x).bits; });
  check_neighbours(0x7bff, f16_value, [](float x) { return to_f16(x).bits; });
}

TEST(DType, OverflowAndSpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_f16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);  // the midpoint to the next power of two, which is even
  EXPECT_EQ(to_f16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(to_f16(infinity).bits, 0x7c00);
  EXPECT_EQ(to_f16(std::ldexp(1.0f, -25)).bits, 0);  // half the smallest subnormal: ties to even, which is 0
  EXPECT_EQ(to_f16(std::ldexp(1.5f, -25)).bits, 1);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-infinity).bits, 0xff80);
  // A NaN whose payload lies in the cut bits must not become an infinity.
  EXPECT_TRUE(std::isnan(to_float(to_bf16(bits_float(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_f16(bits_float(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(bits_float(0xffffffffu)))));
}

TEST(DType, RoundToFollowsTheDtype) {
  const float third = 1.0f / 3;
  EXPECT_EQ(round_to(DType::bf16, third), to_float(to_bf16(third)));
  EXPECT_EQ(round_to(DType::f16, third), to_float(to_f16(third)));
  EXPECT_EQ(round_to(DType::f32, third), third);
  EXPECT_NE(round_to(DType::bf16, third), round_to(DType::f16, third));
}

TEST(DType, NamesAndSizes) {
  constexpr DType kAll[] = {DType::boolean, DType::u8,  DType::i8,  DType::f8_e4m3, DType::f8_e5m2,
                            DType::u16,     DType::i16, DType::f16, DType::bf16,    DType::u32,
                            DType::i32,     DType::f32, DType::u64, DType::i64,     DType::f64};
  for (const DType dtype : kAll) {
    EXPECT_EQ(dtype_from_safetensors(safetensors_name(dtype)), dtype);
    EXPECT_EQ(dtype_from_torch(torch_name(dtype)), dtype);
    EXPECT_EQ(dtype_from_torch("torch." + std::string(torch_name(dtype))), dtype);
  }
  EXPECT_EQ(safetensors_name(DType::f8_e4m3), "F8_E4M3");
  EXPECT_EQ(torch_name(DType::bf16), "bfloat16");
  EXPECT_EQ(size_of(DType::boolean), 1);
  EXPECT_EQ(size_of(DType::f16), 2);
  EXPECT_EQ(size_of(DType::i32), 4);
  EXPECT_EQ(size_of(DType::f64), 8);
  EXPECT_EQ(dtype_from_safetensors("bf16"), std::nullopt);
  EXPECT_EQ(dtype_from_safetensors(""), std::nullopt);
  EXPECT_EQ(dtype_from_torch("torch."), std::nullopt);
  EXPECT_EQ(dtype_from_torch("half"), std::nullopt);
  EXPECT_TRUE(is_floating(DType::bf16));
  EXPECT_TRUE(is_floating(DType::f8_e4m3));
  EXPECT_FALSE(is_floating(DType::i8));
}

}  // namespace
}  // namespace shardq
