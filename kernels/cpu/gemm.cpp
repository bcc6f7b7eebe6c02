// Linear layers: single-precision BLAS on panels that are widened to float just before use. Scratch stays bounded
// whatever the shape: a panel of x, a panel of w and, for narrow outputs, one tile of y a thread.
#include <cblas.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/convert.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

constexpr int64_t kPanelFloats = int64_t{1} << 22;  // 16 MiB of widened values, shared by all threads
constexpr int64_t kPanelRows = 2048;
constexpr int64_t kTileRows = 256, kTileCols = 512;  // of y, for one BLAS call: within a tenth of BLAS on the whole
// Rows of a scratch panel end off the powers of two: otherwise BLAS, when it packs, reads through one cache set.
constexpr int64_t kPad = 16;

/// Rows a panel for matrices of `cols` columns.
int64_t panel_rows(int64_t cols, int64_t rows) {
  return std::min(rows, std::clamp<int64_t>(kPanelFloats / std::max<int64_t>(cols, 1), kTileRows, kPanelRows));
}
int64_t panel_floats(int64_t cols, int64_t rows) {
  return panel_rows(cols, rows) * (cols + kPad);
}

/// Rows of a matrix as float: the matrix itself where it already is, else a widened copy in `buffer`.
struct FloatPanel {
  const float* data;
  int64_t stride;
};
FloatPanel float_panel(MatrixView m, float* buffer) {
  if (m.dtype == DType::f32) return {m.as<float>(), m.stride};
  const int64_t stride = m.cols + kPad;
  cpu::with_type(m.dtype, [&]<class T>(T*) {
#pragma omp parallel for schedule(static) if (m.rows * m.cols > cpu::kWorthThreads)
    for (int64_t r = 0; r < m.rows; ++r) cpu::widen(m.as<T>() + r * m.stride, buffer + r * stride, m.cols);
  });
  return {buffer, stride};
}

/// y (+)= a b^T, one BLAS call. Shapes: a [rows, k], b [cols, k], y [rows, cols].
void multiply(int64_t rows, int64_t cols, int64_t k, FloatPanel a, FloatPanel b, bool accumulate, float* y,
              int64_t stride) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows), static_cast<int>(cols),
              static_cast<int>(k), 1.0f, a.data, static_cast<int>(a.stride), b.data, static_cast<int>(b.stride),
              accumulate ? 1.0f : 0.0f, y, static_cast<int>(stride));
}

/// A thread's tile of y before it is rounded.
float* tile_scratch() {
  thread_local std::vector<float> tile(kTileRows * kTileCols);
  return tile.data();
}

/// y = values (+ bias) (+ y), rounded once.
void store_tile(const float* values, int64_t stride, const float* bias, MatrixView y, bool accumulate) {
  cpu::with_type(y.dtype, [&]<class T>(T*) {
    for (int64_t r = 0; r < y.rows; ++r) {
      float sum[kTileCols], old[kTileCols];
      T* target = y.as<T>() + r * y.stride;
      const float* source = values + r * stride;
      for (int64_t i = 0; i < y.cols; ++i) sum[i] = bias ? source[i] + bias[i] : source[i];
      if (accumulate) {
        cpu::widen(target, old, y.cols);
        for (int64_t i = 0; i < y.cols; ++i) sum[i] += old[i];
      }
      cpu::narrow(sum, target, y.cols);
    }
  });
}

/// Panels of x and w in, all tiles of y that they make out.
void linear_tiles(FloatPanel x, FloatPanel w, int64_t k, const float* bias, MatrixView y, bool accumulate) {
  // A product that lands in f32 without a bias needs no pass of its own over y.
  const bool direct = y.dtype == DType::f32 && !bias;
  const int64_t down = (y.rows + kTileRows - 1) / kTileRows, across = (y.cols + kTileCols - 1) / kTileCols;
  const auto run_tile = [&](int64_t i) {
    const int64_t row = i / across * kTileRows, col = i % across * kTileCols;
    const MatrixView out =
        y.row_range(row, std::min(row + kTileRows, y.rows)).col_range(col, std::min(col + kTileCols, y.cols));
    const FloatPanel a{x.data + row * x.stride, x.stride}, b{w.data + col * w.stride, w.stride};
    if (direct) return multiply(out.rows, out.cols, k, a, b, accumulate, out.as<float>(), out.stride);
    float* tile = tile_scratch();
    multiply(out.rows, out.cols, k, a, b, false, tile, kTileCols);
    store_tile(tile, kTileCols, bias ? bias + col : nullptr, out, accumulate);
  };
  if (y.rows * y.cols * k <= cpu::kAlwaysOneThread)
    for (int64_t i = 0; i < down * across; ++i) run_tile(i);
  else
    cpu::for_each_task(down * across, run_tile);
}

struct LinearScratch {
  float *x, *w;
};

void linear_panels(MatrixView x, MatrixView w, const float* bias, MatrixView y, bool accumulate,
                   const LinearScratch& scratch) {
  const int64_t x_rows = panel_rows(x.cols, x.rows), w_rows = panel_rows(w.cols, w.rows);
  for (int64_t t = 0; t < x.rows; t += x_rows) {
    const MatrixView x_part = x.row_range(t, std::min(t + x_rows, x.rows));
    const FloatPanel x_panel = float_panel(x_part, scratch.x);
    for (int64_t o = 0; o < w.rows; o += w_rows) {
      const MatrixView w_part = w.row_range(o, std::min(o + w_rows, w.rows));
      const FloatPanel w_panel = float_panel(w_part, scratch.w);
      const MatrixView out = y.row_range(t, t + x_part.rows).col_range(o, o + w_part.rows);
      linear_tiles(x_panel, w_panel, x.cols, bias ? bias + o : nullptr, out, accumulate);
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
  float* bias_values = nullptr;
  if (bias) {
    bias_values = scratch(2, w.rows);
    cpu::with_type(w.dtype, [&]<class T>(T*) { cpu::widen(static_cast<const T*>(bias), bias_values, w.rows); });
  }
  linear_panels(x, w, bias_values, y, accumulate,
                {scratch(0, panel_floats(x.cols, x.rows)), scratch(1, panel_floats(w.cols, w.rows))});
}

void CpuBackend::linear_stack(MatrixView x, StackView w, std::span<const int64_t> offsets, MatrixView y) {
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == w.count + 1, ExitCode::internal,
               "linear_stack: {} matrices need {} offsets, found {}", w.count, w.count + 1, offsets.size());
  check_linear(x, w.rows, w.cols, y);
  SHARDQ_CHECK(offsets.front() >= 0 && offsets.back() <= x.rows, ExitCode::internal,
               "linear_stack: offsets [{}, {}) outside {} rows", offsets.front(), offsets.back(), x.rows);
  cpu::for_each_expert(offsets, [&](int64_t e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0 || w.rows == 0) return;
    const int slots = scratch_slots();
    linear_panels(x.row_range(offsets[e], offsets[e + 1]), w[e], nullptr, y.row_range(offsets[e], offsets[e + 1]),
                  false,
                  {scratch(slots, panel_floats(w.cols, rows)), scratch(slots + 1, panel_floats(w.cols, w.rows))});
  });
}

}  // namespace shardq
