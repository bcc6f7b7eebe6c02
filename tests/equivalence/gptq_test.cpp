// The column loop: on equal inputs codes and residuals are equal bit for bit.
#include "equivalence/equivalence.hpp"

namespace shardq::equivalence {
namespace {

using GptqEquivalence = Equivalence;

struct LoopCase {
  int64_t count, rows, cols, begin, width, group;
  bool ordered;
  DType dtype, scale_dtype;
  int bits;
  bool symmetric;
};

std::string describe(const LoopCase& c) {
  return fmt::format("[{}, {}, {}] {}, columns {} + {}, groups of {}{}, {} bits, {} scales, {}", c.count, c.rows,
                     c.cols, safetensors_name(c.dtype), c.begin, c.width, c.group, c.ordered ? ", ordered" : "", c.bits,
                     safetensors_name(c.scale_dtype), c.symmetric ? "symmetric" : "asymmetric");
}

struct LoopInput {
  std::vector<float> weight, shifted, factor, pivots, scales, losses;
  std::vector<int8_t> zeros;
  std::vector<int32_t> order;
};

struct LoopOutput {
  std::vector<int8_t> codes;
  std::vector<float> residual, losses;
};

LoopOutput run(Backend& backend, const LoopCase& c, const LoopInput& in) {
  const int64_t groups = (c.cols + c.group - 1) / c.group;
  const Tensor weight = to_tensor(backend, c.dtype, {c.count, c.rows, c.cols}, in.weight),
               shifted = to_tensor(backend, DType::f32, {c.count, c.rows, c.width}, in.shifted),
               factor = to_tensor(backend, DType::f32, {c.count, c.cols, c.cols}, in.factor),
               pivots = to_tensor(backend, DType::f32, {c.count, c.cols}, in.pivots),
               scales = to_tensor(backend, DType::f32, {c.count, c.rows, groups}, in.scales),
               zeros = to_tensor_raw(backend, DType::i8, {c.count, c.rows, groups}, in.zeros),
               order = to_tensor_raw(backend, DType::i32, {c.count, c.cols}, in.order),
               codes = poisoned(backend, DType::i8, {c.count, c.rows, c.cols}),
               residual = poisoned(backend, DType::f32, {c.count, c.rows, c.cols}),
               losses = to_tensor(backend, DType::f32, {c.count, c.rows}, in.losses);
  backend.gptq_block({.shifted = shifted.stack(),
                      .weight = weight.stack(),
                      .order = c.ordered ? order.as<int32_t>() : nullptr,
                      .factor = factor.stack(),
                      .pivots = pivots.as<float>(),
                      .begin = c.begin,
                      .scales = scales.as<float>(),
                      .zeros = c.symmetric ? nullptr : zeros.as<int8_t>(),
                      .group_size = c.group,
                      .groups = groups,
                      .grid = {.bits = c.bits, .symmetric = c.symmetric, .scale_dtype = c.scale_dtype},
                      .codes = codes.as<int8_t>(),
                      .residual = residual.stack(),
                      .losses = losses.as<float>()});
  return {raw_of<int8_t>(backend, codes), raw_of<float>(backend, residual), raw_of<float>(backend, losses)};
}

class GptqLoop : public GptqEquivalence {
 protected:
  LoopInput make_input(const LoopCase& c) {
    const int64_t groups = (c.cols + c.group - 1) / c.group;
    LoopInput in;
    in.weight = normal(c.count * c.rows * c.cols, c.dtype);
    in.shifted = normal(c.count * c.rows * c.width);
    in.factor = normal(c.count * c.cols * c.cols, DType::f32, 0.15f);
    for (int64_t i = 0; i < static_cast<int64_t>(in.factor.size()); ++i)
      if (i % c.cols >= i / c.cols % c.cols) in.factor[i] = 0.0f;
    in.pivots = normal(c.count * c.cols);
    for (float& v : in.pivots) v = 0.1f + std::abs(v);
    in.scales = normal(c.count * c.rows * groups);
    const float range = static_cast<float>(1 << (c.bits - 1));
    for (int64_t i = 0; i < static_cast<int64_t>(in.scales.size()); ++i) {
      float& v = in.scales[i];
      v = round_to(c.scale_dtype, (0.5f + std::abs(v)) * 2.0f / range);
      if (i % 37 == 5) v = smallest_normal(c.scale_dtype);  // what a group of zeros gets
    }
    std::uniform_int_distribution<int> zero(-(1 << (c.bits - 1)), (1 << (c.bits - 1)) - 1);
    in.zeros.resize(c.count * c.rows * groups);
    for (int8_t& v : in.zeros) v = static_cast<int8_t>(zero(random));
    for (int64_t e = 0; e < c.count; ++e)
      for (int32_t i : permutation(c.cols)) in.order.push_back(i);
    in.losses = normal(c.count * c.rows);
    return in;
  }

  void expect_equal(const LoopCase& c, const LoopInput& in) {
    const LoopOutput want = run(cpu(), c, in), got = run(gpu(), c, in);
    ASSERT_TRUE(same(got.codes, want.codes)) << "codes";
    ASSERT_TRUE(same(got.residual, want.residual)) << "residual";
    // A sum of c.width terms of one sign, each to within some units, in whatever order.
    ASSERT_TRUE(close(got.losses, want.losses, [&](int64_t i) {
      return (c.width + 8) * kEps32 * (std::abs(want.losses[i]) + 2 * std::abs(in.losses[i]));
    })) << "losses";
  }
};

std::vector<LoopCase> loop_cases() {
  std::vector<LoopCase> cases;
  const DType dtypes[] = {DType::bf16, DType::f16, DType::f32};
  // count, rows, cols, begin, width, group
  const int64_t shapes[][6] = {{1, 1, 1, 0, 1, 1},          {1, 5, 32, 0, 32, 16},      {2, 33, 128, 0, 128, 128},
                               {1, 129, 256, 128, 128, 32}, {3, 7, 200, 100, 100, 200}, {1, 31, 160, 7, 33, 32},
                               {1, 64, 130, 128, 2, 130},   {2, 300, 96, 32, 64, 96},   {1, 40, 300, 50, 250, 50},
                               {0, 4, 8, 0, 8, 8},          {2, 0, 8, 0, 8, 8},         {1, 70, 129, 1, 127, 43},
                               {5, 17, 64, 0, 63, 16}};
  int turn = 0;
  for (const auto& s : shapes)
    for (bool ordered : {false, true})
      for (bool symmetric : {true, false}) {
        const int bits[] = {4, 8, 3, 2};
        cases.push_back({s[0], s[1], s[2], s[3], s[4], s[5], ordered, dtypes[turn % 3], dtypes[turn / 2 % 3],
                         bits[turn / 3 % 4], symmetric});
        ++turn;
      }
  return cases;
}

TEST_F(GptqLoop, CodesAndResidualsAreEqual) {
  for (const LoopCase& c : loop_cases()) {
    SCOPED_TRACE(describe(c));
    expect_equal(c, make_input(c));
    if (HasFatalFailure()) return;
  }
}

TEST_F(GptqLoop, TiesBetweenCodesFallTheSameWay) {
  // Without a factor p stays what it was: half-way between codes, everywhere.
  for (DType scale_dtype : {DType::bf16, DType::f16, DType::f32})
    for (bool symmetric : {true, false}) {
      const LoopCase c{1, 96, 128, 0, 128, 32, false, DType::f32, scale_dtype, 4, symmetric};
      LoopInput in = make_input(c);
      std::fill(in.factor.begin(), in.factor.end(), 0.0f);
      for (int64_t r = 0; r < c.rows; ++r)
        for (int64_t j = 0; j < c.cols; ++j) {
          const float scale = in.scales[r * 4 + j / c.group], half = static_cast<float>((r + j) % 32) - 15.5f;
          in.shifted[r * c.cols + j] = in.weight[r * c.cols + j] = half * scale;
          // A neighbour of the tie, for every third.
          if (j % 3 == 1) in.shifted[r * c.cols + j] = std::nextafterf(half * scale, j % 2 ? 1e9f : -1e9f);
        }
      expect_equal(c, in);
      if (HasFatalFailure()) return;
    }
}

TEST_F(GptqLoop, ValuesFarOutsideTheGridSaturate) {
  const LoopCase c{1, 64, 64, 0, 64, 32, true, DType::bf16, DType::bf16, 4, true};
  LoopInput in = make_input(c);
  for (float& v : in.shifted) v *= 1e12f;
  expect_equal(c, in);
}

TEST_F(GptqEquivalence, WholeSolveAcrossBlocksStaysClose) {
  // load_columns, block_update and gptq_block chained: sums between blocks differ in order, so single codes may flip,
  // and the losses agree.
  const int64_t rows = 200, cols = 320, group = 64, groups = cols / group;
  const auto w = normal(rows * cols, DType::bf16);
  std::vector<float> x = normal(2 * cols * cols), h(cols * cols, 0.0f);
  for (int64_t t = 0; t < 2 * cols; ++t)
    for (int64_t i = 1; i < cols; ++i) x[t * cols + i] = 0.7f * x[t * cols + i - 1] + 0.7f * x[t * cols + i];
  for (int64_t i = 0; i < cols; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t t = 0; t < 2 * cols; ++t) sum += static_cast<double>(x[t * cols + i]) * x[t * cols + j];
      h[i * cols + j] = static_cast<float>(sum / (2.0 * cols));
    }
  const auto order = permutation(cols);
  const Grid grid{.bits = 4};
  const auto solve = [&](Backend& backend, int64_t block) {
    const Tensor wt = to_tensor(backend, DType::bf16, {rows, cols}, w),
                 ht = to_tensor(backend, DType::f32, {cols, cols}, h),
                 ot = to_tensor_raw(backend, DType::i32, {cols}, order),
                 ft = poisoned(backend, DType::f32, {cols, cols}), pt = poisoned(backend, DType::f32, {cols}),
                 st = poisoned(backend, DType::f32, {rows, groups}), ct = poisoned(backend, DType::i8, {rows, cols}),
                 rt = poisoned(backend, DType::f32, {rows, cols}), bt = poisoned(backend, DType::f32, {rows, block}),
                 lt = poisoned(backend, DType::f32, {rows}), work = poisoned(backend, DType::f32, {rows, cols}),
                 check = poisoned(backend, DType::f32, {rows});
    const Tensor ordered = poisoned(backend, DType::bf16, {rows, cols});
    backend.permute_columns(wt.stack(), ot.as<int32_t>(), false, ordered.stack());
    backend.zero(lt.data(), lt.bytes());
    std::vector<int> status(1);
    const std::vector<int64_t> which{0};
    const std::vector<float> damping{0.01f};
    backend.factorize(ht.stack(), ot.as<int32_t>(), which, damping, ft.stack(), pt.as<float>(), status);
    backend.find_scales(wt.stack(), nullptr, 20, 2.0f, grid, group, st.as<float>(), nullptr);
    for (int64_t begin = 0; begin < cols; begin += block) {
      const int64_t end = std::min(begin + block, cols);
      const StackView target = bt.stack().col_range(0, end - begin);
      backend.load_columns(ordered.stack(), begin, target);
      if (begin > 0)
        backend.block_update(rt.stack().col_range(0, begin), ft.stack().row_range(begin, end).col_range(0, begin),
                             target);
      backend.gptq_block({.shifted = target,
                          .weight = ordered.stack(),
                          .order = ot.as<int32_t>(),
                          .factor = ft.stack(),
                          .pivots = pt.as<float>(),
                          .begin = begin,
                          .scales = st.as<float>(),
                          .group_size = group,
                          .groups = groups,
                          .grid = grid,
                          .codes = ct.as<int8_t>(),
                          .residual = rt.stack(),
                          .losses = lt.as<float>()});
    }
    backend.quadratic_loss(rt.stack(), ft.stack(), pt.as<float>(), work.stack(), check.as<float>());
    const auto losses = raw_of<float>(backend, lt), checked = raw_of<float>(backend, check);
    EXPECT_TRUE(close(checked, losses, [&](int64_t i) { return 1e-3 * losses[i] + 1e-6; }))
        << "the loop's loss is not the residual's quadratic form";
    return std::pair(raw_of<int8_t>(backend, ct), losses);
  };
  const auto want = solve(cpu(), 128);
  for (int64_t block : {int64_t{128}, int64_t{96}, int64_t{320}}) {
    const auto got = solve(gpu(), block);
    int64_t differ = 0;
    double sum = 0, reference = 0;
    for (size_t i = 0; i < got.first.size(); ++i) differ += got.first[i] != want.first[i];
    for (int64_t r = 0; r < rows; ++r) sum += got.second[r], reference += want.second[r];
    EXPECT_LE(differ, rows * cols / 100) << "block " << block;
    EXPECT_NEAR(sum, reference, 0.01 * reference) << "block " << block;
  }
}

TEST_F(GptqEquivalence, QuadraticLossMatchesDoublePrecision) {
  for (const auto& [count, rows, n] :
       std::vector<std::array<int64_t, 3>>{{1, 1, 1}, {2, 5, 70}, {3, 64, 33}, {1, 0, 5}, {1, 3, 300}}) {
    const auto d = normal(count * rows * n);
    auto t = normal(count * n * n, DType::f32, 0.2f), r = normal(count * n);
    for (int64_t i = 0; i < count * n * n; ++i)
      if (i % n >= i / n % n) t[i] = 0.0f;
    for (float& v : r) v = 0.1f + std::abs(v);
    std::vector<double> want, bound;
    for (int64_t e = 0; e < count; ++e)
      for (int64_t row = 0; row < rows; ++row) {
        double loss = 0, slack = 0;
        for (int64_t j = 0; j < n; ++j) {
          double sum = d[(e * rows + row) * n + j], magnitude = std::abs(sum);
          for (int64_t k = 0; k < j; ++k) {
            const double term = static_cast<double>(d[(e * rows + row) * n + k]) * t[(e * n + j) * n + k];
            sum += term;
            magnitude += std::abs(term);
          }
          const double weight = static_cast<double>(r[e * n + j]) * r[e * n + j];
          loss += sum * sum * weight;
          slack += 2 * std::abs(sum) * magnitude * (n + 4) * kEps32 * weight + 4 * kEps32 * sum * sum * weight;
        }
        want.push_back(loss);
        bound.push_back(slack + loss * kEps32);
      }
    for (Backend* backend : {&cpu(), &gpu()}) {
      const Tensor dt = to_tensor(*backend, DType::f32, {count, rows, n}, d),
                   tt = to_tensor(*backend, DType::f32, {count, n, n}, t),
                   rt = to_tensor(*backend, DType::f32, {count, n}, r),
                   work = poisoned(*backend, DType::f32, {count, rows, n}),
                   losses = poisoned(*backend, DType::f32, {count, rows});
      backend->quadratic_loss(dt.stack(), tt.stack(), rt.as<float>(), work.stack(), losses.as<float>());
      EXPECT_TRUE(close(raw_of<float>(*backend, losses), want, [&](int64_t i) { return bound[i]; })) << backend->name();
    }
  }
}

}  // namespace
}  // namespace shardq::equivalence
