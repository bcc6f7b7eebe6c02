// Results of the CPU backend depend on the operands alone: not on the number of threads, and in the solver not on which
// other rows are solved along.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cstring>
#include <numeric>

#include "forward_reference.hpp"

namespace shardq {
namespace {

/// Runs with `threads` OpenMP threads on a backend made for them, then puts the number back.
template <class Run>
auto with_threads(int threads, Run&& run) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  auto result = run(*backend);
  omp_set_num_threads(before);
  return result;
}

std::vector<uint32_t> bits_of(const Tensor& t) {
  std::vector<uint32_t> bits(static_cast<size_t>((t.bytes() + 3) / 4));
  std::memcpy(bits.data(), t.data(), static_cast<size_t>(t.bytes()));
  return bits;
}

template <class Run>
void expect_same_bits(Run&& run) {
  const auto one = with_threads(1, run);
  for (int threads : {2, 3, 5}) EXPECT_TRUE(with_threads(threads, run) == one) << threads << " threads";
}

TEST(Determinism, Linear) {
  for (int64_t tokens : {7, 300, 600})
    for (DType dtype : {DType::bf16, DType::f32})
      expect_same_bits([&](Backend& b) {
        const HostMatrix x = random_matrix(b, DType::bf16, tokens, 200, 1),
                         w = random_matrix(b, DType::bf16, 1100, 200, 2);
        const HostMatrix y = poisoned_matrix(b, dtype, tokens, 1100);
        b.linear(x.view(), w.view(), nullptr, y.view(), false);
        return bits_of(y.tensor);
      });
}

TEST(Determinism, LinearStackAndGram) {
  // Many alike: side by side on some numbers of threads. One large among small: one after the other.
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{0, 70, 150, 211, 280, 350, 420, 481, 560, 640}, std::vector<int64_t>{0, 5, 560, 600, 640}})
    expect_same_bits([&](Backend& b) {
      const int64_t count = static_cast<int64_t>(offsets.size()) - 1, n = 300, out = 260;
      const HostMatrix x = random_matrix(b, DType::bf16, 640, n, 3),
                       w = random_matrix(b, DType::bf16, count * out, n, 4);
      const HostMatrix y = poisoned_matrix(b, DType::bf16, 640, out);
      b.linear_stack(x.view(), {w.tensor.data(), DType::bf16, count, out, n, n, out * n}, offsets, y.view());
      Tensor h(b, DType::f32, {count, n, n}, "h");
      b.zero(h.data(), h.bytes());
      b.accumulate_gram(x.view(), h.stack(), offsets);
      std::vector<uint32_t> bits = bits_of(y.tensor), more = bits_of(h);
      bits.insert(bits.end(), more.begin(), more.end());
      return bits;
    });
}

TEST(Determinism, Factorize) {
  for (int64_t count : {1, 6})
    expect_same_bits([&](Backend& b) {
      const int64_t n = 600;
      const HostMatrix x = random_matrix(b, DType::bf16, count * 700, n, 5);
      Tensor h(b, DType::f32, {count, n, n}, "h"), factor(b, DType::f32, {count, n, n}, "factor");
      Tensor pivots(b, DType::f32, {count, n}, "pivots");
      std::vector<int64_t> offsets, which;
      for (int64_t e = 0; e <= count; ++e) offsets.push_back(e * 700);
      for (int64_t e = 0; e < count; ++e) which.push_back(e);
      b.zero(h.data(), h.bytes());
      b.accumulate_gram(x.view(), h.stack(), offsets);
      std::vector<int> status(which.size(), 7);
      b.factorize(h.stack(), nullptr, which, std::vector<float>(which.size(), 1.0f), factor.stack(), pivots.as<float>(),
                  status);
      EXPECT_EQ(std::accumulate(status.begin(), status.end(), 0), 0);
      return bits_of(factor);
    });
}

class RowSplit : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(RowSplit, UpdatesHaveTheBitsOfTheWhole) {
  const auto [k, width] = GetParam();
  const int64_t rows = 391;
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  const HostMatrix residual = random_matrix(*backend, DType::f32, rows, k, 6),
                   factor = random_matrix(*backend, DType::f32, width, k, 7);
  const auto run = [&](std::vector<int64_t> cuts) {
    HostMatrix target = random_matrix(*backend, DType::f32, rows, width, 8);
    cuts.push_back(rows);
    int64_t begin = 0;
    for (int64_t end : cuts) {
      backend->block_update(as_stack(residual.view().row_range(begin, end)), as_stack(factor.view()),
                            as_stack(target.view().row_range(begin, end)));
      begin = end;
    }
    return bits_of(target.tensor);
  };
  const std::vector<uint32_t> whole = run({});
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{1}, {196}, {131, 261}, {98, 196, 294}, {5, 6, 8, 390}})
    EXPECT_TRUE(run(cuts) == whole) << "first cut " << cuts.front();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RowSplit,
                         ::testing::Values(std::pair{1, 1}, std::pair{128, 128}, std::pair{128, 8},
                                           std::pair{1000, 100}, std::pair{640, 1}, std::pair{2048, 128}),
                         [](const auto& info) { return fmt::format("K{}W{}", info.param.first, info.param.second); });

}  // namespace
}  // namespace shardq
