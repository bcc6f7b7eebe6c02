// Reversed Cholesky.  J H J = L L^T with J the reversal of order; R = J L J is upper triangular and H = R R^T.
// A row-major matrix read backwards as one flat array is the matrix with both indices reversed: so H is written
// backwards, LAPACK (which sees the transpose) factors it in place, and reading the result backwards, row j divided by
// R(j, j), gives T^T.
//
// In double precision: the factor is where a single-precision solve loses its accuracy. Measured on layers of 512
// columns with neighbouring channels correlated by 0.9 to 0.99999, damping 0.01 to 0.0001: the worst code misses its
// nearest value by up to 3e-2 steps with a single-precision factorisation and by at most 2e-6 steps with this one (the
// loop itself is single precision in both). It doubles the time of a step that takes an eighth of the solve.
#include <cblas.h>
#include <lapacke.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "core/error.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

constexpr int64_t kTile = 256;
/// Above this size one factorisation keeps all threads busy, and side by side their work arrays would be large.
constexpr int64_t kSideBySide = 2048;
constexpr int64_t kPad = 8;  // keeps columns off the powers of two

/// Column-major lower triangle in place, tile by tile (right-looking): each tile operation is one task, so that the
/// result does not depend on the number of threads. Returns LAPACK's info.
int cholesky(double* a, int64_t n, int64_t stride) {
  const auto at = [&](int64_t i, int64_t j) { return a + j * stride + i; };
  const auto size = [&](int64_t i) { return static_cast<int>(std::min(kTile, n - i)); };
  const int ld = static_cast<int>(stride);
  for (int64_t k = 0; k < n; k += kTile) {
    int info = 0;
    // The _work form: the plain one would look for NaN first, also above the diagonal, where anything may be.
    cpu::for_each_task(1, [&](int64_t) { info = LAPACKE_dpotrf_work(LAPACK_COL_MAJOR, 'L', size(k), at(k, k), ld); });
    if (info != 0) return info + static_cast<int>(k);
    const int64_t below = (n - k - 1) / kTile;  // tiles under the diagonal one
    const auto row = [&](int64_t i) { return k + (i + 1) * kTile; };
    cpu::for_each_task(below, [&](int64_t i) {
      cblas_dtrsm(CblasColMajor, CblasRight, CblasLower, CblasTrans, CblasNonUnit, size(row(i)), size(k), 1.0, at(k, k),
                  ld, at(row(i), k), ld);
    });
    cpu::for_each_task(below * (below + 1) / 2, [&](int64_t t) {
      int64_t i = 0;
      while ((i + 1) * (i + 2) / 2 <= t) ++i;
      const int64_t j = t - i * (i + 1) / 2, down = row(i), across = row(j);
      if (i == j)
        cblas_dsyrk(CblasColMajor, CblasLower, CblasNoTrans, size(down), size(k), -1.0, at(down, k), ld, 1.0,
                    at(down, down), ld);
      else
        cblas_dgemm(CblasColMajor, CblasNoTrans, CblasTrans, size(down), size(across), size(k), -1.0, at(down, k), ld,
                    at(across, k), ld, 1.0, at(down, across), ld);
    });
  }
  return 0;
}

/// Writes H[order][:, order] + damping, lower triangle, backwards into `flat`, n rows `stride` apart.
void load_reversed(MatrixView h, const int32_t* order, double damping, double* flat, int64_t stride) {
  const int64_t n = h.rows;
  const float* source = h.as<float>();
#pragma omp parallel for schedule(dynamic, 16) if (n > 256)
  for (int64_t j = 0; j < n; ++j) {
    double* row = flat + (n - 1 - j) * stride;
    const int64_t a = order ? order[j] : j;
    for (int64_t k = 0; k < j; ++k) {
      const int64_t b = order ? order[k] : k;
      row[n - 1 - k] = a > b ? source[a * h.stride + b] : source[b * h.stride + a];
    }
    const float diagonal = source[a * h.stride + a];
    row[n - 1 - j] = diagonal == 0.0f ? 1.0 : diagonal + damping;
  }
}

/// T^T, row j: R(k, j) / R(j, j) for k < j, zeros from the diagonal on. Returns 0, or 1 + a column whose pivot is no
/// positive number: OpenBLAS tests pivots with `<= 0`, which lets NaN pass.
int unload_reversed(const double* flat, int64_t stride, MatrixView factor, float* pivots) {
  const int64_t n = factor.rows;
  int bad = 0;
#pragma omp parallel for schedule(dynamic, 16) if (n > 256) reduction(max : bad)
  for (int64_t j = 0; j < n; ++j) {
    const double* row = flat + (n - 1 - j) * stride;
    float* out = factor.as<float>() + j * factor.stride;
    const double pivot = row[n - 1 - j];
    if (!(pivot > 0 && std::isfinite(pivot))) bad = static_cast<int>(j) + 1;
    pivots[j] = static_cast<float>(pivot);
    for (int64_t k = 0; k < j; ++k) out[k] = static_cast<float>(row[n - 1 - k] / pivot);
    std::fill(out + j, out + n, 0.0f);
  }
  return bad;
}

}  // namespace

void CpuBackend::factorize(StackView h, const int32_t* order, std::span<const int64_t> which,
                           std::span<const float> damping, StackView factor, float* pivots, std::span<int> status) {
  const int64_t n = h.cols;
  SHARDQ_CHECK(h.rows == n && factor.rows == n && factor.cols == n && factor.count == h.count, ExitCode::internal,
               "factorize: h [{}, {}, {}], factor [{}, {}, {}]", h.count, h.rows, h.cols, factor.count, factor.rows,
               factor.cols);
  SHARDQ_CHECK(which.size() == damping.size() && which.size() == status.size(), ExitCode::internal,
               "factorize: {} matrices, {} dampings, {} statuses", which.size(), damping.size(), status.size());
  if (n == 0) return;
  const int64_t stride = n + kPad;
  const auto factor_one = [&](int64_t i) {
    const int64_t e = which[i];
    const std::unique_ptr<double[]> flat(new (std::nothrow) double[static_cast<size_t>(n * stride)]);
    SHARDQ_CHECK(flat, ExitCode::internal, "out of memory: work array of a factorisation needs {} bytes, {} available",
                 n * stride * 8, memory().available);
    load_reversed(h[e], order ? order + e * n : nullptr, damping[i], flat.get(), stride);
    status[i] = cholesky(flat.get(), n, stride);
    if (status[i] == 0) status[i] = unload_reversed(flat.get(), stride, factor[e], pivots + e * n);
  };
  const int64_t count = static_cast<int64_t>(which.size());
  if (n <= kSideBySide)
    cpu::for_each_equal(count, factor_one);
  else
    for (int64_t i = 0; i < count; ++i) factor_one(i);
}

}  // namespace shardq
