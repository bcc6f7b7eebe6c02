// set_reproducible: what comes out for a matrix or a row has the same bits whatever else is in the call, so that any
// number of ranks may divide the work.
#include <algorithm>
#include <array>

#include "equivalence/equivalence.hpp"

namespace shardq::equivalence {
namespace {

class Reproducible : public Equivalence {
 protected:
  void SetUp() override {
    Equivalence::SetUp();
    if (!IsSkipped()) gpu().set_reproducible(true);
  }
  void TearDown() override {
    if (!IsSkipped()) gpu().set_reproducible(false);
  }
  std::vector<float> lower(std::vector<float> h, int64_t n) {
    for (int64_t i = 0; i < static_cast<int64_t>(h.size()); ++i)
      if (i % n > i / n % n) h[i] = 0.0f;
    return h;
  }
};

std::vector<float> slice(const std::vector<float>& values, int64_t begin, int64_t end) {
  return {values.begin() + begin, values.begin() + end};
}

TEST_F(Reproducible, BlockUpdatesOfSomeRowsAndMatrices) {
  for (int64_t k : {128, 1024, 2176, 9216}) {
    SCOPED_TRACE(k);
    const int64_t count = k > 4000 ? 1 : 5, rows = 300, width = 128;
    const Tensor d = to_tensor(gpu(), DType::f32, {count, rows, k}, normal(count * rows * k)),
                 t = to_tensor(gpu(), DType::f32, {count, width, k}, normal(count * width * k));
    const auto p = normal(count * rows * width);
    const auto update = [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
      const Tensor target = to_tensor(gpu(), DType::f32, {count, rows, width}, p);
      const StackView all = target.stack().range(first, last);
      gpu().block_update(d.stack().range(first, last).row_range(begin, end), t.stack().range(first, last),
                         all.row_range(begin, end));
      return values_of(gpu(), target);
    };
    const auto whole = update(0, count, 0, rows);
    EXPECT_FALSE(same(whole, p)) << "nothing was updated";
    for (const auto& [first, last, begin, end] : {std::array<int64_t, 4>{0, 1, 0, rows},
                                                  {count - 1, count, 0, 150},
                                                  {0, count, 150, 300},
                                                  {0, count, 296, 300},
                                                  {count / 2, count, 37, 38}}) {
      const auto part = update(first, last, begin, end);
      for (int64_t e = first; e < last; ++e)
        for (int64_t r = begin; r < end; ++r) {
          const int64_t at = (e * rows + r) * width;
          ASSERT_TRUE(same(slice(part, at, at + width), slice(whole, at, at + width)))
              << "matrices " << first << " to " << last << ", row " << r << " of " << begin << " to " << end;
        }
    }
  }
}

TEST_F(Reproducible, FactorsOfSomeMatrices) {
  for (int64_t n : {64, 132, 520, 640}) {
    SCOPED_TRACE(n);
    const int64_t count = 26, rank = n + 40;
    const Tensor x = to_tensor(gpu(), DType::bf16, {rank, n}, normal(rank * n, DType::bf16));
    const Tensor h(gpu(), DType::f32, {count, n, n}, "test");
    gpu().zero(h.data(), h.bytes());
    for (int64_t e = 0; e < count; ++e)
      gpu().accumulate_gram(x.matrix().row_range(0, rank - e), h.stack().range(e, e + 1),
                            std::vector<int64_t>{0, rank - e});
    const auto factors = [&](const std::vector<int64_t>& which) {
      const Tensor factor = poisoned(gpu(), DType::f32, {count, n, n}),
                   pivots = poisoned(gpu(), DType::f32, {count, n});
      std::vector<float> damping(which.size(), 0.5f);
      std::vector<int> status(which.size(), -1);
      gpu().factorize(h.stack(), nullptr, which, damping, factor.stack(), pivots.as<float>(), status);
      EXPECT_TRUE(std::ranges::all_of(status, [](int s) { return s == 0; }));
      return values_of(gpu(), factor);
    };
    std::vector<int64_t> all;
    for (int64_t e = 0; e < count; ++e) all.push_back(e);
    const auto whole = factors(all);
    for (const std::vector<int64_t>& which :
         {std::vector<int64_t>{25}, {3, 9, 17}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}) {
      const auto part = factors(which);
      for (int64_t e : which)
        ASSERT_TRUE(same(slice(part, e * n * n, (e + 1) * n * n), slice(whole, e * n * n, (e + 1) * n * n)))
            << "matrix " << e << " among " << which.size();
    }
  }
}

TEST_F(Reproducible, GramSumsAndProductsOfSomeExperts) {
  const int64_t n = 256, rows = 40000;
  const std::vector<int64_t> offsets{0, 100, 19000, 19000, 19100, rows};
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  const Tensor x = to_tensor(gpu(), DType::bf16, {rows, n}, normal(rows * n, DType::bf16)),
               w = to_tensor(gpu(), DType::bf16, {count, n, n}, normal(count * n * n, DType::bf16, 0.1f));
  const auto run = [&](int64_t first, int64_t last) {
    const Tensor h(gpu(), DType::f32, {count, n, n}, "test"), y(gpu(), DType::bf16, {rows, n}, "test");
    gpu().zero(h.data(), h.bytes());
    gpu().zero(y.data(), y.bytes());
    std::vector<int64_t> part(offsets.begin() + first, offsets.begin() + last + 1);
    const int64_t begin = part.front(), end = part.back();
    for (int64_t& o : part) o -= begin;
    gpu().accumulate_gram(x.matrix().row_range(begin, end), h.stack().range(first, last), part);
    gpu().linear_stack(x.matrix().row_range(begin, end), w.stack().range(first, last), part,
                       y.matrix().row_range(begin, end));
    return std::pair{lower(values_of(gpu(), h), n), values_of(gpu(), y)};
  };
  const auto whole = run(0, count);
  for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, 2}, {1, 2}, {3, 5}, {4, 5}}) {
    const auto part = run(first, last);
    const int64_t h0 = first * n * n, h1 = last * n * n, y0 = offsets[first] * n, y1 = offsets[last] * n;
    EXPECT_TRUE(same(slice(part.first, h0, h1), slice(whole.first, h0, h1))) << "sums of experts from " << first;
    EXPECT_TRUE(same(slice(part.second, y0, y1), slice(whole.second, y0, y1))) << "products of experts from " << first;
  }
}

}  // namespace
}  // namespace shardq::equivalence
