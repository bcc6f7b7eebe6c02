// The reversed Cholesky: R R^T gives the damped, permuted matrix back to within the bound of the factorisation.
#include <algorithm>
#include <numeric>

#include "equivalence/equivalence.hpp"

namespace shardq::equivalence {
namespace {

using FactorizeEquivalence = Equivalence;

/// A stack of positive definite matrices (lower triangles; NaN above) of rank min(n, rank) plus `ridge`.
std::vector<float> gram_stack(const std::vector<float>& x, int64_t count, int64_t n, int64_t rank, float ridge) {
  std::vector<float> h(count * n * n, NAN);
  for (int64_t e = 0; e < count; ++e)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        double sum = i == j ? ridge : 0.0;
        for (int64_t t = 0; t < rank; ++t)
          sum += static_cast<double>(x[(e * rank + t) * n + i]) * x[(e * rank + t) * n + j] / static_cast<double>(rank);
        h[(e * n + i) * n + j] = static_cast<float>(sum);
      }
  return h;
}

struct FactorCase {
  int64_t count, n;
  bool ordered;
  std::vector<int64_t> which;
};

/// What factorize() left, on the host.
struct Result {
  std::vector<float> factor, pivots, h;
  std::vector<int> status;
};

Result run(Backend& backend, const FactorCase& c, const std::vector<float>& h, const std::vector<int32_t>& order,
           const std::vector<float>& damping) {
  const Tensor ht = to_tensor(backend, DType::f32, {c.count, c.n, c.n}, h),
               ot = to_tensor_raw(backend, DType::i32, {c.count, c.n}, order),
               ft = poisoned(backend, DType::f32, {c.count, c.n, c.n}),
               pt = poisoned(backend, DType::f32, {c.count, c.n});
  Result result;
  result.status.assign(c.which.size(), -1);
  backend.factorize(ht.stack(), c.ordered ? ot.as<int32_t>() : nullptr, c.which, damping, ft.stack(), pt.as<float>(),
                    result.status);
  result.factor = raw_of<float>(backend, ft);
  result.pivots = raw_of<float>(backend, pt);
  result.h = raw_of<float>(backend, ht);
  return result;
}

/// |R R^T - (H[order][:, order] + damping I)| <= (n + 8) eps sqrt(H_ii H_jj) (Higham, theorem 10.3, and the division by
/// pivots), zeros on and above the diagonal, and nothing touched outside `which`.
void expect_factor(const FactorCase& c, const Result& result, const std::vector<float>& h,
                   const std::vector<int32_t>& order, const std::vector<float>& damping) {
  const int64_t n = c.n;
  for (int64_t e = 0; e < c.count; ++e) {
    const float* t = &result.factor[e * n * n];
    const auto found = std::find(c.which.begin(), c.which.end(), e);
    if (found == c.which.end()) {
      for (int64_t i = 0; i < n * n; ++i) ASSERT_TRUE(std::isnan(t[i])) << "matrix " << e << " was not asked for";
      for (int64_t i = 0; i < n; ++i) ASSERT_TRUE(std::isnan(result.pivots[e * n + i]));
      continue;
    }
    const int64_t index = found - c.which.begin();
    ASSERT_EQ(result.status[index], 0) << "matrix " << e;
    const auto at = [&](int64_t i, int64_t j) {
      int64_t a = c.ordered ? order[e * n + i] : i, b = c.ordered ? order[e * n + j] : j;
      if (a < b) std::swap(a, b);
      double value = h[(e * n + a) * n + b];
      if (a == b) value = value == 0 ? 1.0 : static_cast<double>(h[(e * n + a) * n + b] + damping[index]);
      return value;
    };
    std::vector<double> r(n * n, 0.0);  // R(k, j) at [k][j]
    for (int64_t j = 0; j < n; ++j) {
      const double pivot = result.pivots[e * n + j];
      r[j * n + j] = pivot;
      for (int64_t k = 0; k < n; ++k) {
        if (k < j)
          r[k * n + j] = t[j * n + k] * pivot;
        else
          ASSERT_EQ(t[j * n + k], 0.0f) << "matrix " << e << " row " << j << " column " << k;
      }
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = i; k < n; ++k) {
        double sum = 0;
        for (int64_t j = k; j < n; ++j) sum += r[i * n + j] * r[k * n + j];
        ASSERT_NEAR(sum, at(i, k), (n + 8) * kEps32 * std::sqrt(at(i, i) * at(k, k)))
            << "matrix " << e << " at " << i << ", " << k;
      }
  }
  for (int64_t i = 0; i < c.count * n * n; ++i)
    if (i % n <= i / n % n) {
      ASSERT_EQ(result.h[i], h[i]) << "h changed at " << i;
    }
}

TEST_F(FactorizeEquivalence, FactorsGiveTheMatrixBack) {
  std::vector<FactorCase> cases;
  for (bool ordered : {false, true}) {
    for (int64_t n : {1, 2, 3, 31, 32, 33, 64, 100, 257}) cases.push_back({1, n, ordered, {0}});
    cases.push_back({4, 37, ordered, {0, 1, 2, 3}});
    cases.push_back({5, 65, ordered, {4, 1}});
    cases.push_back({30, 19, ordered, {}});
    for (int64_t e = 0; e < 30; e += e % 3 == 0 ? 1 : 2) cases.back().which.push_back(e);
    cases.push_back({2, 520, ordered, {0, 1}});
    // Stacks that our own kernels take: several blocks of 128, the last one whole, narrow or nearly empty.
    cases.push_back({8, 132, ordered, {0, 1, 2, 3, 4, 5, 6, 7}});
    cases.push_back({10, 384, ordered, {9, 7, 5, 3, 1, 0, 2, 4}});
    cases.push_back({9, 300, ordered, {0, 1, 2, 3, 4, 5, 6, 7, 8}});
    cases.push_back({2, 8, ordered, {}});
  }
  for (const FactorCase& c : cases) {
    SCOPED_TRACE(fmt::format("{} x {}, {} wanted, ordered {}", c.count, c.n, c.which.size(), c.ordered));
    const int64_t rank = c.n > 300 ? 64 : 2 * c.n;
    const auto h = gram_stack(normal(c.count * rank * c.n), c.count, c.n, rank, 0.5f);
    std::vector<int32_t> order;
    for (int64_t e = 0; e < c.count; ++e)
      for (int32_t i : permutation(c.n)) order.push_back(i);
    std::vector<float> damping;
    for (size_t i = 0; i < c.which.size(); ++i) damping.push_back(0.01f * static_cast<float>(i + 1));
    for (Backend* backend : {&cpu(), &gpu()}) {
      SCOPED_TRACE(backend->name());
      expect_factor(c, run(*backend, c, h, order, damping), h, order, damping);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(FactorizeEquivalence, DeadColumnsGetUnitPivots) {
  const int64_t n = 41;
  for (bool ordered : {false, true}) {
    auto h = gram_stack(normal(2 * n * n), 1, n, 2 * n, 0.5f);
    for (int64_t dead : {int64_t{0}, int64_t{17}, n - 1})
      for (int64_t i = 0; i < n; ++i) h[dead > i ? dead * n + i : i * n + dead] = 0.0f;
    const auto order = permutation(n);
    const FactorCase c{1, n, ordered, {0}};
    for (Backend* backend : {&cpu(), &gpu()}) {
      const Result result = run(*backend, c, h, order, {0.25f});
      expect_factor(c, result, h, order, {0.25f});
      if (HasFatalFailure()) return;
      for (int64_t j = 0; j < n; ++j) {
        const int64_t column = ordered ? order[j] : j;
        if (column == 0 || column == 17 || column == n - 1) {
          EXPECT_EQ(result.pivots[j], 1.0f);
        }
      }
    }
  }
}

TEST_F(FactorizeEquivalence, FailuresAreStatusesOfTheirMatrices) {
  // 0: indefinite; 1: fine; 2: NaN; 3: infinite; 4: indefinite, but not under its damping; the rest: fine.
  // Sizes for the library's batched routine, for its single one, and for our own kernels.
  for (const auto& [count, size] : {std::pair<int64_t, int64_t>{5, 24}, {5, 530}, {9, 260}}) {
    auto h = gram_stack(normal(count * 8 * size), count, size, 8, 1.0f);
    const auto diagonal = [&](int64_t e, int64_t i) -> float& { return h[(e * size + i) * size + i]; };
    diagonal(0, 5) = -3.0f;
    diagonal(2, 7) = NAN;
    diagonal(3, size - 1) = INFINITY;
    for (int64_t i = 0; i < size; ++i) diagonal(4, i) -= 1.5f;
    FactorCase c{count, size, false, {}};
    for (int64_t e = 0; e < count; ++e) c.which.push_back(e);
    std::vector<float> damping(count, 0.01f);
    for (Backend* backend : {&cpu(), &gpu()}) {
      SCOPED_TRACE(fmt::format("{} of {} on {}", count, size, backend->name()));
      damping[4] = 0.01f;
      const Result weak = run(*backend, c, h, {}, damping);
      EXPECT_NE(weak.status[0], 0);
      EXPECT_EQ(weak.status[1], 0);
      EXPECT_NE(weak.status[2], 0);
      EXPECT_NE(weak.status[3], 0);
      EXPECT_NE(weak.status[4], 0);
      for (int64_t e = 5; e < count; ++e) EXPECT_EQ(weak.status[e], 0);
      damping[4] = 2.0f;
      const Result strong = run(*backend, c, h, {}, damping);
      EXPECT_NE(strong.status[0], 0);
      EXPECT_EQ(strong.status[4], 0);
    }
  }
}

}  // namespace
}  // namespace shardq::equivalence
