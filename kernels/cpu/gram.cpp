// Sums of x x^T and the arithmetic on their lower triangles.
#include <cblas.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/convert.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

constexpr int64_t kChunkFloats = int64_t{1} << 19;  // 2 MiB of widened tokens, so that they stay in cache
constexpr int64_t kStrip = 256, kStripCols = 1024;  // of h, for one BLAS call
constexpr int64_t kPad = 16;                        // keeps rows of the scratch off the powers of two

/// Tokens a chunk: each chunk reads and writes the whole triangle, so not too few.
int64_t chunk_rows(int64_t cols, int64_t rows) {
  return std::min(rows, std::clamp<int64_t>(kChunkFloats / std::max<int64_t>(cols, 1), 512, 4096));
}

/// A tile of the lower triangle: rows [row, row + rows) and columns [col, col + cols); on the diagonal, its triangle.
struct Tile {
  int64_t row, rows, col, cols;
};

/// Largest first, so that threads finish together.
std::vector<Tile> triangle_tiles(int64_t n) {
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < n; row += kStrip) {
    const int64_t rows = std::min(kStrip, n - row);
    for (int64_t col = 0; col < row; col += kStripCols)
      tiles.push_back({row, rows, col, std::min(kStripCols, row - col)});
    tiles.push_back({row, rows, row, rows});
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cols > b.cols; });
  return tiles;
}

void add_tile(const float* x, int64_t stride, int64_t tokens, const Tile& t, MatrixView h) {
  float* target = h.as<float>() + t.row * h.stride + t.col;
  const int rows = static_cast<int>(t.rows), cols = static_cast<int>(t.cols), k = static_cast<int>(tokens);
  const int ld = static_cast<int>(stride), h_ld = static_cast<int>(h.stride);
  if (t.row == t.col)
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, rows, k, 1.0f, x + t.row, ld, 1.0f, target, h_ld);
  else
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, rows, cols, k, 1.0f, x + t.row, ld, x + t.col, ld, 1.0f,
                target, h_ld);
}

void check_square(StackView h, const char* where) {
  SHARDQ_CHECK(h.rows == h.cols && h.dtype == DType::f32, ExitCode::internal,
               "{}: expected a stack of square f32 matrices, found [{}, {}, {}] {}", where, h.count, h.rows, h.cols,
               safetensors_name(h.dtype));
}

/// body(row of the whole stack's lower triangles: matrix, row) in parallel.
template <class Body>
void for_each_row(StackView h, Body&& body) {
#pragma omp parallel for collapse(2) schedule(dynamic, 16) if (h.count * h.rows * h.cols > cpu::kWorthThreads)
  for (int64_t e = 0; e < h.count; ++e)
    for (int64_t r = 0; r < h.rows; ++r) body(e, r);
}

float* row_of(StackView h, int64_t e, int64_t r) {
  return h.as<float>() + e * h.matrix_stride + r * h.stride;
}

}  // namespace

void CpuBackend::accumulate_gram(MatrixView x, StackView h, std::span<const int64_t> offsets) {
  check_square(h, "accumulate_gram");
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == h.count + 1 && x.cols == h.cols, ExitCode::internal,
               "accumulate_gram: x has {} columns and h [{}, {}, {}], with {} offsets", x.cols, h.count, h.rows, h.cols,
               offsets.size());
  SHARDQ_CHECK(offsets.front() >= 0 && offsets.back() <= x.rows, ExitCode::internal,
               "accumulate_gram: offsets [{}, {}) outside {} rows", offsets.front(), offsets.back(), x.rows);
  if (h.cols == 0) return;
  const std::vector<Tile> tiles = triangle_tiles(h.cols);
  cpu::for_each_expert(offsets, [&](int64_t e) {
    const int64_t begin = offsets[e], end = offsets[e + 1], step = chunk_rows(x.cols, end - begin);
    for (int64_t t = begin; t < end; t += step) {
      const int64_t rows = std::min(step, end - t);
      const float* data = x.as<float>() + t * x.stride;
      int64_t stride = x.stride;
      if (x.dtype != DType::f32) {
        stride = x.cols + kPad;
        float* buffer = scratch(scratch_slots(), step * stride);
        cpu::with_type(x.dtype, [&]<class T>(T*) {
#pragma omp parallel for schedule(static) if (rows * x.cols > cpu::kWorthThreads)
          for (int64_t r = 0; r < rows; ++r) cpu::widen(x.as<T>() + (t + r) * x.stride, buffer + r * stride, x.cols);
        });
        data = buffer;
      }
      cpu::for_each_task(static_cast<int64_t>(tiles.size()),
                         [&](int64_t i) { add_tile(data, stride, rows, tiles[i], h[e]); });
    }
  });
}

void CpuBackend::scale_and_blend(StackView h, std::span<const float> own, std::span<const float> shared,
                                 MatrixView pool) {
  check_square(h, "scale_and_blend");
  const bool blend = pool.data != nullptr;
  SHARDQ_CHECK(
      static_cast<int64_t>(own.size()) == h.count && (!blend || static_cast<int64_t>(shared.size()) == h.count),
      ExitCode::internal, "scale_and_blend: {} matrices, {} and {} factors", h.count, own.size(), shared.size());
  SHARDQ_CHECK(!blend || (pool.rows == h.rows && pool.cols == h.cols), ExitCode::internal,
               "scale_and_blend: pool [{}, {}] for matrices [{}, {}]", pool.rows, pool.cols, h.rows, h.cols);
  for_each_row(h, [&](int64_t e, int64_t r) {
    float* row = row_of(h, e, r);
    const float a = own[e];
    if (!blend) {
#pragma omp simd
      for (int64_t c = 0; c <= r; ++c) row[c] *= a;
      return;
    }
    const float b = shared[e];
    const float* common = pool.as<float>() + r * pool.stride;
#pragma omp simd
    for (int64_t c = 0; c <= r; ++c) row[c] = a * row[c] + b * common[c];
  });
}

void CpuBackend::sum_stack(StackView h, MatrixView pool) {
  check_square(h, "sum_stack");
  SHARDQ_CHECK(pool.rows == h.rows && pool.cols == h.cols && pool.dtype == DType::f32, ExitCode::internal,
               "sum_stack: pool [{}, {}] for matrices [{}, {}]", pool.rows, pool.cols, h.rows, h.cols);
#pragma omp parallel for schedule(dynamic, 16) if (h.count * h.rows * h.cols > cpu::kWorthThreads)
  for (int64_t r = 0; r < pool.rows; ++r) {
    float* sum = pool.as<float>() + r * pool.stride;
    for (int64_t e = 0; e < h.count; ++e) {
      const float* row = row_of(h, e, r);
#pragma omp simd
      for (int64_t c = 0; c <= r; ++c) sum[c] += row[c];
    }
  }
}

void CpuBackend::diagonals(StackView h, float* host) {
  check_square(h, "diagonals");
  for (int64_t e = 0; e < h.count; ++e)
    for (int64_t r = 0; r < h.rows; ++r) host[e * h.rows + r] = row_of(h, e, r)[r];
}

void CpuBackend::pack_lower(StackView h, float* packed) {
  check_square(h, "pack_lower");
  const int64_t size = h.rows * (h.rows + 1) / 2;
  for_each_row(h, [&](int64_t e, int64_t r) {
    std::memcpy(packed + e * size + r * (r + 1) / 2, row_of(h, e, r), static_cast<size_t>(r + 1) * sizeof(float));
  });
}

void CpuBackend::unpack_lower(const float* packed, StackView h) {
  check_square(h, "unpack_lower");
  const int64_t size = h.rows * (h.rows + 1) / 2;
  for_each_row(h, [&](int64_t e, int64_t r) {
    std::memcpy(row_of(h, e, r), packed + e * size + r * (r + 1) / 2, static_cast<size_t>(r + 1) * sizeof(float));
  });
}

}  // namespace shardq
