#include "equivalence/equivalence.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "core/error.hpp"

namespace shardq::equivalence {
namespace {
bool self_check() {
  const char* value = std::getenv("SHARDQ_EQUIVALENCE_SELF");
  return value && std::string(value) == "1";
}

template <class Want>
::testing::AssertionResult close_impl(const std::vector<float>& got, const std::vector<Want>& want,
                                      const Tolerance& tolerance) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << "sizes differ: " << got.size() << " and " << want.size();
  int64_t wrong = 0, first = -1, worst = -1;
  double worst_excess = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = got[i], w = want[i];
    if (std::isnan(g) && std::isnan(w)) continue;
    if (std::isinf(w) && g == w) continue;
    const double bound = tolerance(static_cast<int64_t>(i)), error = std::abs(g - w);
    if (error <= bound) continue;  // false for NaN on one side
    const double excess = std::isfinite(error) ? error / std::max(bound, 1e-300) : HUGE_VAL;
    if (first < 0) first = static_cast<int64_t>(i);
    if (worst < 0 || excess > worst_excess) worst = static_cast<int64_t>(i), worst_excess = excess;
    ++wrong;
  }
  if (wrong == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << wrong << " of " << got.size() << " outside tolerance; first at " << first
                                       << ": got " << got[first] << ", want " << want[first] << "; worst at " << worst
                                       << ": got " << got[worst] << ", want " << want[worst] << ", allowed "
                                       << tolerance(worst);
}
}  // namespace

Backend& Equivalence::cpu() {
  static const std::unique_ptr<Backend> backend = make_cpu_backend();
  return *backend;
}

Backend& Equivalence::gpu() {
  // Never destroyed: the CUDA runtime may be gone when static destructors run.
  static Backend* const backend = (self_check() ? make_cpu_backend() : make_cuda_backend(0)).release();
  return *backend;
}

void Equivalence::SetUp() {
  if (!self_check() && cuda_device_count() == 0)
    GTEST_SKIP()
        << "no CUDA device is visible (or CUDA is not compiled in): the CUDA backend was NOT compared with the CPU's";
}

std::vector<float> Equivalence::normal(int64_t count, DType dtype, float scale) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = round_to(dtype, scale * distribution(random));
  return values;
}

std::vector<int32_t> Equivalence::permutation(int64_t count) {
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

Tensor to_tensor(Backend& backend, DType dtype, Shape shape, const std::vector<float>& values) {
  SHARDQ_CHECK(element_count(shape) == static_cast<int64_t>(values.size()), ExitCode::internal,
               "{} values for shape {}", values.size(), to_string(shape));
  if (dtype == DType::f32) return to_tensor_raw(backend, dtype, std::move(shape), values);
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i)
    bits[i] = dtype == DType::bf16 ? to_bf16(values[i]).bits : to_f16(values[i]).bits;
  return to_tensor_raw(backend, dtype, std::move(shape), bits);
}

Tensor poisoned(Backend& backend, DType dtype, Shape shape) {
  return to_tensor_raw(backend, dtype, shape,
                       std::vector<uint8_t>(element_count(shape) * size_of(dtype), uint8_t{0xFF}));
}

std::vector<float> values_of(Backend& backend, const Tensor& tensor) {
  if (tensor.dtype() == DType::f32) return raw_of<float>(backend, tensor);
  const std::vector<uint16_t> bits = raw_of<uint16_t>(backend, tensor);
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i)
    values[i] = tensor.dtype() == DType::bf16 ? to_float(BFloat16{bits[i]}) : to_float(Float16{bits[i]});
  return values;
}

::testing::AssertionResult close(const std::vector<float>& got, const std::vector<float>& want,
                                 const Tolerance& tolerance) {
  return close_impl(got, want, tolerance);
}
::testing::AssertionResult close(const std::vector<float>& got, const std::vector<double>& want,
                                 const Tolerance& tolerance) {
  return close_impl(got, want, tolerance);
}

// The comparisons must be able to fail.
TEST(Comparison, ClosePassesAndFails) {
  const float nan = NAN, inf = INFINITY;
  EXPECT_TRUE(close({1.0f, 2.0f}, std::vector<float>{1.0f, 2.5f}, within(0.5)));
  EXPECT_FALSE(close({1.0f, 2.0f}, std::vector<float>{1.0f, 2.5f}, within(0.4)));
  EXPECT_FALSE(close({1.0f}, std::vector<float>{1.0f, 2.0f}, within(9)));
  EXPECT_FALSE(close({nan}, std::vector<float>{1.0f}, within(9)));
  EXPECT_FALSE(close({1.0f}, std::vector<float>{nan}, within(9)));
  EXPECT_FALSE(close({1.0f}, std::vector<float>{inf}, within(9)));
  EXPECT_FALSE(close({inf}, std::vector<float>{-inf}, within(9)));
  EXPECT_TRUE(close({inf, nan}, std::vector<float>{inf, nan}, within(0)));
  EXPECT_FALSE(close({1.0f + 1e-6f}, std::vector<double>{1.0}, within(0)));
}
TEST(Comparison, SamePassesAndFails) {
  EXPECT_TRUE(same<int>({1, 2}, {1, 2}));
  EXPECT_FALSE(same<int>({1, 2}, {1, 3}));
  EXPECT_FALSE(same<int>({1}, {1, 3}));
  EXPECT_FALSE(same<float>({0.0f}, {-0.0f}));
}

}  // namespace shardq::equivalence
