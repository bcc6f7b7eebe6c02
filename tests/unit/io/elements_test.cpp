#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "io/checkpoint.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::as_bytes_of;

TEST(FirstNonfinite, FindsTheFirstOfAny) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const size_t size : {1u, 100u, 70'000u, 200'001u}) {
    std::vector<float> values(size, 1.5f);
    EXPECT_EQ(first_nonfinite(as_bytes_of(values), DType::f32), -1);
    values[size - 1] = nan;
    EXPECT_EQ(first_nonfinite(as_bytes_of(values), DType::f32), static_cast<int64_t>(size - 1));
    values[size / 2] = -infinity;
    EXPECT_EQ(first_nonfinite(as_bytes_of(values), DType::f32), static_cast<int64_t>(size / 2));
    values[0] = infinity;
    EXPECT_EQ(first_nonfinite(as_bytes_of(values), DType::f32), 0);
  }
  EXPECT_EQ(first_nonfinite({}, DType::bf16), -1);
}

TEST(FirstNonfinite, KnowsEveryPatternOfSixteenBits) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const std::vector<uint16_t> one{static_cast<uint16_t>(bits)};
    EXPECT_EQ(first_nonfinite(as_bytes_of(one), DType::bf16) == -1, std::isfinite(to_float(BFloat16{one[0]})));
    EXPECT_EQ(first_nonfinite(as_bytes_of(one), DType::f16) == -1, std::isfinite(to_float(Float16{one[0]})));
  }
}

TEST(FirstNonfinite, TakesMisalignedBytesAndRefusesIntegers) {
  std::vector<std::byte> raw(4 * 5 + 1);
  const float values[5] = {1, 2, std::nanf(""), 4, 5};
  std::memcpy(raw.data() + 1, values, 20);
  EXPECT_EQ(first_nonfinite(std::span(raw).subspan(1), DType::f32), 2);
  EXPECT_ERROR(ExitCode::internal, ({"int32"}), first_nonfinite(raw, DType::i32));
}

TEST(ConvertElements, EqualsTheScalarConversions) {
  std::mt19937 random(3);
  for (const int64_t count : {0, 1, 17, 70'001}) {
    std::vector<float> source(static_cast<size_t>(count));
    for (auto& value : source) value = bits_float(static_cast<uint32_t>(random()));
    for (auto& value : source)
      if (std::isnan(value)) value = 1.0f;
    std::vector<uint16_t> bf16(source.size()), f16(source.size()), again(source.size());
    convert_elements(source.data(), DType::f32, bf16.data(), DType::bf16, count);
    convert_elements(source.data(), DType::f32, f16.data(), DType::f16, count);
    std::vector<float> wide(source.size());
    convert_elements(f16.data(), DType::f16, wide.data(), DType::f32, count);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(bf16[i], to_bf16(source[i]).bits);
      ASSERT_EQ(f16[i], to_f16(source[i]).bits);
      ASSERT_EQ(float_bits(wide[i]), float_bits(to_float(Float16{f16[i]})));
    }
    convert_elements(bf16.data(), DType::bf16, wide.data(), DType::f32, count);
    convert_elements(wide.data(), DType::f32, again.data(), DType::bf16, count);
    EXPECT_EQ(again, bf16);
    convert_elements(bf16.data(), DType::bf16, again.data(), DType::bf16, count);
    EXPECT_EQ(again, bf16);
    convert_elements(f16.data(), DType::f16, again.data(), DType::bf16, count);
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(again[i], to_bf16(to_float(Float16{f16[i]})).bits);
  }
}

TEST(ConvertElements, RefusesOtherDtypes) {
  float value = 1;
  EXPECT_ERROR(ExitCode::internal, ({"int8"}), convert_elements(&value, DType::i8, &value, DType::f32, 1));
  EXPECT_ERROR(ExitCode::internal, ({"int8"}), convert_elements(&value, DType::f32, &value, DType::i8, 1));
}

}  // namespace
}  // namespace shardq
