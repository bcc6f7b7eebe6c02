// Linear layers: single-precision BLAS on panels that are widened to float just before use. Scratch stays bounded
// whatever the shape: a panel of x, a panel of w and, for narrow outputs, one of y.
#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

constexpr int64_t kPanelFloats = int64_t{1} << 22;  // 16 MiB: long enough for BLAS to run at its speed
constexpr int64_t kPanelRows = 2048;

/// Rows a panel for matrices of `cols` columns.
int64_t panel_rows(int64_t cols, int64_t rows) {
  return std::min(rows, std::clamp<int64_t>(kPanelFloats / std::max<int64_t>(cols, 1), 256, kPanelRows));
}

/// Rows of a matrix as float: the matrix itself where it already is, else a widened copy in `buffer`.
struct FloatPanel {
  const float* data;
  int64_t stride;
};
FloatPanel float_panel(MatrixView m, float* buffer) {
  if (m.dtype == DType::f32) return {m.as<float>(), m.stride};
  cpu::with_type(m.dtype, [&]<class T>(T*) {
#pragma omp parallel for schedule(static) if (m.rows * m.cols > cpu::kWorthThreads)
    for (int64_t r = 0; r < m.rows; ++r) cpu::widen(m.as<T>() + r * m.stride, buffer + r * m.cols, m.cols);
  });
  return {buffer, m.cols};
}

/// y = values (+ bias) (+ y), rounded once.
void store_rows(const float* values, int64_t stride, const float* bias, MatrixView y, bool accumulate) {
  cpu::with_type(y.dtype, [&]<class T>(T*) {
#pragma omp parallel for schedule(static) if (y.rows * y.cols > cpu::kWorthThreads)
    for (int64_t r = 0; r < y.rows; ++r) {
      constexpr int64_t kStrip = 256;
      float strip[kStrip], old[kStrip];
      for (int64_t begin = 0; begin < y.cols; begin += kStrip) {
        const int64_t n = std::min(kStrip, y.cols - begin);
        T* target = y.as<T>() + r * y.stride + begin;
        const float* source = values + r * stride + begin;
        for (int64_t i = 0; i < n; ++i) strip[i] = bias ? source[i] + bias[begin + i] : source[i];
        if (accumulate) {
          cpu::widen(target, old, n);
          for (int64_t i = 0; i < n; ++i) strip[i] += old[i];
        }
        cpu::narrow(strip, target, n);
      }
    }
  });
}

struct LinearScratch {
  float *x, *w, *y;
};

void linear_panels(MatrixView x, MatrixView w, const float* bias, MatrixView y, bool accumulate,
                   const LinearScratch& scratch) {
  const int64_t x_rows = panel_rows(x.cols, x.rows), w_rows = panel_rows(w.cols, w.rows);
  // A product that lands in f32 without a bias needs no pass of its own over y.
  const bool direct = y.dtype == DType::f32 && !bias;
  for (int64_t t = 0; t < x.rows; t += x_rows) {
    const MatrixView x_part = x.row_range(t, std::min(t + x_rows, x.rows));
    const FloatPanel xf = float_panel(x_part, scratch.x);
    for (int64_t o = 0; o < w.rows; o += w_rows) {
      const MatrixView w_part = w.row_range(o, std::min(o + w_rows, w.rows));
      const FloatPanel wf = float_panel(w_part, scratch.w);
      const MatrixView out = y.row_range(t, t + x_part.rows).col_range(o, o + w_part.rows);
      float* target = direct ? out.as<float>() : scratch.y;
      const int64_t target_stride = direct ? out.stride : out.cols;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(out.rows), static_cast<int>(out.cols),
                  static_cast<int>(x.cols), 1.0f, xf.data, static_cast<int>(xf.stride), wf.data,
                  static_cast<int>(wf.stride), direct && accumulate ? 1.0f : 0.0f, target,
                  static_cast<int>(target_stride));
      if (!direct) store_rows(target, target_stride, bias ? bias + o : nullptr, out, accumulate);
    }
  }
}

void check_linear(MatrixView x, int64_t w_rows, int64_t w_cols, MatrixView y) {
  SHARDQ_CHECK(x.cols == w_cols && y.cols == w_rows && x.rows == y.rows, ExitCode::internal,
               "linear: x [{}, {}] times w [{}, {}] does not give y [{}, {}]", x.rows, x.cols, w_rows, w_cols, y.rows,
               y.cols);
}

}  // namespace

void CpuBackend::linear(MatrixView x, MatrixView w, const void* bias, MatrixView y, bool accumulate) {
  check_linear(x, w.rows, w.cols, y);
  if (y.rows == 0 || y.cols == 0) return;
  const int64_t x_rows = panel_rows(x.cols, x.rows), w_rows = panel_rows(w.cols, w.rows);
  float* bias_values = nullptr;
  if (bias) {
    bias_values = scratch(3, w.rows);
    cpu::with_type(w.dtype, [&]<class T>(T*) { cpu::widen(static_cast<const T*>(bias), bias_values, w.rows); });
  }
  linear_panels(x, w, bias_values, y, accumulate,
                {scratch(0, x_rows * x.cols), scratch(1, w_rows * w.cols), scratch(2, x_rows * w_rows)});
}

void CpuBackend::linear_stack(MatrixView x, StackView w, std::span<const int64_t> offsets, MatrixView y) {
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == w.count + 1, ExitCode::internal,
               "linear_stack: {} matrices need {} offsets, found {}", w.count, w.count + 1, offsets.size());
  check_linear(x, w.rows, w.cols, y);
  SHARDQ_CHECK(offsets.front() >= 0 && offsets.back() <= x.rows, ExitCode::internal,
               "linear_stack: offsets [{}, {}) outside {} rows", offsets.front(), offsets.back(), x.rows);
  const auto run_one = [&](int64_t e, int slots) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0 || w.rows == 0) return;
    const int64_t x_rows = panel_rows(w.cols, rows), w_rows = panel_rows(w.cols, w.rows);
    linear_panels(
        x.row_range(offsets[e], offsets[e + 1]), w[e], nullptr, y.row_range(offsets[e], offsets[e + 1]), false,
        {scratch(slots, x_rows * w.cols), scratch(slots + 1, w_rows * w.cols), scratch(slots + 2, x_rows * w_rows)});
  };
  cpu::for_each_expert(offsets, scratch_threads(), [&](int64_t e, int thread) { run_one(e, thread * kScratchKinds); });
}

void CpuBackend::block_update(StackView residual, StackView factor, StackView target) {
  SHARDQ_CHECK(residual.count == factor.count && residual.count == target.count && residual.rows == target.rows &&
                   residual.cols == factor.cols && factor.rows == target.cols,
               ExitCode::internal, "block_update: residual [{}, {}, {}], factor [{}, {}, {}], target [{}, {}, {}]",
               residual.count, residual.rows, residual.cols, factor.count, factor.rows, factor.cols, target.count,
               target.rows, target.cols);
  if (target.rows == 0 || target.cols == 0 || residual.cols == 0) return;
  cpu::for_each_equal(target.count, omp_get_max_threads(), [&](int64_t e) {
    const MatrixView d = residual[e], t = factor[e], p = target[e];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(p.rows), static_cast<int>(p.cols),
                static_cast<int>(d.cols), 1.0f, d.as<float>(), static_cast<int>(d.stride), t.as<float>(),
                static_cast<int>(t.stride), 1.0f, p.as<float>(), static_cast<int>(p.stride));
  });
}

void CpuBackend::quadratic_loss(StackView residual, StackView factor, const float* pivots, StackView work,
                                float* losses) {
  SHARDQ_CHECK(residual.count == factor.count && residual.cols == factor.cols && factor.rows == factor.cols &&
                   work.count == residual.count && work.rows == residual.rows && work.cols == residual.cols,
               ExitCode::internal, "quadratic_loss: residual [{}, {}, {}], factor [{}, {}, {}]", residual.count,
               residual.rows, residual.cols, factor.count, factor.rows, factor.cols);
  const int64_t rows = residual.rows, n = residual.cols;
  if (rows == 0 || n == 0) return;
  cpu::for_each_equal(residual.count, omp_get_max_threads(), [&](int64_t e) {
    const MatrixView d = residual[e], t = factor[e], out = work[e];
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(out.as<float>() + r * out.stride, d.as<float>() + r * d.stride, n * sizeof(float));
    // The factor's diagonal is stored as zero; read as unit it is I + T, transposed.
    cblas_strmm(CblasRowMajor, CblasRight, CblasLower, CblasTrans, CblasUnit, static_cast<int>(rows),
                static_cast<int>(n), 1.0f, t.as<float>(), static_cast<int>(t.stride), out.as<float>(),
                static_cast<int>(out.stride));
    for (int64_t r = 0; r < rows; ++r) {
      const float* value = out.as<float>() + r * out.stride;
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < n; ++j) {
        const float term = value[j] * pivots[e * n + j];
        sum += static_cast<double>(term) * term;
      }
      losses[e * rows + r] = static_cast<float>(sum);
    }
  });
}

}  // namespace shardq
