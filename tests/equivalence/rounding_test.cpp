// Scales, rounding and dequantization: equal bits on both backends.
#include "equivalence/equivalence.hpp"
#include "kernels/cuda/quotient.hpp"

namespace shardq::equivalence {
namespace {

using RoundingEquivalence = Equivalence;

struct WeightCase {
  int64_t count, rows, cols, group;
  DType dtype, scale_dtype;
  int bits;
  bool symmetric;
};

std::string describe(const WeightCase& c) {
  return fmt::format("[{}, {}, {}] {} by {}, {} bits, {} scales, {}", c.count, c.rows, c.cols,
                     safetensors_name(c.dtype), c.group, c.bits, safetensors_name(c.scale_dtype),
                     c.symmetric ? "symmetric" : "asymmetric");
}

std::vector<WeightCase> weight_cases() {
  std::vector<WeightCase> cases;
  const int64_t shapes[][4] = {{1, 1, 1, 1},       {2, 5, 32, 16},   {1, 130, 96, 32}, {3, 7, 256, 128},
                               {1, 129, 300, 300}, {1, 3, 514, 257}, {0, 4, 32, 32},   {2, 0, 32, 32},
                               {1, 33, 400, 400},  {1, 128, 80, 5}};
  const DType dtypes[] = {DType::bf16, DType::f16, DType::f32};
  int turn = 0;
  for (const auto& s : shapes)
    for (int bits : {2, 3, 4, 8})
      for (bool symmetric : {true, false}) {
        cases.push_back({s[0], s[1], s[2], s[3], dtypes[turn % 3], dtypes[turn / 3 % 3], bits, symmetric});
        ++turn;
      }
  return cases;
}

Grid grid_of(const WeightCase& c) {
  return {.bits = c.bits, .symmetric = c.symmetric, .scale_dtype = c.scale_dtype};
}

/// Rows of several magnitudes, a row of zeros, one-sided rows and constant groups.
std::vector<float> awkward_weights(const WeightCase& c, std::vector<float> values) {
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    const int64_t row = i / c.cols % c.rows;
    float& v = values[i];
    if (row % 7 == 1) v *= 1e-6f;
    if (row % 7 == 2) v = 0.0f;
    if (row % 7 == 3) v = std::abs(v);
    if (row % 7 == 4) v *= 300.0f;
    if (row % 7 == 5) v = -0.75f;
    v = round_to(c.dtype, v);
  }
  return values;
}

struct Scales {
  std::vector<float> scales;
  std::vector<int8_t> zeros;
};

Scales find(Backend& backend, const WeightCase& c, const std::vector<float>& w, const std::vector<float>* importance,
            int steps, float norm) {
  const int64_t groups = c.cols / c.group;
  const Tensor wt = to_tensor(backend, c.dtype, {c.count, c.rows, c.cols}, w),
               st = poisoned(backend, DType::f32, {c.count, c.rows, groups}),
               zt = poisoned(backend, DType::i8, {c.count, c.rows, groups});
  Tensor it;
  if (importance) it = to_tensor(backend, DType::f32, {c.count, c.cols}, *importance);
  backend.find_scales(wt.stack(), importance ? it.as<float>() : nullptr, steps, norm, grid_of(c), c.group,
                      st.as<float>(), c.symmetric ? nullptr : zt.as<int8_t>());
  return {raw_of<float>(backend, st), raw_of<int8_t>(backend, zt)};
}

TEST_F(RoundingEquivalence, RangesAndSearchFindTheSameScales) {
  for (const WeightCase& c : weight_cases()) {
    SCOPED_TRACE(describe(c));
    const auto w = awkward_weights(c, normal(c.count * c.rows * c.cols));
    std::vector<float> importance = normal(c.count * c.cols);
    for (float& v : importance) v = v * v;
    for (int steps : {0, 1, 20})
      for (bool weighted : {false, true}) {
        const auto* used = weighted ? &importance : nullptr;
        const Scales want = find(cpu(), c, w, used, steps, 2.0f), got = find(gpu(), c, w, used, steps, 2.0f);
        ASSERT_TRUE(same(got.scales, want.scales)) << steps << " steps, weighted " << weighted;
        ASSERT_TRUE(same(got.zeros, want.zeros)) << steps << " steps, weighted " << weighted;
      }
  }
}

TEST_F(RoundingEquivalence, SearchWithAnotherNormAgreesButForTies) {
  // powf differs in its last bit between libraries: two candidates that are equal to within that may change places.
  const WeightCase c{2, 200, 256, 128, DType::bf16, DType::bf16, 4, true};
  const auto w = normal(c.count * c.rows * c.cols, DType::bf16);
  const Scales want = find(cpu(), c, w, nullptr, 20, 2.4f), got = find(gpu(), c, w, nullptr, 20, 2.4f);
  int64_t differ = 0;
  for (size_t i = 0; i < want.scales.size(); ++i) differ += got.scales[i] != want.scales[i];
  EXPECT_LE(differ, static_cast<int64_t>(want.scales.size()) / 100);
}

TEST_F(RoundingEquivalence, RoundToNearestAndItsResidual) {
  for (const WeightCase& c : weight_cases()) {
    SCOPED_TRACE(describe(c));
    const auto w = awkward_weights(c, normal(c.count * c.rows * c.cols));
    const Scales scales = find(cpu(), c, w, nullptr, 0, 2.0f);
    std::vector<int32_t> order;
    for (int64_t e = 0; e < c.count; ++e)
      for (int32_t i : permutation(c.cols)) order.push_back(i);
    for (int variant = 0; variant < 3; ++variant) {  // no residual; residual; residual in another order
      const auto run = [&](Backend& backend) {
        const int64_t groups = c.cols / c.group;
        const Tensor wt = to_tensor(backend, c.dtype, {c.count, c.rows, c.cols}, w),
                     st = to_tensor(backend, DType::f32, {c.count, c.rows, groups}, scales.scales),
                     zt = to_tensor_raw(backend, DType::i8, {c.count, c.rows, groups}, scales.zeros),
                     ot = to_tensor_raw(backend, DType::i32, {c.count, c.cols}, order),
                     ct = poisoned(backend, DType::i8, {c.count, c.rows, c.cols}),
                     rt = poisoned(backend, DType::f32, {c.count, c.rows, c.cols});
        backend.round_to_nearest(wt.stack(), variant == 2 ? ot.as<int32_t>() : nullptr, st.as<float>(),
                                 c.symmetric ? nullptr : zt.as<int8_t>(), c.group, grid_of(c), ct.as<int8_t>(),
                                 variant == 0 ? StackView{} : rt.stack());
        return std::pair(raw_of<int8_t>(backend, ct), raw_of<float>(backend, rt));
      };
      const auto want = run(cpu()), got = run(gpu());
      ASSERT_TRUE(same(got.first, want.first)) << "codes, variant " << variant;
      ASSERT_TRUE(same(got.second, want.second)) << "residual, variant " << variant;
    }
  }
}

TEST_F(RoundingEquivalence, Dequantize) {
  for (const WeightCase& c : weight_cases()) {
    SCOPED_TRACE(describe(c));
    const auto w = awkward_weights(c, normal(c.count * c.rows * c.cols));
    const Scales scales = find(cpu(), c, w, nullptr, 0, 2.0f);
    std::vector<int8_t> codes(c.count * c.rows * c.cols);
    const Grid grid = grid_of(c);
    std::uniform_int_distribution<int> code(grid.qmin(), grid.qmax());
    for (int8_t& v : codes) v = static_cast<int8_t>(code(random));
    // Into rows with a gap, which must keep their poison.
    for (int64_t gap : {0, 8, 3}) {
      const auto run = [&](Backend& backend) {
        const int64_t groups = c.cols / c.group;
        const Tensor st = to_tensor(backend, DType::f32, {c.count, c.rows, groups}, scales.scales),
                     zt = to_tensor_raw(backend, DType::i8, {c.count, c.rows, groups}, scales.zeros),
                     ct = to_tensor_raw(backend, DType::i8, {c.count, c.rows, c.cols}, codes),
                     wt = poisoned(backend, c.dtype, {c.count, c.rows, c.cols + gap});
        backend.dequantize(ct.as<int8_t>(), st.as<float>(), c.symmetric ? nullptr : zt.as<int8_t>(), c.group, grid,
                           wt.stack().col_range(0, c.cols));
        return raw_of<uint8_t>(backend, wt);
      };
      ASSERT_TRUE(same(run(gpu()), run(cpu()))) << "gap " << gap;
    }
  }
}

TEST_F(RoundingEquivalence, LoadColumns) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const auto& [count, rows, cols, begin, width] : std::vector<std::array<int64_t, 5>>{
             {1, 1, 1, 0, 1}, {2, 9, 70, 3, 65}, {1, 40, 256, 128, 128}, {3, 0, 8, 0, 8}, {2, 5, 6, 6, 0}}) {
      const auto w = normal(count * rows * cols, dtype);
      const auto run = [&](Backend& backend) {
        const Tensor wt = to_tensor(backend, dtype, {count, rows, cols}, w),
                     tt = poisoned(backend, DType::f32, {count, rows, width + 2});
        backend.load_columns(wt.stack(), begin, tt.stack().col_range(1, 1 + width));
        return raw_of<float>(backend, tt);
      };
      EXPECT_TRUE(same(run(gpu()), run(cpu())));
    }
}

TEST_F(RoundingEquivalence, PermuteColumnsThereAndBack) {
  // Rows that fill shared memory many times over, rows of odd bytes, and (70000 floats) rows that do not fit it at all.
  for (const auto& [count, rows, cols] : std::vector<std::array<int64_t, 3>>{
           {1, 1, 1}, {2, 37, 70}, {1, 130, 256}, {3, 0, 8}, {2, 5, 2049}, {1, 70, 1024}, {0, 4, 16}, {1, 2, 70000}})
    for (DType dtype : {DType::i8, DType::bf16, DType::f32})
      for (int64_t gap : {0, 1, 16}) {
        SCOPED_TRACE(fmt::format("[{}, {}, {}] {} with a gap of {}", count, rows, cols, safetensors_name(dtype), gap));
        std::vector<uint8_t> bytes(count * rows * cols * size_of(dtype));
        for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
        std::vector<int32_t> order;
        for (int64_t e = 0; e < count; ++e)
          for (int32_t i : permutation(cols)) order.push_back(i);
        for (bool back : {false, true}) {
          const auto run = [&](Backend& backend) {
            const Tensor source = to_tensor_raw(backend, dtype, {count, rows, cols}, bytes),
                         ot = to_tensor_raw(backend, DType::i32, {count, cols}, order),
                         target = poisoned(backend, dtype, {count, rows, cols + gap});
            backend.permute_columns(source.stack(), ot.as<int32_t>(), back, target.stack().col_range(0, cols));
            return raw_of<uint8_t>(backend, target);
          };
          ASSERT_TRUE(same(run(gpu()), run(cpu()))) << (back ? "back" : "there");
        }
      }
}

// The device's shortened division, on the host: it runs without a GPU.
TEST(ShortDivision, RoundsAsIeeeDivisionForStoredScales) {
  std::mt19937 random(7);
  const auto check = [&](float value, float scale) {
    // The hardware's reciprocal is off by a unit or two in the last place, either way.
    const uint32_t exact = float_bits(1.0f / scale);
    for (int off = -2; off <= 2; ++off) {
      const float inverse = bits_float(exact + off), want = value / scale, got = divide(value, scale, inverse);
      if (std::abs(want) < 1e9f)
        ASSERT_EQ(float_bits(got), float_bits(want)) << value << " / " << scale << " off " << off;
      else
        ASSERT_GE(std::abs(got), 1e8f);
    }
  };
  for (DType dtype : {DType::bf16, DType::f16})
    for (int i = 0; i < 2'000'000; ++i) {
      const uint32_t bits = random();
      float scale = round_to(dtype, bits_float((bits & 0x007fffffu) | ((97 + random() % 60) << 23)));
      if (dtype == DType::f16) scale = round_to_f16(bits_float((bits & 0x007fffffu) | ((113 + random() % 28) << 23)));
      // Around half-way points of codes, and anywhere.
      const float near = scale * (static_cast<float>(random() % 512) * 0.5f - 128.0f);
      if (near != 0.0f) check(bits_float(float_bits(near) + (random() % 5) - 2), scale);
      check(bits_float((random() & 0x807fffffu) | ((float_bits(scale) >> 23 & 0xff) + 120 - 127 + random() % 16) << 23),
            scale);
      if (::testing::Test::HasFatalFailure()) return;
    }
  check(3e38f, 0x1p-60f);
  check(0.0f, 1.0f);
}

TEST(ShortDivision, RoundEvenEqualsRint) {
  for (int i = -1200; i <= 1200; ++i) {
    const float t = static_cast<float>(i) * 0.125f;
    const Rounded rounded = round_even(t);
    EXPECT_EQ(rounded.value, std::rint(t));
    EXPECT_EQ(static_cast<int8_t>(rounded.bits & 0xffu), static_cast<int8_t>(static_cast<int>(std::rint(t))));
  }
}

}  // namespace
}  // namespace shardq::equivalence
