#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "core/error.hpp"
#include "forward_reference.hpp"

namespace shardq {
namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};
Routed route(Backend& backend, const HostMatrix& logits, const RouterSpec& router) {
  Routed r{std::vector<int32_t>(logits.view().rows * router.top_k),
           std::vector<float>(logits.view().rows * router.top_k)};
  backend.route(logits.view(), router, r.ids.data(), r.weights.data());
  return r;
}

TEST(Route, TakesTheLargestProbabilities) {
  const auto backend = make_cpu_backend();
  for (const bool normalize : {true, false}) {
    const RouterSpec router{13, 4, normalize};
    const HostMatrix logits = random_matrix(*backend, DType::bf16, 50, 13, 1, 2);
    const Routed got = route(*backend, logits, router);
    for (int64_t t = 0; t < 50; ++t) {
      const double* row = logits.values.data() + t * 13;
      std::vector<int32_t> order(13);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
      double all = 0, chosen = 0;
      for (int64_t e = 0; e < 13; ++e) all += std::exp(row[e]);
      for (int64_t i = 0; i < 4; ++i) chosen += std::exp(row[order[i]]);
      for (int64_t i = 0; i < 4; ++i) {
        EXPECT_EQ(got.ids[t * 4 + i], order[i]);
        EXPECT_NEAR(got.weights[t * 4 + i], std::exp(row[order[i]]) / (normalize ? chosen : all), 1e-6);
      }
    }
  }
}

TEST(Route, TiesGoToTheLowerIndex) {
  const auto backend = make_cpu_backend();
  const std::vector<float> values = {1, 3, 3, 0, 3, 1};
  const HostMatrix logits = make_matrix(*backend, DType::f32, 1, 6, [&](int64_t, int64_t c) { return values[c]; });
  EXPECT_EQ(route(*backend, logits, {6, 5, true}).ids, (std::vector<int32_t>{1, 2, 4, 0, 5}));
  EXPECT_EQ(route(*backend, logits, {6, 6, true}).ids, (std::vector<int32_t>{1, 2, 4, 0, 5, 3}));
}

TEST(Route, LargeLogitsStayFinite) {
  const auto backend = make_cpu_backend();
  const HostMatrix logits =
      make_matrix(*backend, DType::f32, 1, 4, [](int64_t, int64_t c) { return c == 2 ? 1e30f : -1e30f; });
  const Routed got = route(*backend, logits, {4, 2, false});
  EXPECT_EQ(got.ids, (std::vector<int32_t>{2, 0}));  // the others tie at 0
  EXPECT_EQ(got.weights, (std::vector<float>{1, 0}));
}

TEST(SortByExpert, IsAStableCountingSort) {
  const auto backend = make_cpu_backend();
  const std::vector<int32_t> ids = {2, 0, 2, 4, 0, 2, 4, 4};
  std::vector<int32_t> order(8), place(8);
  std::vector<int64_t> offsets(6);
  backend->sort_by_expert(ids.data(), 8, 5, order.data(), place.data(), offsets);
  EXPECT_EQ(offsets, (std::vector<int64_t>{0, 2, 2, 5, 5, 8}));
  EXPECT_EQ(order, (std::vector<int32_t>{1, 4, 0, 2, 5, 3, 6, 7}));
  for (int32_t slot = 0; slot < 8; ++slot) EXPECT_EQ(order[place[slot]], slot);
  const std::vector<int32_t> outside = {5};
  EXPECT_THROW(backend->sort_by_expert(outside.data(), 1, 5, order.data(), place.data(), offsets), Error);
  backend->sort_by_expert(ids.data(), 0, 5, order.data(), place.data(), offsets);
  EXPECT_EQ(offsets, std::vector<int64_t>(6, 0));
}

TEST(GatherCombine, IsTheWeightedSumOfEachTokensRows) {
  const auto backend = make_cpu_backend();
  const int64_t tokens = 23, top_k = 3, experts = 7, cols = 19;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const HostMatrix x = random_matrix(*backend, dtype, tokens, cols, 1),
                     hidden = random_matrix(*backend, dtype, tokens, cols, 2);
    const HostMatrix logits = random_matrix(*backend, dtype, tokens, experts, 3);
    const Routed routed = route(*backend, logits, {experts, top_k, true});
    std::vector<int32_t> order(tokens * top_k), place(tokens * top_k);
    std::vector<int64_t> offsets(experts + 1);
    backend->sort_by_expert(routed.ids.data(), tokens * top_k, experts, order.data(), place.data(), offsets);
    const HostMatrix gathered = poisoned_matrix(*backend, dtype, tokens * top_k, cols);
    backend->dispatch_rows(x.view(), order.data(), place.data(), top_k, gathered.view());
    EXPECT_THROW(backend->dispatch_rows(x.view(), order.data(), place.data(), top_k + 1, gathered.view()), Error);
    const auto rows = download(*backend, gathered.tensor);
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t i = offsets[e]; i < offsets[e + 1]; ++i) {
        EXPECT_EQ(routed.ids[order[i]], e);
        for (int64_t c = 0; c < cols; ++c) EXPECT_EQ(rows[i * cols + c], x.values[order[i] / top_k * cols + c]);
      }
    // With every expert the identity, the combination is hidden + x times the sum of the weights.
    backend->combine_rows(gathered.view(), place.data(), routed.weights.data(), top_k, hidden.view());
    std::vector<double> want(tokens * cols);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < cols; ++c) {
        want[t * cols + c] = hidden.values[t * cols + c];
        for (int64_t i = 0; i < top_k; ++i)
          want[t * cols + c] += routed.weights[t * top_k + i] * x.values[t * cols + c];
      }
    EXPECT_LE(worst_error(download(*backend, hidden.tensor), want, 1), rounding(dtype) + 8 * 0x1p-24);
  }
}

}  // namespace
}  // namespace shardq
