#include <cmath>
#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/reduction.hpp"
#include "kernels/cpu/row_access.hpp"

namespace shardq {

using cpu::check_forward_dtype;
using cpu::load;
using cpu::load_row;
using cpu::store_row;
using cpu::sum_of;

void CpuBackend::rms_norm(MatrixView x, const void* weight, DType weight_dtype, float eps, MatrixView y) {
  SHARDQ_CHECK(x.rows == y.rows && x.cols == y.cols, ExitCode::internal, "rms_norm: x is [{}, {}], y is [{}, {}]",
               x.rows, x.cols, y.rows, y.cols);
  check_forward_dtype(x.dtype, "rms_norm x");
  check_forward_dtype(y.dtype, "rms_norm y");
  check_forward_dtype(weight_dtype, "rms_norm weight");
  if (x.rows == 0 || x.cols == 0) return;
  std::vector<float> w(x.cols);
  load(weight, weight_dtype, x.cols, w.data());
#pragma omp parallel
  {
    std::vector<float> row(x.cols);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < x.rows; ++i) {
      load_row(x, i, row.data());
      // Squares of floats are exact in double, so that only the order of the sum is ours.
      const double squares = sum_of(x.cols, [&](int64_t j) { return static_cast<double>(row[j]) * row[j]; });
      const float inverse = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(x.cols) + eps));
      for (int64_t j = 0; j < x.cols; ++j) row[j] = row[j] * inverse * w[j];
      store_row(row.data(), y, i);
    }
  }
}

}  // namespace shardq
