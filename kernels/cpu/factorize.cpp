// Reversed Cholesky.  J H J = L L^T with J the reversal of order; R = J L J is upper triangular and H = R R^T.
// A row-major matrix read backwards as one flat array is the matrix with both indices reversed: so the reversed H is
// written straight into the factor's own memory, LAPACK (which sees its transpose) factors it there, and reading the
// result backwards, row j divided by R(j, j), is T^T. One n x n array, no copies.
#include <lapacke.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

/// Writes H[order][:, order] + damping, lower triangle, backwards into `flat` [n * n].
void load_reversed(MatrixView h, const int32_t* order, float damping, float* flat) {
  const int64_t n = h.rows;
  const float* source = h.as<float>();
#pragma omp parallel for schedule(dynamic, 16) if (n > 256)
  for (int64_t j = 0; j < n; ++j) {
    float* row = flat + (n - 1 - j) * n;
    if (order) {
      const int64_t a = order[j];
      for (int64_t k = 0; k < j; ++k) {
        const int64_t b = order[k];
        row[n - 1 - k] = a > b ? source[a * h.stride + b] : source[b * h.stride + a];
      }
    } else {
      const float* line = source + j * h.stride;
      for (int64_t k = 0; k < j; ++k) row[n - 1 - k] = line[k];
    }
    const int64_t a = order ? order[j] : j;
    const float diagonal = source[a * h.stride + a];
    row[n - 1 - j] = diagonal == 0.0f ? 1.0f : diagonal + damping;
  }
}

/// Row j of T^T: R(k, j) / R(j, j) for k < j, zeros from the diagonal on. Takes the pivot out.
void finish_row(float* row, int64_t j, int64_t n, float& pivot) {
  pivot = row[j];
#pragma omp simd
  for (int64_t k = 0; k < j; ++k) row[k] /= pivot;
  std::fill(row + j, row + n, 0.0f);
}

/// Turns the reversed L^T in `flat` into T^T in place: rows j and n - 1 - j change places, each read backwards.
void unload_reversed(float* flat, int64_t n, float* pivots) {
#pragma omp parallel for schedule(dynamic, 16) if (n > 256)
  for (int64_t j = 0; j < (n + 1) / 2; ++j) {
    const int64_t i = n - 1 - j;
    float *low = flat + j * n, *high = flat + i * n;
    if (i == j)
      std::reverse(low, low + n);
    else
      for (int64_t k = 0; k < n; ++k) std::swap(high[k], low[n - 1 - k]);
    finish_row(low, j, n, pivots[j]);
    if (i != j) finish_row(high, i, n, pivots[i]);
  }
}

}  // namespace

void CpuBackend::factorize(StackView h, const int32_t* order, std::span<const int64_t> which,
                           std::span<const float> damping, StackView factor, float* pivots, std::span<int> status) {
  const int64_t n = h.cols;
  SHARDQ_CHECK(h.rows == n && factor.rows == n && factor.cols == n && factor.count == h.count && factor.stride == n,
               ExitCode::internal, "factorize: h [{}, {}, {}], factor [{}, {}, {}] with stride {}", h.count, h.rows,
               h.cols, factor.count, factor.rows, factor.cols, factor.stride);
  SHARDQ_CHECK(which.size() == damping.size() && which.size() == status.size(), ExitCode::internal,
               "factorize: {} matrices, {} dampings, {} statuses", which.size(), damping.size(), status.size());
  if (n == 0) return;
  cpu::for_each_equal(static_cast<int64_t>(which.size()), omp_get_max_threads(), [&](int64_t i) {
    const int64_t e = which[i];
    float* flat = factor[e].as<float>();
    load_reversed(h[e], order ? order + e * n : nullptr, damping[i], flat);
    status[i] = LAPACKE_spotrf_work(LAPACK_COL_MAJOR, 'L', static_cast<int>(n), flat, static_cast<int>(n));
    if (status[i] != 0) return;
    unload_reversed(flat, n, pivots + e * n);
    // OpenBLAS tests pivots with `<= 0`, which lets NaN pass.
    const float* pivot = pivots + e * n;
    const auto bad = std::find_if_not(pivot, pivot + n, [](float p) { return p > 0 && std::isfinite(p); });
    if (bad != pivot + n) status[i] = static_cast<int>(bad - pivot) + 1;
  });
}

}  // namespace shardq
