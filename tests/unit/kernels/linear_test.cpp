// Linear layers of the CPU backend against sums in double.
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "forward_reference.hpp"

namespace shardq {
namespace {

/// x w^T (+ bias) (+ start) in double, and the bound on what single precision and one rounding of the result may add:
/// in * eps * sum |x| |w| for the sum, half a unit of the output's dtype for the result.
struct Expected {
  std::vector<double> y, bound;
};
Expected expected_linear(const HostMatrix& x, const HostMatrix& w, const std::vector<double>& bias,
                         const std::vector<double>& start, DType out) {
  const MatrixView xv = x.view(), wv = w.view();
  Expected e;
  for (int64_t t = 0; t < xv.rows; ++t)
    for (int64_t o = 0; o < wv.rows; ++o) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < xv.cols; ++i) {
        const double term = x.values[t * xv.cols + i] * w.values[o * xv.cols + i];
        sum += term;
        size += std::abs(term);
      }
      if (!bias.empty()) sum += bias[o], size += std::abs(bias[o]);
      if (!start.empty()) sum += start[t * wv.rows + o], size += std::abs(start[t * wv.rows + o]);
      e.y.push_back(sum);
      e.bound.push_back(static_cast<double>(xv.cols + 4) * 0x1p-24 * size + 1.01 * rounding(out) * std::abs(sum));
    }
  return e;
}

::testing::AssertionResult within(const std::vector<double>& got, const Expected& e) {
  if (got.size() != e.y.size()) return ::testing::AssertionFailure() << got.size() << " values for " << e.y.size();
  for (size_t i = 0; i < got.size(); ++i)
    if (!(std::abs(got[i] - e.y[i]) <= e.bound[i]))
      return ::testing::AssertionFailure()
             << "element " << i << ": " << got[i] << ", expected " << e.y[i] << " +- " << e.bound[i];
  return ::testing::AssertionSuccess();
}

struct LinearShape {
  int64_t tokens, in, out;
};

class Linear : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = make_cpu_backend();

  void run(const LinearShape& s, DType x_dtype, DType w_dtype, DType y_dtype, bool with_bias, bool accumulate) {
    const HostMatrix x = random_matrix(*backend_, x_dtype, s.tokens, s.in, 1);
    const HostMatrix w = random_matrix(*backend_, w_dtype, s.out, s.in, 2);
    const HostMatrix bias = random_matrix(*backend_, w_dtype, 1, s.out, 3);
    HostMatrix y = accumulate ? random_matrix(*backend_, y_dtype, s.tokens, s.out, 4)
                              : poisoned_matrix(*backend_, y_dtype, s.tokens, s.out);
    backend_->linear(x.view(), w.view(), with_bias ? bias.tensor.data() : nullptr, y.view(), accumulate);
    const Expected e = expected_linear(x, w, with_bias ? bias.values : std::vector<double>{},
                                       accumulate ? y.values : std::vector<double>{}, y_dtype);
    EXPECT_TRUE(within(download(*backend_, y.tensor), e))
        << s.tokens << " x " << s.in << " x " << s.out << " bias " << with_bias << " accumulate " << accumulate;
  }
};

TEST_F(Linear, AllDtypes) {
  for (DType x : {DType::bf16, DType::f16, DType::f32})
    for (DType w : {DType::bf16, DType::f16, DType::f32})
      for (DType y : {DType::bf16, DType::f16, DType::f32}) run({13, 37, 29}, x, w, y, true, false);
}

TEST_F(Linear, ShapesBiasAndAccumulation) {
  // The last two are cut into panels: of tokens and of outputs.
  for (const LinearShape& s :
       {LinearShape{0, 8, 8}, {1, 1, 1}, {1, 257, 3}, {5, 3, 1}, {64, 64, 64}, {2500, 6, 5}, {3, 5, 2300}})
    for (bool with_bias : {false, true})
      for (bool accumulate : {false, true}) {
        run(s, DType::bf16, DType::bf16, DType::bf16, with_bias, accumulate);
        run(s, DType::bf16, DType::bf16, DType::f32, with_bias, accumulate);
      }
}

TEST_F(Linear, StridedViews) {
  const HostMatrix x = random_matrix(*backend_, DType::bf16, 9, 40, 5),
                   w = random_matrix(*backend_, DType::bf16, 11, 40, 6);
  const HostMatrix y = poisoned_matrix(*backend_, DType::bf16, 9, 30);
  backend_->linear(x.view().col_range(3, 36), w.view().col_range(7, 40), nullptr, y.view().col_range(10, 21), false);
  const std::vector<double> got = download(*backend_, y.tensor);
  for (int64_t t = 0; t < 9; ++t)
    for (int64_t c = 0; c < 30; ++c) {
      if (c < 10 || c >= 21) {
        EXPECT_TRUE(std::isnan(got[t * 30 + c])) << "written outside the view";
        continue;
      }
      double sum = 0;
      for (int64_t i = 0; i < 33; ++i) sum += x.values[t * 40 + 3 + i] * w.values[(c - 10) * 40 + 7 + i];
      EXPECT_NEAR(got[t * 30 + c], sum, 1e-4 + 0x1p-8 * std::abs(sum));
    }
}

TEST_F(Linear, MismatchIsAnError) {
  const HostMatrix x = random_matrix(*backend_, DType::f32, 4, 8, 1), w = random_matrix(*backend_, DType::f32, 5, 9, 2);
  const HostMatrix y = poisoned_matrix(*backend_, DType::f32, 4, 5);
  EXPECT_THROW(backend_->linear(x.view(), w.view(), nullptr, y.view(), false), Error);
}

TEST_F(Linear, StackRunsEveryExpertOnItsRows) {
  const int64_t in = 24, out = 17;
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{0, 0, 50, 50, 51}, {0, 30}, {2, 9, 9, 20, 28, 33, 41, 50, 50, 60}, {0, 0, 0}}) {
    const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
    const HostMatrix x = random_matrix(*backend_, DType::bf16, 64, in, 7);
    const HostMatrix w = random_matrix(*backend_, DType::bf16, count * out, in, 8);
    const HostMatrix y = poisoned_matrix(*backend_, DType::bf16, 64, out);
    const StackView stack{w.tensor.data(), DType::bf16, count, out, in, in, out * in};
    backend_->linear_stack(x.view(), stack, offsets, y.view());
    const std::vector<double> got = download(*backend_, y.tensor);
    for (int64_t t = 0; t < 64; ++t) {
      int64_t e = 0;
      while (e < count && !(offsets[e] <= t && t < offsets[e + 1])) ++e;
      for (int64_t o = 0; o < out; ++o) {
        if (e == count) {
          EXPECT_TRUE(std::isnan(got[t * out + o])) << "row " << t << " belongs to no expert";
          continue;
        }
        double sum = 0;
        for (int64_t i = 0; i < in; ++i) sum += x.values[t * in + i] * w.values[(e * out + o) * in + i];
        EXPECT_NEAR(got[t * out + o], sum, 1e-4 + 0x1p-8 * std::abs(sum));
      }
    }
  }
}

TEST_F(Linear, ComparisonCanFail) {
  Expected e{{1.0, 2.0}, {1e-6, 1e-6}};
  EXPECT_TRUE(within({1.0, 2.0}, e));
  EXPECT_FALSE(within({1.0, 2.00001}, e));
  EXPECT_FALSE(within({1.0, NAN}, e));
  EXPECT_FALSE(within({1.0}, e));
}

}  // namespace
}  // namespace shardq
