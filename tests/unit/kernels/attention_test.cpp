#include <gtest/gtest.h>

#include "core/error.hpp"
#include "forward_reference.hpp"

namespace shardq {
namespace {

struct AttentionCase {
  int64_t heads, kv_heads, head_dim, window;
  std::vector<int64_t> starts;
};

/// Plain definition in double, query by query.
std::vector<double> attention_reference(const AttentionCase& c, const HostMatrix& q, const HostMatrix& k,
                                        const HostMatrix& v, double scale) {
  const int64_t q_cols = c.heads * c.head_dim, kv_cols = c.kv_heads * c.head_dim;
  std::vector<double> out(c.starts.back() * q_cols, 0.0);
  for (size_t s = 0; s + 1 < c.starts.size(); ++s)
    for (int64_t t = c.starts[s]; t < c.starts[s + 1]; ++t)
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t kv = h / (c.heads / c.kv_heads);
        const int64_t first = c.window == 0 ? c.starts[s] : std::max(c.starts[s], t - c.window + 1);
        std::vector<double> weight;
        double sum = 0;
        for (int64_t key = first; key <= t; ++key) {
          double dot = 0;
          for (int64_t i = 0; i < c.head_dim; ++i)
            dot += q.values[t * q_cols + h * c.head_dim + i] * k.values[key * kv_cols + kv * c.head_dim + i];
          weight.push_back(std::exp(dot * scale));
          sum += weight.back();
        }
        for (int64_t key = first; key <= t; ++key)
          for (int64_t i = 0; i < c.head_dim; ++i)
            out[t * q_cols + h * c.head_dim + i] +=
                weight[key - first] / sum * v.values[key * kv_cols + kv * c.head_dim + i];
      }
  return out;
}

class Attention : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, Attention, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(torch_name(info.param)); });

TEST_P(Attention, MatchesTheDefinition) {
  const auto backend = make_cpu_backend();
  const DType dtype = GetParam();
  const std::vector<AttentionCase> cases = {
      {2, 2, 8, 0, {0, 5}},
      {4, 2, 16, 0, {0, 1, 64, 129, 129, 200}},
      {6, 1, 10, 0, {0, 131}},
      {2, 1, 8, 1, {0, 9, 80}},
      {4, 2, 12, 7, {0, 65, 66, 140}},
      {2, 2, 4, 64, {0, 130}},
      {2, 2, 4, 1000, {0, 70, 71}},
      {3, 3, 32, 63, {0, 257}},
      {1, 1, 2, 0, {0, 0}},
  };
  for (const AttentionCase& c : cases) {
    const int64_t tokens = c.starts.back();
    const HostMatrix q = random_matrix(*backend, dtype, tokens, c.heads * c.head_dim, 1, 1.5f);
    const HostMatrix k = random_matrix(*backend, dtype, tokens, c.kv_heads * c.head_dim, 2, 1.5f);
    const HostMatrix v = random_matrix(*backend, dtype, tokens, c.kv_heads * c.head_dim, 3);
    const HostMatrix out = poisoned_matrix(*backend, dtype, tokens, c.heads * c.head_dim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    backend->attention(q.view(), k.view(), v.view(), c.head_dim, c.starts, scale, c.window, out.view());
    const auto want = attention_reference(c, q, k, v, scale);
    // Scores reach about 10, and their absolute error becomes the relative error of a weight.
    const double tolerance = rounding(dtype) + 0x1p-24 * 10 * std::sqrt(static_cast<double>(c.head_dim) + 100);
    EXPECT_LE(worst_error(download(*backend, out.tensor), want, 1), tolerance)
        << c.heads << " heads, window " << c.window;
  }
}

TEST(Attention, AWrongWindowOrBoundaryIsSeen) {
  const auto backend = make_cpu_backend();
  const AttentionCase right{2, 1, 8, 6, {0, 40, 90}};
  const HostMatrix q = random_matrix(*backend, DType::f32, 90, 16, 1),
                   k = random_matrix(*backend, DType::f32, 90, 8, 2);
  const HostMatrix v = random_matrix(*backend, DType::f32, 90, 8, 3),
                   out = poisoned_matrix(*backend, DType::f32, 90, 16);
  backend->attention(q.view(), k.view(), v.view(), 8, right.starts, 0.35f, right.window, out.view());
  const auto got = download(*backend, out.tensor);
  EXPECT_LE(worst_error(got, attention_reference(right, q, k, v, 0.35f), 1), 1e-5);
  AttentionCase wrong = right;
  wrong.window = 7;
  EXPECT_GT(worst_error(got, attention_reference(wrong, q, k, v, 0.35f), 1), 1e-2);
  wrong = right;
  wrong.starts = {0, 41, 90};
  EXPECT_GT(worst_error(got, attention_reference(wrong, q, k, v, 0.35f), 1), 1e-2);
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const auto backend = make_cpu_backend();
  const HostMatrix q = make_matrix(*backend, DType::f32, 3, 4, [](int64_t, int64_t) { return 300.0f; });
  const HostMatrix k =
      make_matrix(*backend, DType::f32, 3, 4, [](int64_t r, int64_t) { return r == 1 ? 300.0f : -300.0f; });
  const HostMatrix v =
      make_matrix(*backend, DType::f32, 3, 4, [](int64_t r, int64_t) { return static_cast<float>(r); });
  const HostMatrix out = poisoned_matrix(*backend, DType::f32, 3, 4);
  const std::vector<int64_t> starts = {0, 3};
  backend->attention(q.view(), k.view(), v.view(), 4, starts, 0.5f, 0, out.view());
  EXPECT_EQ(download(*backend, out.tensor), (std::vector<double>{0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
}

TEST(Attention, ShapesAreChecked) {
  const auto backend = make_cpu_backend();
  const HostMatrix q = random_matrix(*backend, DType::f32, 4, 24, 1), k = random_matrix(*backend, DType::f32, 4, 16, 1);
  const HostMatrix out = poisoned_matrix(*backend, DType::f32, 4, 24);
  const std::vector<int64_t> starts = {0, 4}, beyond = {0, 5};
  EXPECT_THROW(backend->attention(q.view(), k.view(), k.view(), 8, starts, 1, 0, out.view()), Error);  // 3 heads over 2
  EXPECT_THROW(backend->attention(q.view(), q.view(), q.view(), 7, starts, 1, 0, out.view()), Error);
  EXPECT_THROW(backend->attention(q.view(), q.view(), q.view(), 8, beyond, 1, 0, out.view()), Error);
}

}  // namespace
}  // namespace shardq
