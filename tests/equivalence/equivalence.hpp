#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.hpp"

namespace shardq::equivalence {

/// Unit roundoff of fp32 and bf16: a correctly rounded result is within this fraction.
inline constexpr double kEps32 = 5.9604644775390625e-08;
inline constexpr double kEps16 = 0.001953125;  // bf16: 2^-9

/// Runs every operation on the CPU backend (the specification) and on the CUDA backend, on equal inputs.
/// Without a visible device the tests skip, aloud. SHARDQ_EQUIVALENCE_SELF=1 puts a second CPU backend in the place of
/// CUDA: it checks the tests themselves where no GPU is at hand.
class Equivalence : public ::testing::Test {
 protected:
  void SetUp() override;
  static Backend& cpu();
  static Backend& gpu();
  std::mt19937 random{20240817};

  /// `count` normal values times `scale`, each representable in `dtype`.
  std::vector<float> normal(int64_t count, DType dtype = DType::f32, float scale = 1.0f);
  std::vector<int32_t> permutation(int64_t count);
};

/// The same array on both backends.
struct Pair {
  Tensor cpu, gpu;
};

/// Uploads `values`, rounded to `dtype` (bf16, f16 or f32).
Tensor to_tensor(Backend& backend, DType dtype, Shape shape, const std::vector<float>& values);
/// Raw bytes of any dtype.
template <class T>
Tensor to_tensor_raw(Backend& backend, DType dtype, Shape shape, const std::vector<T>& values) {
  Tensor tensor(backend, dtype, std::move(shape), "test");
  if (!values.empty()) backend.upload(tensor.data(), values.data(), static_cast<int64_t>(values.size() * sizeof(T)));
  return tensor;
}
/// All bytes 0xFF: NaN in every floating dtype, -1 in integers, so that an unwritten output shows.
Tensor poisoned(Backend& backend, DType dtype, Shape shape);

/// Values widened to float.
std::vector<float> values_of(Backend& backend, const Tensor& tensor);
template <class T>
std::vector<T> raw_of(Backend& backend, const Tensor& tensor) {
  std::vector<T> values(tensor.bytes() / sizeof(T));
  if (!values.empty()) backend.download(values.data(), tensor.data(), tensor.bytes());
  return values;
}

/// How far element i may be from its reference.
using Tolerance = std::function<double(int64_t)>;
inline Tolerance within(double bound) {
  return [bound](int64_t) { return bound; };
}

/// Success when |got - want| <= tolerance(i) everywhere; equal infinities agree and NaN agrees with NaN only. The
/// message names the first and the worst element.
::testing::AssertionResult close(const std::vector<float>& got, const std::vector<float>& want,
                                 const Tolerance& tolerance);
::testing::AssertionResult close(const std::vector<float>& got, const std::vector<double>& want,
                                 const Tolerance& tolerance);

/// Success when all elements are equal (floats by bits).
template <class T>
::testing::AssertionResult same(const std::vector<T>& got, const std::vector<T>& want) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << "sizes differ: " << got.size() << " and " << want.size();
  int64_t wrong = 0, first = -1;
  for (size_t i = 0; i < got.size(); ++i)
    if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0) {
      if (first < 0) first = static_cast<int64_t>(i);
      ++wrong;
    }
  if (wrong == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << wrong << " of " << got.size() << " differ, first at " << first << ": got "
                                       << +got[first] << ", want " << +want[first];
}

}  // namespace shardq::equivalence
