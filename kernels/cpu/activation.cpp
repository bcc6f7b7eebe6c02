#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/exponential.hpp"
#include "kernels/cpu/row_access.hpp"

namespace shardq {

using cpu::check_forward_dtype;
using cpu::exponential;
using cpu::load_row;
using cpu::store_row;

void CpuBackend::silu_mul(MatrixView gate, MatrixView up, MatrixView out) {
  SHARDQ_CHECK(gate.rows == out.rows && up.rows == out.rows && gate.cols == out.cols && up.cols == out.cols,
               ExitCode::internal, "silu_mul: gate [{}, {}], up [{}, {}], out [{}, {}]", gate.rows, gate.cols, up.rows,
               up.cols, out.rows, out.cols);
  check_forward_dtype(gate.dtype, "silu_mul gate");
  check_forward_dtype(up.dtype, "silu_mul up");
  check_forward_dtype(out.dtype, "silu_mul out");
#pragma omp parallel
  {
    std::vector<float> g(gate.cols), u(gate.cols);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < gate.rows; ++i) {
      load_row(gate, i, g.data());
      load_row(up, i, u.data());
      for (int64_t j = 0; j < gate.cols; ++j) g[j] = g[j] / (1.0f + exponential(-g[j]));
      // The model that is being imitated stores silu(gate) before it multiplies.
      if (out.dtype == DType::bf16)
        for (int64_t j = 0; j < gate.cols; ++j) g[j] = round_to_bf16(g[j]);
      else if (out.dtype == DType::f16)
        for (int64_t j = 0; j < gate.cols; ++j) g[j] = round_to_f16(g[j]);
      for (int64_t j = 0; j < gate.cols; ++j) g[j] *= u[j];
      store_row(g.data(), out, i);
    }
  }
}

void CpuBackend::add(MatrixView x, MatrixView y) {
  SHARDQ_CHECK(x.rows == y.rows && x.cols == y.cols, ExitCode::internal, "add: x is [{}, {}], y is [{}, {}]", x.rows,
               x.cols, y.rows, y.cols);
  check_forward_dtype(x.dtype, "add x");
  check_forward_dtype(y.dtype, "add y");
#pragma omp parallel
  {
    std::vector<float> a(x.cols), b(x.cols);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < x.rows; ++i) {
      load_row(x, i, a.data());
      load_row(y, i, b.data());
      for (int64_t j = 0; j < x.cols; ++j) a[j] += b[j];
      store_row(a.data(), x, i);
    }
  }
}

}  // namespace shardq
