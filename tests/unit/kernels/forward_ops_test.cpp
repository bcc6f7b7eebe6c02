#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "forward_reference.hpp"
#include "kernels/cpu/exponential.hpp"
#include "kernels/cpu/reduction.hpp"

namespace shardq {
namespace {

class ForwardOps : public testing::TestWithParam<DType> {
 protected:
  std::unique_ptr<Backend> backend_ = make_cpu_backend();
  DType dtype_ = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Dtypes, ForwardOps, testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(torch_name(info.param)); });

std::vector<double> rms_norm_reference(const HostMatrix& x, const HostMatrix& w, double eps) {
  std::vector<double> y(x.values.size());
  const int64_t cols = x.view().cols;
  for (int64_t r = 0; r < x.view().rows; ++r) {
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) squares += std::pow(x.values[r * cols + c], 2);
    for (int64_t c = 0; c < cols; ++c)
      y[r * cols + c] = x.values[r * cols + c] / std::sqrt(squares / static_cast<double>(cols) + eps) * w.values[c];
  }
  return y;
}

TEST_P(ForwardOps, RmsNorm) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{5, 129}, {1, 1}, {3, 16}, {0, 8}}) {
    const HostMatrix x = random_matrix(*backend_, dtype_, rows, cols, 1);
    const HostMatrix w = random_matrix(*backend_, DType::bf16, 1, cols, 2);
    const HostMatrix y = poisoned_matrix(*backend_, dtype_, rows, cols);
    backend_->rms_norm(x.view(), w.tensor.data(), DType::bf16, 1e-3f, y.view());
    const auto want = rms_norm_reference(x, w, 1e-3f);
    EXPECT_LE(worst_error(download(*backend_, y.tensor), want, 1e-4), rounding(dtype_) + 4 * 0x1p-24)
        << rows << "x" << cols;
    backend_->rms_norm(x.view(), w.tensor.data(), DType::bf16, 1e-3f, x.view());  // in place
    EXPECT_EQ(download(*backend_, x.tensor), download(*backend_, y.tensor));
  }
}

TEST_P(ForwardOps, RopeRotatesPairsByPosition) {
  const int64_t heads = 3, head_dim = 10, half = 5, tokens = 7;
  HostMatrix x = random_matrix(*backend_, dtype_, tokens, heads * head_dim, 3);
  std::vector<float> cosine(20 * half), sine(20 * half);
  for (int64_t i = 0; i < 20 * half; ++i) {
    cosine[i] = std::cos(0.37f * static_cast<float>(i));
    sine[i] = 1.2f * std::sin(0.37f * static_cast<float>(i));
  }
  const std::vector<int32_t> positions = {0, 1, 2, 19, 0, 5, 3};
  std::vector<double> want(x.values.size());
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < half; ++i) {
        const int64_t at = t * heads * head_dim + h * head_dim + i;
        const double c = cosine[positions[t] * half + i], s = sine[positions[t] * half + i];
        want[at] = x.values[at] * c - x.values[at + half] * s;
        want[at + half] = x.values[at + half] * c + x.values[at] * s;
      }
  backend_->rope(x.view(), head_dim, cosine.data(), sine.data(), positions.data());
  EXPECT_LE(worst_error(download(*backend_, x.tensor), want, 1), rounding(dtype_) + 8 * 0x1p-24);
}

TEST_P(ForwardOps, RopeOnAStridedPart) {
  HostMatrix x = random_matrix(*backend_, dtype_, 4, 24, 3);
  const std::vector<float> cosine(4, 0.0f), sine(4, 1.0f);  // a quarter turn: (a, b) -> (-b, a)
  const std::vector<int32_t> positions(4, 0);
  backend_->rope(x.view().col_range(8, 16), 8, cosine.data(), sine.data(), positions.data());
  const auto got = download(*backend_, x.tensor);
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t c = 0; c < 24; ++c) {
      const double* row = x.values.data() + t * 24;
      const double want = c < 8 || c >= 16 ? row[c] : c < 12 ? -row[c + 4] : row[c - 4];
      EXPECT_EQ(got[t * 24 + c], want);
    }
}

TEST_P(ForwardOps, SiluMul) {
  const int64_t rows = 9, cols = 67;
  const HostMatrix both = random_matrix(*backend_, dtype_, rows, 2 * cols, 4, 3);
  const HostMatrix out = poisoned_matrix(*backend_, dtype_, rows, cols);
  backend_->silu_mul(both.view().col_range(0, cols), both.view().col_range(cols, 2 * cols), out.view());
  std::vector<double> want(rows * cols);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const double g = both.values[r * 2 * cols + c];
      want[r * cols + c] = g / (1 + std::exp(-g)) * both.values[r * 2 * cols + cols + c];
    }
  EXPECT_LE(worst_error(download(*backend_, out.tensor), want, 1e-4), 2.1 * rounding(dtype_) + 8 * 0x1p-24);
}

TEST_P(ForwardOps, SiluOfExtremes) {
  const std::vector<float> gates = {0, -0.0f, 100, -100, 1000, -1000, 60000, -60000};
  const HostMatrix gate = make_matrix(*backend_, dtype_, 1, 8, [&](int64_t, int64_t c) { return gates[c]; });
  const HostMatrix up = make_matrix(*backend_, dtype_, 1, 8, [](int64_t, int64_t) { return 1.0f; });
  const HostMatrix out = poisoned_matrix(*backend_, dtype_, 1, 8);
  backend_->silu_mul(gate.view(), up.view(), out.view());
  const auto got = download(*backend_, out.tensor);
  for (int64_t c = 0; c < 8; ++c) EXPECT_NEAR(got[c], std::max(0.0, gate.values[c]), 1e-6) << gates[c];
}

TEST_P(ForwardOps, Add) {
  const HostMatrix x = random_matrix(*backend_, dtype_, 5, 33, 5), y = random_matrix(*backend_, dtype_, 5, 33, 6);
  std::vector<double> want(x.values.size());
  for (size_t i = 0; i < want.size(); ++i) want[i] = x.values[i] + y.values[i];
  backend_->add(x.view(), y.view());
  EXPECT_LE(worst_error(download(*backend_, x.tensor), want, 1e-30), rounding(dtype_));
}

TEST_P(ForwardOps, CrossEntropy) {
  const int64_t rows = 6, classes = 1001;
  const HostMatrix logits = random_matrix(*backend_, dtype_, rows, classes, 7, 4);
  const std::vector<int32_t> targets = {0, 1000, 500, 3, 3, 999};
  std::vector<double> losses(rows), want(rows);
  std::vector<int32_t> best(rows), want_best(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const double* row = logits.values.data() + r * classes;
    const double largest = *std::max_element(row, row + classes);
    double sum = 0;
    for (int64_t c = 0; c < classes; ++c) sum += std::exp(row[c] - largest);
    want[r] = std::log(sum) + largest - row[targets[r]];
    want_best[r] = static_cast<int32_t>(std::max_element(row, row + classes) - row);
  }
  backend_->cross_entropy(logits.view(), targets.data(), losses.data(), best.data());
  EXPECT_LE(worst_error(losses, want, 1e-3), 1e-6);
  EXPECT_EQ(best, want_best);
}

TEST_P(ForwardOps, CrossEntropyOfTiesAndLargeLogits) {
  const HostMatrix logits = make_matrix(*backend_, dtype_, 2, 40, [](int64_t r, int64_t c) {
    return r == 0 ? 7.0f : c == 39 || c == 21 ? 30000.0f : 0.0f;
  });
  const std::vector<int32_t> targets = {5, 39};
  std::vector<double> losses(2);
  std::vector<int32_t> best(2);
  backend_->cross_entropy(logits.view(), targets.data(), losses.data(), best.data());
  EXPECT_NEAR(losses[0], std::log(40.0), 1e-6);
  EXPECT_NEAR(losses[1], std::log(2.0), 1e-6);
  EXPECT_EQ(best, (std::vector<int32_t>{0, 21}));
  const std::vector<int32_t> outside = {5, 40};
  EXPECT_THROW(backend_->cross_entropy(logits.view(), outside.data(), losses.data(), best.data()), Error);
}

TEST(Exponential, IsAccurateOverItsRange) {
  double worst = 0;
  for (float x = -86.5f; x < 87.5f; x += 0.00137f)
    worst = std::max(worst, std::abs(cpu::exponential(x) / std::exp(static_cast<double>(x)) - 1));
  EXPECT_LT(worst, 3e-7);
  EXPECT_EQ(cpu::exponential(0), 1.0f);
  EXPECT_EQ(cpu::exponential(-1000), 0.0f);
  EXPECT_EQ(cpu::exponential(-INFINITY), 0.0f);
  EXPECT_TRUE(std::isnan(cpu::exponential(NAN)));
}

TEST(Reduction, LanesCoverEveryElementOnce) {
  for (int64_t count : {1, 2, 15, 16, 17, 31, 100}) {
    std::vector<float> values(count);
    for (int64_t at = 0; at < count; ++at) {
      std::iota(values.begin(), values.end(), -200.0f);
      values[at] = 7;
      EXPECT_EQ(cpu::largest_of(values.data(), count), 7) << count << " " << at;
      std::fill(values.begin(), values.end(), 0.0f);
      values[at] = 3;
      EXPECT_EQ(cpu::sum_of(count, [&](int64_t i) { return values[i]; }), 3);
    }
  }
  EXPECT_EQ(cpu::sum_of(0, [](int64_t) { return 1.0; }), 0);
}

TEST(WorstError, FailsWhereItMust) {
  EXPECT_EQ(worst_error({1, 2}, {1, 2}, 0), 0);
  EXPECT_NEAR(worst_error({1, 2.2}, {1, 2}, 0), 0.1, 1e-12);
  EXPECT_TRUE(std::isinf(worst_error({NAN}, {1}, 0)));
  EXPECT_TRUE(std::isinf(worst_error({}, {1}, 0)));
}

}  // namespace
}  // namespace shardq
