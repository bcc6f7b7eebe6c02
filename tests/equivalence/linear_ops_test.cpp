// Linear layers, Gram sums and block updates against products in double precision.
#include "core/error.hpp"
#include "equivalence/equivalence.hpp"

namespace shardq::equivalence {
namespace {

using LinearEquivalence = Equivalence;

double unit(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
}

/// Product of rows of a [m, k] with rows of b [n, k], and the same of absolute values, in double.
struct Product {
  std::vector<double> value, magnitude;  // [m, n]
};
Product product(const std::vector<float>& a, const std::vector<float>& b, int64_t m, int64_t n, int64_t k) {
  Product p{std::vector<double>(m * n), std::vector<double>(m * n)};
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l) {
        const double term = static_cast<double>(a[i * k + l]) * b[j * k + l];
        p.value[i * n + j] += term;
        p.magnitude[i * n + j] += std::abs(term);
      }
  return p;
}

/// Each of k additions may lose a unit of the running sum (tensor cores cut, they do not round); the result is rounded
/// to its dtype, twice where a sum passes through memory.
Tolerance product_bound(const Product& p, int64_t k, DType out) {
  return [&p, k, out](int64_t i) {
    return (k + 4) * 0x1p-23 * p.magnitude[i] + 2 * unit(out) * (std::abs(p.value[i]) + p.magnitude[i] * k * 0x1p-23) +
           1e-30;
  };
}

struct LinearCase {
  int64_t tokens, out, in;
  DType dtype, y_dtype;
  bool bias, accumulate;
};

TEST_F(LinearEquivalence, LinearMatchesDoublePrecision) {
  std::vector<LinearCase> cases;
  const int64_t shapes[][3] = {{0, 3, 5},      {1, 1, 1},  {7, 13, 17},  {64, 96, 128},
                               {129, 65, 250}, {33, 1, 7}, {2, 300, 64}, {300, 2, 33}};
  for (const auto& s : shapes)
    for (DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (bool wide : {false, true})
        for (bool bias : {false, true})
          for (bool accumulate : {false, true})
            cases.push_back({s[0], s[1], s[2], dtype, wide ? DType::f32 : dtype, bias, accumulate});
  for (const LinearCase& c : cases) {
    SCOPED_TRACE(fmt::format("[{}, {}] x [{}, {}]^T {} -> {}{}{}", c.tokens, c.in, c.out, c.in,
                             safetensors_name(c.dtype), safetensors_name(c.y_dtype), c.bias ? " + bias" : "",
                             c.accumulate ? " +=" : ""));
    const auto x = normal(c.tokens * c.in, c.dtype), w = normal(c.out * c.in, c.dtype), bias = normal(c.out, c.dtype),
               y = normal(c.tokens * c.out, c.y_dtype);
    Product want = product(x, w, c.tokens, c.out, c.in);
    for (int64_t i = 0; i < c.tokens * c.out; ++i) {
      const double added = (c.bias ? bias[i % c.out] : 0.0) + (c.accumulate ? y[i] : 0.0);
      want.value[i] += added;
      want.magnitude[i] += (c.bias ? std::abs(bias[i % c.out]) : 0.0) + (c.accumulate ? std::abs(y[i]) : 0.0);
    }
    // y + bias, or the product before y is added to it (cuBLAS, for some small shapes), may be rounded to y's dtype.
    const double between = c.bias || c.accumulate ? 2 * unit(c.y_dtype) : 0.0;
    for (Backend* backend : {&cpu(), &gpu()}) {
      const Tensor xt = to_tensor(*backend, c.dtype, {c.tokens, c.in}, x),
                   wt = to_tensor(*backend, c.dtype, {c.out, c.in}, w),
                   bt = to_tensor(*backend, c.dtype, {c.out}, bias);
      const Tensor yt = c.accumulate ? to_tensor(*backend, c.y_dtype, {c.tokens, c.out}, y)
                                     : poisoned(*backend, c.y_dtype, {c.tokens, c.out});
      backend->linear(xt.matrix(), wt.matrix(), c.bias ? bt.data() : nullptr, yt.matrix(), c.accumulate);
      const Tolerance bound = product_bound(want, c.in, c.y_dtype);
      EXPECT_TRUE(close(values_of(*backend, yt), want.value, [&](int64_t i) {
        return bound(i) + between * want.magnitude[i];
      })) << backend->name();
    }
  }
}

TEST_F(LinearEquivalence, LinearOfViewsWithGaps) {
  const int64_t tokens = 37, in = 40, out = 24;
  const auto x = normal(tokens * 64, DType::bf16), w = normal(out * 48, DType::bf16);
  std::vector<float> x_used, w_used;
  for (int64_t t = 0; t < tokens; ++t) x_used.insert(x_used.end(), x.begin() + t * 64 + 8, x.begin() + t * 64 + 8 + in);
  for (int64_t o = 0; o < out; ++o) w_used.insert(w_used.end(), w.begin() + o * 48, w.begin() + o * 48 + in);
  const Product want = product(x_used, w_used, tokens, out, in);
  for (Backend* backend : {&cpu(), &gpu()}) {
    const Tensor xt = to_tensor(*backend, DType::bf16, {tokens, 64}, x),
                 wt = to_tensor(*backend, DType::bf16, {out, 48}, w), yt = poisoned(*backend, DType::f32, {tokens, 30});
    backend->linear(xt.matrix().col_range(8, 8 + in), wt.matrix().col_range(0, in), nullptr,
                    yt.matrix().col_range(3, 3 + out), false);
    const auto got = values_of(*backend, yt);
    std::vector<float> inside;
    for (int64_t i = 0; i < tokens * 30; ++i)
      if (i % 30 >= 3 && i % 30 < 3 + out)
        inside.push_back(got[i]);
      else
        EXPECT_TRUE(std::isnan(got[i])) << "outside the view at " << i;
    EXPECT_TRUE(close(inside, want.value, product_bound(want, in, DType::f32))) << backend->name();
  }
}

TEST_F(LinearEquivalence, LinearRefusesShapesThatDoNotFit) {
  for (Backend* backend : {&cpu(), &gpu()}) {
    const Tensor x(*backend, DType::f32, {4, 5}, "test"), w(*backend, DType::f32, {3, 6}, "test"),
        y(*backend, DType::f32, {4, 3}, "test");
    EXPECT_THROW(backend->linear(x.matrix(), w.matrix(), nullptr, y.matrix(), false), Error);
  }
}

void check_stack(Equivalence&, Backend& backend, const std::vector<int64_t>& offsets, const std::vector<float>& x,
                 const std::vector<float>& w, int64_t out, int64_t in, DType dtype) {
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1,
                rows = in == 0 ? 0 : static_cast<int64_t>(x.size()) / in;
  const Tensor xt = to_tensor(backend, dtype, {rows, in}, x), wt = to_tensor(backend, dtype, {count, out, in}, w),
               yt = poisoned(backend, dtype, {rows, out});
  backend.linear_stack(xt.matrix(), wt.stack(), offsets, yt.matrix());
  const auto got = values_of(backend, yt);
  for (int64_t e = 0; e < count; ++e) {
    const int64_t begin = offsets[e], end = offsets[e + 1];
    const std::vector<float> xe(x.begin() + begin * in, x.begin() + end * in),
        we(w.begin() + e * out * in, w.begin() + (e + 1) * out * in);
    const Product want = product(xe, we, end - begin, out, in);
    EXPECT_TRUE(close(std::vector<float>(got.begin() + begin * out, got.begin() + end * out), want.value,
                      product_bound(want, in, dtype)))
        << backend.name() << " expert " << e;
  }
  for (int64_t i = 0; i < rows * out; ++i)
    if (i < offsets.front() * out || i >= offsets.back() * out) {
      EXPECT_TRUE(std::isnan(got[i])) << "row outside all experts";
    }
}

TEST_F(LinearEquivalence, LinearStackMatchesDoublePrecision) {
  const std::vector<std::vector<int64_t>> cases = {
      {0, 0, 1, 8, 8, 138}, {0, 16, 32, 48}, {0, 0, 0}, {3, 5, 9}, {0, 31}, {2, 2}};
  const int64_t shapes[][2] = {{13, 17}, {64, 32}, {1, 5}};
  for (const auto& offsets : cases)
    for (const auto& s : shapes)
      for (DType dtype : {DType::bf16, DType::f32}) {
        SCOPED_TRACE(fmt::format("{} experts, {} rows, [{}, {}]", offsets.size() - 1, offsets.back(), s[0], s[1]));
        const int64_t count = static_cast<int64_t>(offsets.size()) - 1, rows = offsets.back() + 2;
        const auto x = normal(rows * s[1], dtype), w = normal(count * s[0] * s[1], dtype);
        for (Backend* backend : {&cpu(), &gpu()}) check_stack(*this, *backend, offsets, x, w, s[0], s[1], dtype);
      }
}

TEST_F(LinearEquivalence, BlockUpdateMatchesDoublePrecision) {
  struct Case {
    int64_t count, rows, width, k, gap;
  };
  const Case cases[] = {{1, 1, 1, 1, 5},        {3, 33, 17, 40, 5},    {2, 64, 128, 128, 8}, {2, 5, 7, 0, 4},
                        {0, 5, 7, 3, 4},        {1, 130, 1, 31, 5},    {3, 33, 17, 40, 8},   {1, 300, 128, 1000, 12},
                        {2, 128, 128, 256, 4},  {1, 200, 100, 640, 8}, {1, 40, 8, 36, 4},    {3, 130, 130, 96, 4},
                        {1, 257, 127, 2048, 8}, {2, 9, 33, 544, 20}};
  for (const auto& [count, rows, width, k, gap] : cases) {
    SCOPED_TRACE(fmt::format("{} x [{}, {}] by {}, gap {}", count, rows, k, width, gap));
    // Views into wider arrays, as the solver makes them.
    const int64_t cols = k + gap;
    const auto d = normal(count * rows * cols), t = normal(count * (width + 2) * cols),
               p = normal(count * rows * width);
    for (Backend* backend : {&cpu(), &gpu()}) {
      const Tensor dt = to_tensor(*backend, DType::f32, {count, rows, cols}, d),
                   tt = to_tensor(*backend, DType::f32, {count, width + 2, cols}, t),
                   pt = to_tensor(*backend, DType::f32, {count, rows, width}, p);
      backend->block_update(dt.stack().col_range(0, k), tt.stack().row_range(1, 1 + width).col_range(0, k), pt.stack());
      const auto got = values_of(*backend, pt);
      for (int64_t e = 0; e < count; ++e)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t j = 0; j < width; ++j) {
            double want = p[(e * rows + r) * width + j], magnitude = std::abs(want);
            for (int64_t l = 0; l < k; ++l) {
              const double term =
                  static_cast<double>(d[(e * rows + r) * cols + l]) * t[(e * (width + 2) + 1 + j) * cols + l];
              want += term;
              magnitude += std::abs(term);
            }
            // Products to 2^-21, and a chain of additions that may each lose a unit.
            ASSERT_NEAR(got[(e * rows + r) * width + j], want, (k + 8) * kEps32 * magnitude) << backend->name();
          }
    }
  }
}

/// Lower triangles of sums + x^T x by expert, and of absolute values.
struct Gram {
  std::vector<double> value, magnitude;  // [count, n, n]
};
Gram gram(const std::vector<float>& x, const std::vector<float>& sums, const std::vector<int64_t>& offsets, int64_t n) {
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  Gram g{std::vector<double>(count * n * n), std::vector<double>(count * n * n)};
  for (int64_t e = 0; e < count; ++e)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t at = (e * n + i) * n + j;
        g.value[at] = sums[at];
        g.magnitude[at] = std::abs(sums[at]);
        for (int64_t t = offsets[e]; t < offsets[e + 1]; ++t) {
          const double term = static_cast<double>(x[t * n + i]) * x[t * n + j];
          g.value[at] += term;
          g.magnitude[at] += std::abs(term);
        }
      }
  return g;
}

TEST_F(LinearEquivalence, GramSumsMatchDoublePrecision) {
  struct Case {
    int64_t n;
    std::vector<int64_t> offsets;
  };
  const std::vector<Case> cases = {{1, {0, 1}},
                                   {7, {0, 13}},
                                   {64, {0, 128}},
                                   {130, {0, 0, 1, 60, 127}},
                                   {96, {3, 3, 3}},
                                   {72, {5, 70, 70, 200}},
                                   {8, {0, 9001}},
                                   {600, {0, 65}},
                                   {520, {0, 17, 33}},
                                   {264, {0, 40, 80, 99}},
                                   {16, {0, 4096, 4097, 12500}},
                                   {1, {0, 0}},
                                   {776, {0, 100, 100, 700, 963}}};
  for (const Case& c : cases)
    for (DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      SCOPED_TRACE(fmt::format("n = {}, {} experts, rows to {}, {}", c.n, c.offsets.size() - 1, c.offsets.back(),
                               safetensors_name(dtype)));
      const int64_t count = static_cast<int64_t>(c.offsets.size()) - 1, rows = c.offsets.back() + 3;
      const auto x = normal(rows * c.n, dtype), sums = normal(count * c.n * c.n);
      const Gram want = gram(x, sums, c.offsets, c.n);
      int64_t longest = 0;
      for (int64_t e = 0; e < count; ++e) longest = std::max(longest, c.offsets[e + 1] - c.offsets[e]);
      for (Backend* backend : {&cpu(), &gpu()}) {
        const Tensor xt = to_tensor(*backend, dtype, {rows, c.n}, x),
                     ht = to_tensor(*backend, DType::f32, {count, c.n, c.n}, sums);
        backend->accumulate_gram(xt.matrix(), ht.stack(), c.offsets);
        const auto got = values_of(*backend, ht);
        for (int64_t at = 0; at < count * c.n * c.n; ++at) {
          if (at % c.n > at / c.n % c.n) continue;
          ASSERT_NEAR(got[at], want.value[at], (longest + 4) * 0x1p-23 * want.magnitude[at])
              << backend->name() << " at " << at;
        }
      }
    }
}

TEST_F(LinearEquivalence, GramSumsAreTheSameBitsEveryTime) {
  // Long enough for several partial sums into each place, which must not depend on which of them is ready first.
  const int64_t n = 512, rows = 30000;
  const std::vector<int64_t> offsets{0, 100, 25000, rows};
  const Tensor x = to_tensor(gpu(), DType::bf16, {rows, n}, normal(rows * n, DType::bf16));
  std::vector<float> first;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const Tensor h(gpu(), DType::f32, {3, n, n}, "test");
    gpu().zero(h.data(), h.bytes());
    gpu().accumulate_gram(x.matrix(), h.stack(), offsets);
    auto got = values_of(gpu(), h);
    for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i)
      if (i % n > i / n % n) got[i] = 0.0f;
    if (repeat == 0)
      first = got;
    else
      ASSERT_TRUE(same(got, first)) << "repeat " << repeat;
  }
}

TEST_F(LinearEquivalence, GramOfAViewWithGapsAddsTwice) {
  // Columns 16.. of wider rows, added in two calls.
  const int64_t n = 48, rows = 100, wide = 80;
  const auto x = normal(rows * wide, DType::bf16);
  std::vector<float> used;
  for (int64_t t = 0; t < rows; ++t) used.insert(used.end(), x.begin() + t * wide + 16, x.begin() + t * wide + 16 + n);
  const Gram want = gram(used, std::vector<float>(n * n, 0.0f), {0, rows}, n);
  for (Backend* backend : {&cpu(), &gpu()}) {
    const Tensor xt = to_tensor(*backend, DType::bf16, {rows, wide}, x);
    const Tensor ht(*backend, DType::f32, {n, n}, "test");
    backend->zero(ht.data(), ht.bytes());
    const MatrixView view = xt.matrix().col_range(16, 16 + n);
    for (const std::vector<int64_t>& part : {std::vector<int64_t>{0, 33}, std::vector<int64_t>{33, rows}})
      backend->accumulate_gram(view, ht.stack(), part);
    const auto got = values_of(*backend, ht);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j)
        ASSERT_NEAR(got[i * n + j], want.value[i * n + j], (rows + 4) * 0x1p-23 * want.magnitude[i * n + j]);
  }
}

}  // namespace
}  // namespace shardq::equivalence
