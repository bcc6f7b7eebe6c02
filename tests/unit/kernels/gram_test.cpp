// Sums of x x^T and the operations on lower triangles.
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "forward_reference.hpp"

namespace shardq {
namespace {

class Gram : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = make_cpu_backend();

  Tensor triangles(int64_t count, int64_t n, unsigned seed) {
    Tensor h(*backend_, DType::f32, {count, n, n}, "h");
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < h.size(); ++i) h.as<float>()[i] = normal(random);
    for (int64_t e = 0; e < count; ++e)  // above the diagonal nothing may be read
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = i + 1; j < n; ++j) h.as<float>()[(e * n + i) * n + j] = NAN;
    return h;
  }
};

TEST_F(Gram, SumsEveryExpertsRowsOntoWhatIsThere) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (int64_t n : {1, 7, 64})
      for (const std::vector<int64_t>& offsets :
           {std::vector<int64_t>{0, 200}, {0, 0, 3, 3, 200}, {1, 20, 41, 60, 83, 99, 120, 140, 163, 180}, {0, 0}}) {
        const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
        const HostMatrix x = random_matrix(*backend_, dtype, 200, n, 11);
        Tensor h = triangles(count, n, 12);
        const std::vector<double> start = download(*backend_, h);
        backend_->accumulate_gram(x.view(), h.stack(), offsets);
        for (int64_t e = 0; e < count; ++e)
          for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j <= i; ++j) {
              double sum = start[(e * n + i) * n + j], size = std::abs(sum);
              for (int64_t t = offsets[e]; t < offsets[e + 1]; ++t) {
                sum += x.values[t * n + i] * x.values[t * n + j];
                size += std::abs(x.values[t * n + i] * x.values[t * n + j]);
              }
              EXPECT_NEAR(h.as<float>()[(e * n + i) * n + j], sum, 202 * 0x1p-24 * size);
            }
      }
}

TEST_F(Gram, StaysAccurateOverManyTokens) {
  // 2^20 tokens in uneven calls; the error may grow like the square root of the chunks, not like their number.
  const int64_t tokens = 1048576, n = 7;
  const HostMatrix x =
      make_matrix(*backend_, DType::bf16, tokens, n, [random = std::mt19937(13)](int64_t, int64_t c) mutable {
        return static_cast<float>(static_cast<int>(random() % 2001) - 700) * 0.001f * static_cast<float>(1 + c % 5);
      });
  Tensor h(*backend_, DType::f32, {1, n, n}, "h");
  backend_->zero(h.data(), h.bytes());
  for (int64_t begin = 0; begin < tokens;) {
    const int64_t end = std::min(tokens, begin + 40009);
    backend_->accumulate_gram(x.view(), h.stack(), std::vector<int64_t>{begin, end});
    begin = end;
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t t = 0; t < tokens; ++t) sum += x.values[t * n + i] * x.values[t * n + j];
      EXPECT_NEAR(h.as<float>()[i * n + j], sum, 1e-5 * std::abs(sum)) << i << ", " << j;
    }
}

TEST_F(Gram, MismatchIsAnError) {
  const HostMatrix x = random_matrix(*backend_, DType::bf16, 10, 8, 14);
  Tensor h(*backend_, DType::f32, {2, 8, 8}, "h");
  EXPECT_THROW(backend_->accumulate_gram(x.view(), h.stack(), std::vector<int64_t>{0, 10}), Error);
  EXPECT_THROW(backend_->accumulate_gram(x.view(), h.stack(), std::vector<int64_t>{0, 5, 11}), Error);
  EXPECT_THROW(backend_->accumulate_gram(x.view().col_range(0, 7), h.stack(), std::vector<int64_t>{0, 5, 10}), Error);
}

TEST_F(Gram, ScaleAndBlend) {
  const int64_t n = 19;
  Tensor h = triangles(3, n, 15), pool = triangles(1, n, 16);
  const std::vector<double> start = download(*backend_, h);
  const std::vector<float> own{0.5f, 0.0f, 2.0f}, shared{0.25f, 1.0f, 0.0f};
  backend_->scale_and_blend(h.stack(), own, shared, pool.matrix());
  for (int64_t e = 0; e < 3; ++e)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const double a = own[e] * start[(e * n + i) * n + j], b = shared[e] * pool.as<float>()[i * n + j];
        EXPECT_NEAR(h.as<float>()[(e * n + i) * n + j], a + b, 3 * 0x1p-24 * (std::abs(a) + std::abs(b)));
      }
  const float before = h.as<float>()[5 * n + 3];
  backend_->scale_and_blend(h.stack(), own, {}, {});
  EXPECT_EQ(h.as<float>()[5 * n + 3], 0.5f * before);
}

TEST_F(Gram, SumOfAStackDoesNotDependOnItsSplit) {
  const int64_t n = 33;
  Tensor h = triangles(7, n, 17), whole = triangles(1, n, 18), parts = triangles(1, n, 18);
  backend_->sum_stack(h.stack(), whole.matrix());
  backend_->sum_stack(h.stack().range(0, 3), parts.matrix());
  backend_->sum_stack(h.stack().range(3, 7), parts.matrix());
  Tensor start = triangles(1, n, 18);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      EXPECT_EQ(whole.as<float>()[i * n + j], parts.as<float>()[i * n + j]);
      double sum = start.as<float>()[i * n + j];
      for (int64_t e = 0; e < 7; ++e) sum += h.as<float>()[(e * n + i) * n + j];
      EXPECT_NEAR(whole.as<float>()[i * n + j], sum, 1e-5);
    }
}

TEST_F(Gram, TrianglesTravelPacked) {
  const int64_t n = 21, size = n * (n + 1) / 2;
  Tensor h = triangles(3, n, 19), back = triangles(3, n, 20), packed(*backend_, DType::f32, {3 * size}, "packed");
  backend_->pack_lower(h.stack(), packed.as<float>());
  EXPECT_EQ(packed.as<float>()[0], h.as<float>()[0]);
  EXPECT_EQ(packed.as<float>()[size + 2], h.as<float>()[n * n + n + 1]);  // row 1 of matrix 1
  backend_->unpack_lower(packed.as<float>(), back.stack());
  std::vector<float> diagonal(3 * n);
  backend_->diagonals(back.stack(), diagonal.data());
  for (int64_t e = 0; e < 3; ++e)
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(diagonal[e * n + i], h.as<float>()[(e * n + i) * n + i]);
      for (int64_t j = 0; j <= i; ++j)
        EXPECT_EQ(back.as<float>()[(e * n + i) * n + j], h.as<float>()[(e * n + i) * n + j]);
    }
}

}  // namespace
}  // namespace shardq
