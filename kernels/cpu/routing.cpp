#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/row_access.hpp"

namespace shardq {

using cpu::check_forward_dtype;
using cpu::load_row;
using cpu::row_bytes;
using cpu::store_row;

namespace {

/// Softmax over all experts, then the top_k largest by repeated selection: top_k is small, and the first maximum is the
/// lowest index.
void route_row(std::vector<float>& p, const RouterSpec& router, int32_t* ids, float* weights) {
  const float largest = *std::max_element(p.begin(), p.end());
  float sum = 0;
  for (float& value : p) sum += value = std::exp(value - largest);
  for (float& value : p) value /= sum;
  float chosen = 0;
  for (int64_t i = 0; i < router.top_k; ++i) {
    const auto best = std::max_element(p.begin(), p.end());
    ids[i] = static_cast<int32_t>(best - p.begin());
    weights[i] = *best;
    chosen += *best;
    *best = -1.0f;
  }
  if (router.normalize_top_k)
    for (int64_t i = 0; i < router.top_k; ++i) weights[i] /= chosen;
}

}  // namespace

void CpuBackend::route(MatrixView logits, const RouterSpec& router, int32_t* ids, float* weights) {
  SHARDQ_CHECK(logits.cols == router.experts && 0 < router.top_k && router.top_k <= router.experts, ExitCode::internal,
               "route: logits have {} columns for {} experts, top_k {}", logits.cols, router.experts, router.top_k);
  check_forward_dtype(logits.dtype, "route");
#pragma omp parallel
  {
    std::vector<float> p(logits.cols);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < logits.rows; ++t) {
      load_row(logits, t, p.data());
      route_row(p, router, ids + t * router.top_k, weights + t * router.top_k);
    }
  }
}

void CpuBackend::sort_by_expert(const int32_t* ids, int64_t slots, int64_t experts, int32_t* order, int32_t* place,
                                std::span<int64_t> offsets) {
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == experts + 1, ExitCode::internal,
               "sort_by_expert: {} offsets for {} experts", offsets.size(), experts);
  SHARDQ_CHECK(slots <= std::numeric_limits<int32_t>::max(), ExitCode::internal,
               "sort_by_expert: {} slots do not fit 32-bit indices", slots);
  std::fill(offsets.begin(), offsets.end(), 0);
  for (int64_t i = 0; i < slots; ++i) {
    SHARDQ_CHECK(0 <= ids[i] && ids[i] < experts, ExitCode::internal, "sort_by_expert: id {} of {} experts at slot {}",
                 ids[i], experts, i);
    ++offsets[ids[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t at = next[ids[i]]++;
    order[at] = static_cast<int32_t>(i);
    place[i] = static_cast<int32_t>(at);
  }
}

void CpuBackend::gather_rows(MatrixView source, const int32_t* order, int64_t divisor, MatrixView target) {
  SHARDQ_CHECK(source.cols == target.cols && source.dtype == target.dtype && divisor > 0, ExitCode::internal,
               "gather_rows: source has {} columns of {}, target {} of {}, divisor {}", source.cols,
               torch_name(source.dtype), target.cols, torch_name(target.dtype), divisor);
  const int64_t bytes = source.cols * size_of(source.dtype);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < target.rows; ++i)
    std::memcpy(row_bytes(target, i), row_bytes(source, order[i] / divisor), bytes);
}

void CpuBackend::dispatch_rows(MatrixView source, const int32_t* order, const int32_t* place, int64_t copies,
                               MatrixView target) {
  SHARDQ_CHECK(target.rows == source.rows * copies && order && place, ExitCode::internal,
               "dispatch_rows: {} copies of {} rows into {}", copies, source.rows, target.rows);
  gather_rows(source, order, copies, target);  // writes in order, and what it reads again is in cache or near it
}

void CpuBackend::combine_rows(MatrixView source, const int32_t* place, const float* weights, int64_t top_k,
                              MatrixView target) {
  SHARDQ_CHECK(source.cols == target.cols && source.rows == target.rows * top_k, ExitCode::internal,
               "combine_rows: source [{}, {}], target [{}, {}], top_k {}", source.rows, source.cols, target.rows,
               target.cols, top_k);
  check_forward_dtype(source.dtype, "combine_rows source");
  check_forward_dtype(target.dtype, "combine_rows target");
#pragma omp parallel
  {
    std::vector<float> sum(target.cols), row(target.cols);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < target.rows; ++t) {
      load_row(target, t, sum.data());
      for (int64_t i = 0; i < top_k; ++i) {
        load_row(source, place[t * top_k + i], row.data());
        const float weight = weights[t * top_k + i];
        for (int64_t j = 0; j < target.cols; ++j) sum[j] += weight * row[j];
      }
      store_row(sum.data(), target, t);
    }
  }
}

}  // namespace shardq
