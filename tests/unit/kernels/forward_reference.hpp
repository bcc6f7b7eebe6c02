#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "kernels/backend.hpp"

namespace shardq {

/// A matrix in backend memory together with the exact values it holds, in double.
struct HostMatrix {
  Tensor tensor;
  std::vector<double> values;
  MatrixView view() const { return tensor.matrix(); }
};

/// Values of `dtype` made by `value(row, col)`, rounded to it.
inline HostMatrix make_matrix(Backend& backend, DType dtype, int64_t rows, int64_t cols,
                              const std::function<float(int64_t, int64_t)>& value) {
  HostMatrix m{Tensor(backend, dtype, {rows, cols}, "test matrix"), std::vector<double>(rows * cols)};
  std::vector<std::byte> bytes(m.tensor.bytes());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t i = r * cols + c;
      const float x = round_to(dtype, value(r, c));
      m.values[i] = x;
      if (dtype == DType::f32) reinterpret_cast<float*>(bytes.data())[i] = x;
      if (dtype == DType::bf16) reinterpret_cast<BFloat16*>(bytes.data())[i] = to_bf16(x);
      if (dtype == DType::f16) reinterpret_cast<Float16*>(bytes.data())[i] = to_f16(x);
    }
  backend.upload(m.tensor.data(), bytes.data(), m.tensor.bytes());
  return m;
}

inline HostMatrix random_matrix(Backend& backend, DType dtype, int64_t rows, int64_t cols, unsigned seed,
                                float sigma = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, sigma);
  return make_matrix(backend, dtype, rows, cols, [&](int64_t, int64_t) { return normal(generator); });
}

/// Output poisoned with NaN, so that an element never written is seen.
inline HostMatrix poisoned_matrix(Backend& backend, DType dtype, int64_t rows, int64_t cols) {
  return make_matrix(backend, dtype, rows, cols,
                     [](int64_t, int64_t) { return std::numeric_limits<float>::quiet_NaN(); });
}

inline std::vector<double> download(Backend& backend, const Tensor& tensor) {
  std::vector<std::byte> bytes(tensor.bytes());
  backend.download(bytes.data(), tensor.data(), tensor.bytes());
  std::vector<double> values(tensor.size());
  for (int64_t i = 0; i < tensor.size(); ++i) {
    if (tensor.dtype() == DType::f32) values[i] = reinterpret_cast<const float*>(bytes.data())[i];
    if (tensor.dtype() == DType::bf16) values[i] = to_float(reinterpret_cast<const BFloat16*>(bytes.data())[i]);
    if (tensor.dtype() == DType::f16) values[i] = to_float(reinterpret_cast<const Float16*>(bytes.data())[i]);
  }
  return values;
}

/// Half a unit in the last place of `dtype`, relative.
inline double rounding(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

/// Largest of |got - want| / (|want| + floor); infinite where sizes differ or a value is no number.
inline double worst_error(const std::vector<double>& got, const std::vector<double>& want, double floor) {
  if (got.size() != want.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    worst = std::max(worst, std::abs(got[i] - want[i]) / (std::abs(want[i]) + floor));
  }
  return worst;
}

}  // namespace shardq
