// The reversed Cholesky factorisation and the matrix products of the solver.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "forward_reference.hpp"

namespace shardq {
namespace {

class Factorize : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = make_cpu_backend();

  /// Lower triangles of well-conditioned symmetric matrices; NaN above the diagonal, where nothing may be read.
  Tensor positive_definite(int64_t count, int64_t n, unsigned seed) {
    Tensor h(*backend_, DType::f32, {count, n, n}, "h");
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<double> x(static_cast<size_t>(2 * n * n));
    for (int64_t e = 0; e < count; ++e) {
      for (double& v : x) v = normal(random);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) {
          double sum = 0;
          for (int64_t t = 0; t < 2 * n; ++t) sum += x[t * n + i] * x[t * n + j];
          h.as<float>()[(e * n + i) * n + j] = j > i ? NAN : static_cast<float>(sum / static_cast<double>(2 * n));
        }
    }
    return h;
  }

  Tensor shuffled(int64_t count, int64_t n, unsigned seed) {
    Tensor order(*backend_, DType::i32, {count, n}, "order");
    std::mt19937 random(seed);
    for (int64_t e = 0; e < count; ++e) {
      int32_t* begin = order.as<int32_t>() + e * n;
      std::iota(begin, begin + n, 0);
      std::shuffle(begin, begin + n, random);
    }
    return order;
  }
};

/// Largest |R R^T - H| relative to the geometric mean of the diagonals, and whether T has its shape.
void expect_factor(const Tensor& h, const int32_t* order, float damping, const Tensor& factor, const float* pivots,
                   int64_t e) {
  const int64_t n = h.shape()[2];
  const float* source = h.as<float>() + e * n * n;
  const float* t = factor.as<float>() + e * n * n;
  const auto original = [&](int64_t i) { return order ? order[e * n + i] : i; };
  const auto expected = [&](int64_t i, int64_t j) {
    const int64_t a = std::max(original(i), original(j)), b = std::min(original(i), original(j));
    const double value = source[a * n + b];
    if (i != j) return value;
    return value == 0 ? 1.0 : value + damping;
  };
  const auto r = [&](int64_t k, int64_t j) {
    return k > j ? 0.0 : k == j ? double(pivots[e * n + j]) : double(t[j * n + k]) * pivots[e * n + j];
  };
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t k = i; k < n; ++k) sum += r(i, k) * r(j, k);
      const double size = std::sqrt(expected(i, i) * expected(j, j));
      // Each R is stored as two rounded floats; the factorisation itself is in double.
      ASSERT_NEAR(sum, expected(i, j), 6 * 0x1p-24 * size) << i << ", " << j;
    }
  for (int64_t j = 0; j < n; ++j)
    for (int64_t k = j; k < n; ++k) ASSERT_EQ(t[j * n + k], 0) << "T is strictly triangular";
}

TEST_F(Factorize, ReproducesTheHessian) {
  for (int64_t n : {1, 2, 3, 64, 131, 300})
    for (bool ordered : {false, true})
      for (int64_t count : {1, 5}) {
        if (n == 300 && count > 1) continue;
        const Tensor h = positive_definite(count, n, 21);
        const Tensor order = shuffled(count, n, 22);
        const int32_t* order_data = ordered ? order.as<int32_t>() : nullptr;
        Tensor factor(*backend_, DType::f32, {count, n, n}, "factor"),
            pivots(*backend_, DType::f32, {count, n}, "pivots");
        std::vector<int64_t> which(static_cast<size_t>(count));
        std::iota(which.begin(), which.end(), 0);
        std::vector<float> damping(which.size(), 0.125f);
        std::vector<int> status(which.size(), 7);
        backend_->factorize(h.stack(), order_data, which, damping, factor.stack(), pivots.as<float>(), status);
        for (int64_t e = 0; e < count; ++e) {
          EXPECT_EQ(status[e], 0);
          expect_factor(h, order_data, damping[e], factor, pivots.as<float>(), e);
        }
      }
}

TEST_F(Factorize, DeadColumnsBecomeUnit) {
  const int64_t n = 20;
  Tensor h = positive_definite(1, n, 23);
  for (int64_t i = 0; i < n; ++i) {
    if (i <= 6) h.as<float>()[6 * n + i] = 0;
    if (i >= 6) h.as<float>()[i * n + 6] = 0;
  }
  Tensor factor(*backend_, DType::f32, {1, n, n}, "factor"), pivots(*backend_, DType::f32, {1, n}, "pivots");
  int status = 7;
  backend_->factorize(h.stack(), nullptr, std::vector<int64_t>{0}, std::vector<float>{0.5f}, factor.stack(),
                      pivots.as<float>(), {&status, 1});
  EXPECT_EQ(status, 0);
  EXPECT_EQ(pivots.as<float>()[6], 1.0f);
  for (int64_t k = 0; k < n; ++k) EXPECT_EQ(factor.as<float>()[6 * n + k], 0);
  expect_factor(h, nullptr, 0.5f, factor, pivots.as<float>(), 0);
}

TEST_F(Factorize, TellsFailuresApartAndLeavesOthersAlone) {
  const int64_t n = 16;
  Tensor h = positive_definite(4, n, 24);
  const std::vector<double> kept = download(*backend_, h);
  h.as<float>()[1 * n * n + 5 * n + 5] = -1;   // matrix 1: negative diagonal
  h.as<float>()[3 * n * n + 2 * n + 2] = NAN;  // matrix 3
  Tensor factor(*backend_, DType::f32, {4, n, n}, "factor"), pivots(*backend_, DType::f32, {4, n}, "pivots");
  std::fill_n(factor.as<float>(), factor.size(), 42.0f);
  std::vector<int> status(3, 7);
  backend_->factorize(h.stack(), nullptr, std::vector<int64_t>{3, 0, 1}, std::vector<float>{0, 0, 0}, factor.stack(),
                      pivots.as<float>(), status);
  EXPECT_NE(status[0], 0);
  EXPECT_EQ(status[1], 0);
  EXPECT_NE(status[2], 0);
  expect_factor(h, nullptr, 0, factor, pivots.as<float>(), 0);
  for (int64_t i = 0; i < n * n; ++i) EXPECT_EQ(factor.as<float>()[2 * n * n + i], 42.0f) << "not asked for";
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j <= i; ++j) EXPECT_EQ(h.as<float>()[i * n + j], kept[i * n + j]) << "h is kept";
}

TEST_F(Factorize, UpdateAndLossFollowTheFactor) {
  const int64_t count = 3, rows = 13, n = 40, begin = 24, end = 40;
  Tensor factor(*backend_, DType::f32, {count, n, n}, "factor"), pivots(*backend_, DType::f32, {count, n}, "pivots");
  Tensor residual(*backend_, DType::f32, {count, rows, n}, "residual"),
      work(*backend_, DType::f32, {count, rows, n}, "work");
  Tensor target(*backend_, DType::f32, {count, rows, end - begin}, "target");
  std::mt19937 random(25);
  std::normal_distribution<float> normal;
  for (Tensor* t : {&factor, &residual, &target, &pivots})
    for (int64_t i = 0; i < t->size(); ++i) t->as<float>()[i] = normal(random);
  for (int64_t e = 0; e < count; ++e)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t k = j; k < n; ++k) factor.as<float>()[(e * n + j) * n + k] = 0;
  const std::vector<double> start = download(*backend_, target);
  backend_->block_update(residual.stack().col_range(0, begin), factor.stack().row_range(begin, end).col_range(0, begin),
                         target.stack());
  std::vector<float> losses(count * rows);
  backend_->quadratic_loss(residual.stack(), factor.stack(), pivots.as<float>(), work.stack(), losses.data());
  for (int64_t e = 0; e < count; ++e)
    for (int64_t r = 0; r < rows; ++r) {
      const float* d = residual.as<float>() + (e * rows + r) * n;
      const auto t = [&](int64_t k, int64_t j) { return double(factor.as<float>()[(e * n + j) * n + k]); };
      for (int64_t j = begin; j < end; ++j) {
        double sum = start[(e * rows + r) * (end - begin) + j - begin];
        for (int64_t k = 0; k < begin; ++k) sum += d[k] * t(k, j);
        EXPECT_NEAR(target.as<float>()[(e * rows + r) * (end - begin) + j - begin], sum, 1e-5 * n);
      }
      double loss = 0;
      for (int64_t j = 0; j < n; ++j) {
        double sum = d[j];
        for (int64_t k = 0; k < j; ++k) sum += d[k] * t(k, j);
        loss += std::pow(sum * pivots.as<float>()[e * n + j], 2);
      }
      EXPECT_NEAR(losses[e * rows + r], loss, 1e-5 * loss);
    }
}

}  // namespace
}  // namespace shardq
