// Arithmetic on lower triangles: equal bits on both backends, and nothing written above the diagonal.
#include "equivalence/equivalence.hpp"

namespace shardq::equivalence {
namespace {

using TriangleEquivalence = Equivalence;

struct TriangleCase {
  int64_t count, n;
};
const TriangleCase kCases[] = {{1, 1}, {3, 2}, {2, 31}, {1, 32}, {4, 33}, {1, 257}, {2, 300}, {0, 5}, {130, 3}};

/// Values with NaN above the diagonal, which no operation may read.
std::vector<float> lower(std::vector<float> values, int64_t n) {
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
    if (i % n > i / n % n) values[i] = NAN;
  return values;
}

template <class Run>
void expect_same(Backend& cpu, Backend& gpu, Run&& run) {
  EXPECT_TRUE(same(run(gpu), run(cpu)));
}

TEST_F(TriangleEquivalence, ScaleAndBlend) {
  for (const auto& [count, n] : kCases)
    for (bool with_pool : {false, true}) {
      SCOPED_TRACE(fmt::format("{} x {}, pool {}", count, n, with_pool));
      const auto h = lower(normal(count * n * n), n), pool = lower(normal(n * n), n);
      const auto own = normal(count), shared = normal(count);
      expect_same(cpu(), gpu(), [&](Backend& backend) {
        const Tensor ht = to_tensor(backend, DType::f32, {count, n, n}, h),
                     pt = to_tensor(backend, DType::f32, {n, n}, pool);
        backend.scale_and_blend(ht.stack(), own, with_pool ? std::span<const float>(shared) : std::span<const float>{},
                                with_pool ? pt.matrix() : MatrixView{});
        return raw_of<float>(backend, ht);
      });
    }
}

TEST_F(TriangleEquivalence, SumStackAddsInOrder) {
  for (const auto& [count, n] : kCases) {
    SCOPED_TRACE(fmt::format("{} x {}", count, n));
    const auto h = lower(normal(count * n * n), n), pool = lower(normal(n * n), n);
    const auto sum = [&](Backend& backend, int64_t split) {
      const Tensor ht = to_tensor(backend, DType::f32, {count, n, n}, h),
                   pt = to_tensor(backend, DType::f32, {n, n}, pool);
      backend.sum_stack(ht.stack().range(0, split), pt.matrix());
      backend.sum_stack(ht.stack().range(split, count), pt.matrix());
      return raw_of<float>(backend, pt);
    };
    EXPECT_TRUE(same(sum(gpu(), 0), sum(cpu(), 0)));
    EXPECT_TRUE(same(sum(gpu(), count / 2), sum(gpu(), 0))) << "a split of the stack shows";
  }
}

TEST_F(TriangleEquivalence, Diagonals) {
  for (const auto& [count, n] : kCases) {
    const auto h = lower(normal(count * n * n), n);
    for (Backend* backend : {&cpu(), &gpu()}) {
      const Tensor ht = to_tensor(*backend, DType::f32, {count, n, n}, h);
      std::vector<float> got(count * n, NAN), want;
      for (int64_t e = 0; e < count; ++e)
        for (int64_t i = 0; i < n; ++i) want.push_back(h[(e * n + i) * n + i]);
      backend->diagonals(ht.stack(), got.data());
      EXPECT_TRUE(same(got, want));
    }
  }
}

TEST_F(TriangleEquivalence, PackAndUnpack) {
  for (const auto& [count, n] : kCases) {
    SCOPED_TRACE(fmt::format("{} x {}", count, n));
    const auto h = lower(normal(count * n * n), n);
    const int64_t size = n * (n + 1) / 2;
    std::vector<float> flat;
    for (int64_t e = 0; e < count; ++e)
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j <= i; ++j) flat.push_back(h[(e * n + i) * n + j]);
    for (Backend* backend : {&cpu(), &gpu()}) {
      const Tensor ht = to_tensor(*backend, DType::f32, {count, n, n}, h),
                   packed = poisoned(*backend, DType::f32, {count, size});
      backend->pack_lower(ht.stack(), packed.as<float>());
      EXPECT_TRUE(same(raw_of<float>(*backend, packed), flat));
      const Tensor back = poisoned(*backend, DType::f32, {count, n, n});
      backend->unpack_lower(packed.as<float>(), back.stack());
      const auto got = raw_of<float>(*backend, back);
      for (int64_t i = 0; i < count * n * n; ++i) {
        if (i % n > i / n % n)
          EXPECT_TRUE(std::isnan(got[i])) << "written above the diagonal at " << i;
        else
          ASSERT_EQ(got[i], h[i]);
      }
    }
  }
}

}  // namespace
}  // namespace shardq::equivalence
