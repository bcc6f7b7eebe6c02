// Scales, zero points and rounding against grid.hpp, one value at a time.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.hpp"
#include "forward_reference.hpp"
#include "kernels/cpu/lanes.hpp"
#include "kernels/cpu/power.hpp"

namespace shardq {
namespace {

std::vector<float> awkward_values(float scale) {
  std::vector<float> values{0.0f, -0.0f, 1e-45f, -1e-45f, 1e-38f, 3e38f, -3e38f, INFINITY, -INFINITY};
  for (int i = -1100; i <= 1100; ++i)  // around every boundary of 8 bits, and beyond the grid
    for (float nudge : {0.0f, 1e-7f, -1e-7f, 3e-3f}) values.push_back((0.25f * static_cast<float>(i) + nudge) * scale);
  return values;
}

TEST(Lanes, HaveTheBitsOfTheGrid) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (int bits : {2, 3, 4, 8})
      for (int zero : {0, -2, 1})
        for (float raw : {0.0123f, 1.0f, 6.1e-5f, 300.0f, 1.1754944e-38f}) {
          const float scale = round_to(dtype, std::max(raw, smallest_normal(dtype)));
          const Grid grid{bits, zero == 0, dtype};
          for (float value : awkward_values(scale)) {
            const int code = quantize_code(value, scale, zero, grid);
            const float expected = dequantize_code(code, scale, zero, dtype);
            int32_t lane_code = 99;
            float lane_value = NAN;
            const float z = static_cast<float>(zero);
            const cpu::CodeRange range = cpu::code_range(grid);
            if (dtype == DType::bf16) cpu::quantize_lane<DType::bf16>(value, scale, z, range, lane_code, lane_value);
            if (dtype == DType::f16) cpu::quantize_lane<DType::f16>(value, scale, z, range, lane_code, lane_value);
            if (dtype == DType::f32) cpu::quantize_lane<DType::f32>(value, scale, z, range, lane_code, lane_value);
            ASSERT_EQ(lane_code, code) << value << " / " << scale;
            ASSERT_EQ(float_bits(lane_value), float_bits(expected)) << value << " / " << scale;
          }
        }
}

TEST(Lanes, RoundLikeTheDtypes) {
  std::mt19937 random(41);
  for (int i = 0; i < 2000000; ++i) {
    const float value = bits_float(static_cast<uint32_t>(random()));
    if (std::isnan(value)) continue;
    ASSERT_EQ(float_bits(cpu::round_lane<DType::bf16>(value)), float_bits(round_to_bf16(value))) << value;
    ASSERT_EQ(float_bits(cpu::round_lane<DType::f16>(value)), float_bits(round_to_f16(value))) << value;
  }
  EXPECT_TRUE(std::isnan(cpu::round_lane<DType::bf16>(NAN)));
  EXPECT_TRUE(std::isnan(cpu::round_lane<DType::f16>(NAN)));
}

TEST(Power, IsCloseToTheLibrarys) {
  for (float y : {0.5f, 2.4f, 3.0f})
    for (double x = 1e-12; x < 1e12; x *= 1.0037) {
      const float value = static_cast<float>(x);
      const double expected = std::pow(static_cast<double>(value), static_cast<double>(y));
      if (expected < 1.2e-38 || expected > 3e38) continue;
      ASSERT_NEAR(cpu::power_lane(value, y), expected, 1e-6 * expected) << x << "^" << y;
    }
  EXPECT_EQ(cpu::power_lane(0.0f, 2.4f), 0.0f);
  EXPECT_TRUE(std::isnan(cpu::power_lane(NAN, 2.4f)));
}

struct Search {
  int64_t count, rows, cols, group;
  Grid grid;
  int steps;
  float norm;
  bool weighted;
};

class FindScales : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = make_cpu_backend();

  void run(const Search& s) {
    const HostMatrix w = make_matrix(*backend_, DType::bf16, s.count * s.rows, s.cols,
                                     [random = std::mt19937(42)](int64_t r, int64_t) mutable {
                                       std::normal_distribution<float> normal(0.0f, r % 7 == 3 ? 0.0f : 0.03f);
                                       return normal(random) + (r % 5 == 1 ? 0.05f : 0.0f);
                                     });
    const int64_t groups = s.cols / s.group;
    Tensor importance(*backend_, DType::f32, {s.count, s.cols}, "importance");
    Tensor scales(*backend_, DType::f32, {s.count, s.rows, groups}, "scales");
    Tensor zeros(*backend_, DType::i8, {s.count, s.rows, groups}, "zeros");
    for (int64_t i = 0; i < importance.size(); ++i)
      importance.as<float>()[i] = static_cast<float>((i * 37) % 11) * 0.3f;
    const StackView stack{w.tensor.data(), DType::bf16, s.count, s.rows, s.cols, s.cols, s.rows * s.cols};
    backend_->find_scales(stack, s.weighted ? importance.as<float>() : nullptr, s.steps, s.norm, s.grid, s.group,
                          scales.as<float>(), s.grid.symmetric ? nullptr : zeros.as<int8_t>());
    for (int64_t row = 0; row < s.count * s.rows; ++row)
      for (int64_t g = 0; g < groups; ++g) {
        const double* value = w.values.data() + row * s.cols + g * s.group;
        const auto error_of = [&](const ScaleZero& z) {
          double sum = 0;
          for (int64_t j = 0; j < s.group; ++j) {
            const float v = static_cast<float>(value[j]);
            const int code = quantize_code(v, z.scale, z.zero, s.grid);
            const double d = std::abs(double(dequantize_code(code, z.scale, z.zero, s.grid.scale_dtype)) - v);
            sum += (s.weighted ? importance.as<float>()[row / s.rows * s.cols + g * s.group + j] : 1.0f) *
                   std::pow(d, s.norm);
          }
          return sum;
        };
        const float low = static_cast<float>(*std::min_element(value, value + s.group));
        const float high = static_cast<float>(*std::max_element(value, value + s.group));
        std::vector<ScaleZero> candidates;
        for (int i = 0; i <= s.steps; ++i) {
          const float shrink = 1.0f - 0.025f * static_cast<float>(i);
          candidates.push_back(scale_of_range(std::min(low, 0.0f) * shrink, std::max(high, 0.0f) * shrink, s.grid));
        }
        const ScaleZero found{scales.as<float>()[row * groups + g],
                              s.grid.symmetric ? 0 : zeros.as<int8_t>()[row * groups + g]};
        const auto at = std::find_if(candidates.begin(), candidates.end(), [&](const ScaleZero& z) {
          return z.scale == found.scale && z.zero == found.zero;
        });
        ASSERT_NE(at, candidates.end()) << "a scale that is no candidate: row " << row << " group " << g;
        // Sums in single precision: the winner is as good as the best, and no larger range is clearly better.
        double best = INFINITY;
        for (const ScaleZero& z : candidates) best = std::min(best, error_of(z));
        EXPECT_LE(error_of(*at), best * (1 + 1e-5)) << "row " << row << " group " << g;
      }
  }
};

TEST_F(FindScales, MinmaxIsTheRange) {
  for (bool symmetric : {true, false})
    for (DType dtype : {DType::bf16, DType::f16, DType::f32})
      run({1, 37, 48, 16, {4, symmetric, dtype}, 0, 2.0f, false});
}

TEST_F(FindScales, SearchFindsTheBestShrink) {
  for (int bits : {2, 4, 8})
    for (bool symmetric : {true, false})
      for (bool weighted : {true, false}) {
        run({2, 19, 64, 32, {bits, symmetric, DType::bf16}, 20, 2.0f, weighted});
        run({1, 33, 24, 24, {bits, symmetric, DType::f16}, 20, 2.4f, weighted});
      }
}

TEST_F(FindScales, TiesKeepTheLargerRange) {
  Tensor w(*backend_, DType::f32, {1, 1, 8}, "w"), importance(*backend_, DType::f32, {1, 8}, "importance");
  Tensor scales(*backend_, DType::f32, {1, 1, 1}, "scales");
  for (int i = 0; i < 8; ++i) w.as<float>()[i] = static_cast<float>(i) - 3.3f, importance.as<float>()[i] = 0;
  const Grid grid{4, true, DType::bf16};
  backend_->find_scales(w.stack(), importance.as<float>(), 20, 2.0f, grid, 8, scales.as<float>(), nullptr);
  EXPECT_EQ(scales.as<float>()[0], scale_of_range(-3.3f, 3.7f, grid).scale);
}

TEST_F(FindScales, GroupsMustDivide) {
  Tensor w(*backend_, DType::f32, {1, 1, 10}, "w"), scales(*backend_, DType::f32, {1, 1, 4}, "scales");
  EXPECT_THROW(backend_->find_scales(w.stack(), nullptr, 0, 2.0f, {}, 3, scales.as<float>(), nullptr), Error);
}

TEST_F(FindScales, RoundingAndReconstructionFollowTheGrid) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (bool symmetric : {true, false}) {
      const int64_t count = 2, rows = 9, cols = 36, group = 12, groups = 3;
      const Grid grid{3, symmetric, dtype == DType::f32 ? DType::bf16 : dtype};
      const HostMatrix w = random_matrix(*backend_, dtype, count * rows, cols, 43, 0.1f);
      const StackView stack{w.tensor.data(), dtype, count, rows, cols, cols, rows * cols};
      Tensor scales(*backend_, DType::f32, {count, rows, groups}, "scales"),
          zeros(*backend_, DType::i8, {count, rows, groups}, "zeros");
      Tensor codes(*backend_, DType::i8, {count, rows, cols}, "codes"),
          residual(*backend_, DType::f32, {count, rows, cols}, "residual");
      Tensor order(*backend_, DType::i32, {count, cols}, "order"), back(*backend_, dtype, {count, rows, cols}, "back");
      for (int32_t i = 0; i < count * cols; ++i)
        order.as<int32_t>()[i] = (i * 5 + i / static_cast<int32_t>(cols)) % static_cast<int32_t>(cols);
      int8_t* zero_data = symmetric ? nullptr : zeros.as<int8_t>();
      backend_->find_scales(stack, nullptr, 0, 2.0f, grid, group, scales.as<float>(), zero_data);
      backend_->round_to_nearest(stack, order.as<int32_t>(), scales.as<float>(), zero_data, group, grid,
                                 codes.as<int8_t>(), residual.stack());
      backend_->dequantize(codes.as<int8_t>(), scales.as<float>(), zero_data, group, grid, back.stack());
      const std::vector<double> reconstructed = download(*backend_, back);
      for (int64_t row = 0; row < count * rows; ++row)
        for (int64_t j = 0; j < cols; ++j) {
          const auto expect_at = [&](int64_t column) {
            const float scale = scales.as<float>()[row * groups + column / group];
            const int zero = symmetric ? 0 : zeros.as<int8_t>()[row * groups + column / group];
            const int code = quantize_code(static_cast<float>(w.values[row * cols + column]), scale, zero, grid);
            return std::pair{code, dequantize_code(code, scale, zero, grid.scale_dtype)};
          };
          EXPECT_EQ(codes.as<int8_t>()[row * cols + j], expect_at(j).first);
          EXPECT_EQ(reconstructed[row * cols + j], expect_at(j).second);
          const int64_t column = order.as<int32_t>()[row / rows * cols + j];
          EXPECT_EQ(residual.as<float>()[row * cols + j],
                    static_cast<float>(w.values[row * cols + column]) - expect_at(column).second);
        }
    }
}

}  // namespace
}  // namespace shardq
