// Products with the factor: what finished columns leave over for a block, and the loss of a residual.
#include <cblas.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

// Rows go to BLAS in chunks of exactly this many, the last one filled up with zeros: a row's sums are then made in the
// same order wherever it stands, and rows solved apart (on another rank) have the bits of the whole.
constexpr int64_t kRowChunk = 128;
constexpr int64_t kLossRows = 32;

void update_rows(MatrixView residual, MatrixView factor, MatrixView target) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(target.rows), static_cast<int>(target.cols),
              static_cast<int>(residual.cols), 1.0f, residual.as<float>(), static_cast<int>(residual.stride),
              factor.as<float>(), static_cast<int>(factor.stride), 1.0f, target.as<float>(),
              static_cast<int>(target.stride));
}

void copy_rows(MatrixView from, MatrixView to) {
  for (int64_t r = 0; r < from.rows; ++r)
    std::memcpy(to.as<float>() + r * to.stride, from.as<float>() + r * from.stride,
                static_cast<size_t>(from.cols) * sizeof(float));
}

/// The last rows of a matrix, fewer than a chunk.
void update_tail(MatrixView residual, MatrixView factor, MatrixView target) {
  std::vector<float> d(static_cast<size_t>(kRowChunk * residual.cols)), p(static_cast<size_t>(kRowChunk * target.cols));
  const MatrixView padded_residual{d.data(), DType::f32, kRowChunk, residual.cols, residual.cols};
  const MatrixView padded_target{p.data(), DType::f32, kRowChunk, target.cols, target.cols};
  copy_rows(residual, padded_residual);
  copy_rows(target, padded_target);
  update_rows(padded_residual, factor, padded_target);
  copy_rows(padded_target.row_range(0, target.rows), target);
}

/// losses[r] = sum_j (row_j pivot_j)^2 after row = residual row times (I + T).
void chunk_loss(MatrixView residual, MatrixView factor, const float* pivots, MatrixView work, float* losses) {
  copy_rows(residual, work);
  // The factor's diagonal is stored as zero; read as unit it is I + T, transposed.
  cblas_strmm(CblasRowMajor, CblasRight, CblasLower, CblasTrans, CblasUnit, static_cast<int>(work.rows),
              static_cast<int>(work.cols), 1.0f, factor.as<float>(), static_cast<int>(factor.stride), work.as<float>(),
              static_cast<int>(work.stride));
  for (int64_t r = 0; r < work.rows; ++r) {
    const float* value = work.as<float>() + r * work.stride;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < work.cols; ++j) {
      const float term = value[j] * pivots[j];
      sum += static_cast<double>(term) * term;
    }
    losses[r] = static_cast<float>(sum);
  }
}

}  // namespace

void CpuBackend::block_update(StackView residual, StackView factor, StackView target) {
  SHARDQ_CHECK(residual.count == factor.count && residual.count == target.count && residual.rows == target.rows &&
                   residual.cols == factor.cols && factor.rows == target.cols,
               ExitCode::internal, "block_update: residual [{}, {}, {}], factor [{}, {}, {}], target [{}, {}, {}]",
               residual.count, residual.rows, residual.cols, factor.count, factor.rows, factor.cols, target.count,
               target.rows, target.cols);
  if (target.rows == 0 || target.cols == 0 || residual.cols == 0) return;
  const int64_t chunks = (target.rows + kRowChunk - 1) / kRowChunk;
  cpu::for_each_task(target.count * chunks, [&](int64_t i) {
    const int64_t e = i / chunks, begin = i % chunks * kRowChunk, end = std::min(begin + kRowChunk, target.rows);
    const MatrixView d = residual[e].row_range(begin, end), p = target[e].row_range(begin, end);
    if (end - begin == kRowChunk)
      update_rows(d, factor[e], p);
    else
      update_tail(d, factor[e], p);
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
  const int64_t chunks = (rows + kLossRows - 1) / kLossRows;
  cpu::for_each_task(residual.count * chunks, [&](int64_t i) {
    const int64_t e = i / chunks, begin = i % chunks * kLossRows, end = std::min(begin + kLossRows, rows);
    chunk_loss(residual[e].row_range(begin, end), factor[e], pivots + e * n, work[e].row_range(begin, end),
               losses + e * rows + begin);
  });
}

}  // namespace shardq
