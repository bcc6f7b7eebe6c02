// The column loop against the plain loop that its contract describes: same bits, whatever the tile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/error.hpp"
#include "forward_reference.hpp"

namespace shardq {
namespace {

struct LoopCase {
  const char* name;
  int64_t count, rows, cols, begin, width, group;
  bool ordered = false, symmetric = true;
  int bits = 4;
  DType weight = DType::bf16, scale = DType::bf16;
};

struct LoopData {
  Tensor weight, shifted, factor, pivots, scales, zeros, codes, residual, losses, order;
  std::vector<float> wide;  // the weights as float
};

class GptqLoop : public ::testing::TestWithParam<LoopCase> {
 protected:
  std::unique_ptr<Backend> backend_ = make_cpu_backend();

  LoopData make_data(const LoopCase& c) {
    const int64_t groups = c.cols / c.group;
    Backend& b = *backend_;
    HostMatrix w = random_matrix(b, c.weight, c.count * c.rows, c.cols, 31, 0.05f);
    LoopData d{Tensor(b, c.weight, {c.count, c.rows, c.cols}, "weight"),
               Tensor(b, DType::f32, {c.count, c.rows, c.width}, "shifted"),
               Tensor(b, DType::f32, {c.count, c.cols, c.cols}, "factor"),
               Tensor(b, DType::f32, {c.count, c.cols}, "pivots"),
               Tensor(b, DType::f32, {c.count, c.rows, groups}, "scales"),
               Tensor(b, DType::i8, {c.count, c.rows, groups}, "zeros"),
               Tensor(b, DType::i8, {c.count, c.rows, c.cols}, "codes"),
               Tensor(b, DType::f32, {c.count, c.rows, c.cols}, "residual"),
               Tensor(b, DType::f32, {c.count, c.rows}, "losses"),
               Tensor(b, DType::i32, {c.count, c.cols}, "order"),
               {w.values.begin(), w.values.end()}};
    b.copy(d.weight.data(), w.tensor.data(), w.tensor.bytes());
    std::mt19937 random(32);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < d.factor.size(); ++i) d.factor.as<float>()[i] = 0.2f * normal(random);
    for (int64_t i = 0; i < d.pivots.size(); ++i) d.pivots.as<float>()[i] = 0.5f + std::abs(normal(random));
    for (int64_t i = 0; i < d.scales.size(); ++i)
      d.scales.as<float>()[i] = round_to(c.scale, 0.01f + 0.01f * std::abs(normal(random)));
    for (int64_t i = 0; i < d.zeros.size(); ++i)
      d.zeros.as<int8_t>()[i] = static_cast<int8_t>(static_cast<int>(random() % 5) - 2);
    std::fill_n(d.codes.as<int8_t>(), d.codes.size(), 99);
    std::fill_n(d.residual.as<float>(), d.residual.size(), 99.0f);
    std::fill_n(d.losses.as<float>(), d.losses.size(), 0.25f);
    for (int64_t e = 0; e < c.count; ++e) {
      int32_t* order = d.order.as<int32_t>() + e * c.cols;
      std::iota(order, order + c.cols, 0);
      if (c.ordered) std::shuffle(order, order + c.cols, random);
      for (int64_t r = 0; r < c.rows; ++r)
        for (int64_t j = 0; j < c.width; ++j)
          d.shifted.as<float>()[(e * c.rows + r) * c.width + j] =
              d.wide[(e * c.rows + r) * c.cols + c.begin + j] + 0.02f * normal(random);
    }
    return d;
  }
};

TEST_P(GptqLoop, HasTheBitsOfThePlainLoop) {
  const LoopCase& c = GetParam();
  LoopData d = make_data(c);
  const int64_t groups = c.cols / c.group;
  const Grid grid{c.bits, c.symmetric, c.scale};
  std::vector<float> shifted(d.shifted.as<float>(), d.shifted.as<float>() + d.shifted.size());
  backend_->gptq_block({.shifted = d.shifted.stack(),
                        .weight = d.weight.stack(),
                        .order = c.ordered ? d.order.as<int32_t>() : nullptr,
                        .factor = d.factor.stack(),
                        .pivots = d.pivots.as<float>(),
                        .begin = c.begin,
                        .scales = d.scales.as<float>(),
                        .zeros = c.symmetric ? nullptr : d.zeros.as<int8_t>(),
                        .group_size = c.group,
                        .groups = groups,
                        .grid = grid,
                        .codes = d.codes.as<int8_t>(),
                        .residual = d.residual.stack(),
                        .losses = d.losses.as<float>()});
  for (int64_t e = 0; e < c.count; ++e)
    for (int64_t r = 0; r < c.rows; ++r) {
      const int64_t row = e * c.rows + r;
      float* p = shifted.data() + row * c.width;
      double loss = 0.25;
      for (int64_t j = 0; j < c.width; ++j) {
        const int64_t position = c.begin + j, column = d.order.as<int32_t>()[e * c.cols + position];
        const float scale = d.scales.as<float>()[row * groups + column / c.group];
        const int zero = c.symmetric ? 0 : d.zeros.as<int8_t>()[row * groups + column / c.group];
        const int code = quantize_code(p[j], scale, zero, grid);
        const float q = dequantize_code(code, scale, zero, grid.scale_dtype);
        const float residual = d.wide[row * c.cols + position] - q;
        ASSERT_EQ(d.codes.as<int8_t>()[row * c.cols + position], code) << "row " << r << " position " << j;
        ASSERT_EQ(float_bits(d.residual.as<float>()[row * c.cols + position]), float_bits(residual)) << r << ", " << j;
        loss += std::pow(double(p[j] - q) * d.pivots.as<float>()[e * c.cols + position], 2);
        for (int64_t k = j + 1; k < c.width; ++k)
          p[k] = std::fma(residual, d.factor.as<float>()[(e * c.cols + c.begin + k) * c.cols + position], p[k]);
      }
      EXPECT_NEAR(d.losses.as<float>()[row], loss, 1e-5 * loss);
      for (int64_t j = 0; j < c.cols; ++j) {
        const bool outside = j < c.begin || j >= c.begin + c.width;
        EXPECT_EQ(d.codes.as<int8_t>()[row * c.cols + j] == 99, outside) << "position " << j;
        EXPECT_EQ(d.residual.as<float>()[row * c.cols + j] == 99.0f, outside) << "position " << j;
      }
    }
}

INSTANTIATE_TEST_SUITE_P(
    Blocks, GptqLoop,
    ::testing::Values(LoopCase{"OneByOne", 1, 1, 1, 0, 1, 1}, LoopCase{"Block128", 1, 70, 256, 128, 128, 64},
                      LoopCase{"Ragged", 2, 33, 66, 9, 41, 33}, LoopCase{"OneColumn", 1, 31, 16, 7, 1, 16},
                      LoopCase{"Strip", 1, 32, 16, 8, 8, 4}, LoopCase{"StripAndOne", 1, 5, 18, 0, 9, 6},
                      LoopCase{"Ordered", 3, 40, 96, 32, 64, 16, true},
                      LoopCase{"Asymmetric", 1, 40, 96, 0, 96, 32, true, false, 3},
                      LoopCase{"EightBitHalf", 1, 40, 64, 0, 64, 64, false, true, 8, DType::f16, DType::f16},
                      LoopCase{"TwoBitFloat", 1, 40, 64, 16, 48, 16, true, false, 2, DType::f32, DType::f32},
                      LoopCase{"NoRows", 2, 0, 16, 0, 16, 16}),
    [](const auto& info) { return info.param.name; });

TEST_F(GptqLoop, LoadColumnsWidens) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const HostMatrix w = random_matrix(*backend_, dtype, 3 * 7, 20, 33);
    Tensor target(*backend_, DType::f32, {3, 7, 12}, "target");
    backend_->load_columns({w.tensor.data(), dtype, 3, 7, 20, 20, 140}, 5, target.stack());
    for (int64_t row = 0; row < 21; ++row)
      for (int64_t j = 0; j < 12; ++j) EXPECT_EQ(target.as<float>()[row * 12 + j], w.values[row * 20 + 5 + j]);
  }
}

TEST_F(GptqLoop, PermuteColumnsFollowsTheOrderAndComesBack) {
  Tensor order(*backend_, DType::i32, {3, 20}, "order");
  for (int32_t i = 0; i < 60; ++i) order.as<int32_t>()[i] = (i * 7 + i / 20) % 20;
  for (DType dtype : {DType::i8, DType::bf16, DType::f32}) {
    const int64_t size = size_of(dtype);
    Tensor source(*backend_, dtype, {3, 7, 20}, "source"), target(*backend_, dtype, {3, 7, 20}, "target"),
        back(*backend_, dtype, {3, 7, 20}, "back");
    auto* bytes = static_cast<uint8_t*>(source.data());
    for (int64_t i = 0; i < source.bytes(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 + i / 251);
    backend_->permute_columns(source.stack(), order.as<int32_t>(), false, target.stack());
    for (int64_t e = 0; e < 3; ++e)
      for (int64_t r = 0; r < 7; ++r)
        for (int64_t j = 0; j < 20; ++j) {
          const int64_t row = (e * 7 + r) * 20, column = order.as<int32_t>()[e * 20 + j];
          EXPECT_EQ(std::memcmp(static_cast<uint8_t*>(target.data()) + (row + j) * size, bytes + (row + column) * size,
                                static_cast<size_t>(size)),
                    0);
        }
    backend_->permute_columns(target.stack(), order.as<int32_t>(), true, back.stack());
    EXPECT_EQ(std::memcmp(back.data(), source.data(), static_cast<size_t>(source.bytes())), 0);
    EXPECT_THROW(backend_->permute_columns(source.stack(), order.as<int32_t>(), false, target.stack().col_range(0, 19)),
                 Error);
  }
}

}  // namespace
}  // namespace shardq
