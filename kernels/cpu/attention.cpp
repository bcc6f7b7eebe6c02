#include <cblas.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/exponential.hpp"
#include "kernels/cpu/reduction.hpp"
#include "kernels/cpu/row_access.hpp"

namespace shardq {

using cpu::check_forward_dtype;
using cpu::exponential;
using cpu::largest_of;
using cpu::load_row;
using cpu::store_row;
using cpu::sum_of;

namespace {

constexpr int64_t kQueryBlock = 64;

/// One head's rows [begin, end) of a packed matrix as a dense float matrix [end - begin, head_dim].
void load_head(const MatrixView& m, int64_t begin, int64_t end, int64_t head, int64_t head_dim, float* target) {
  for (int64_t t = begin; t < end; ++t)
    load_row(m, t, head * head_dim, (head + 1) * head_dim, target + (t - begin) * head_dim);
}

/// Softmax of scale * scores over the visible keys of a row, zero elsewhere.  Visible: columns [first, last].
void softmax_row(float* scores, int64_t cols, int64_t first, int64_t last, float scale) {
  const float largest = largest_of(scores + first, last - first + 1);
  for (int64_t j = first; j <= last; ++j) scores[j] = exponential((scores[j] - largest) * scale);
  const double sum = sum_of(last - first + 1, [&](int64_t j) { return scores[first + j]; });
  const float inverse = static_cast<float>(1.0 / sum);
  for (int64_t j = first; j <= last; ++j) scores[j] *= inverse;
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + last + 1, scores + cols, 0.0f);
}

}  // namespace

// One task is one key/value head of one sequence: its keys and values are widened once and serve all query heads of the
// group. Queries go in blocks, so that the score matrix stays in cache and blocks outside the causal (and window) band
// are never formed.
void CpuBackend::attention(MatrixView q, MatrixView k, MatrixView v, int64_t head_dim, std::span<const int64_t> starts,
                           float scale, int64_t window, MatrixView out) {
  SHARDQ_CHECK(head_dim > 0 && q.cols % head_dim == 0 && k.cols % head_dim == 0 && k.cols > 0 && q.cols % k.cols == 0 &&
                   v.cols == k.cols && out.cols == q.cols,
               ExitCode::internal, "attention: q has {} columns, k {}, v {}, out {}, head_dim {}", q.cols, k.cols,
               v.cols, out.cols, head_dim);
  SHARDQ_CHECK(!starts.empty() && starts.back() <= q.rows && k.rows == q.rows && v.rows == q.rows &&
                   out.rows == q.rows && window >= 0 && scale > 0,
               ExitCode::internal, "attention: {} query rows, {} key rows, {} sequence offsets, window {}", q.rows,
               k.rows, starts.size(), window);
  for (const MatrixView* m : {&q, &k, &v, &out}) check_forward_dtype(m->dtype, "attention");
  const int64_t sequences = static_cast<int64_t>(starts.size()) - 1;
  const int64_t kv_heads = k.cols / head_dim, group = q.cols / k.cols;
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s) longest = std::max(longest, starts[s + 1] - starts[s]);
#pragma omp parallel
  {
    std::vector<float> keys(longest * head_dim), values(longest * head_dim);
    std::vector<float> queries(kQueryBlock * head_dim), result(kQueryBlock * head_dim), scores(kQueryBlock * longest);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
        const int64_t begin = starts[s], length = starts[s + 1] - begin;
        load_head(k, begin, begin + length, kv_head, head_dim, keys.data());
        load_head(v, begin, begin + length, kv_head, head_dim, values.data());
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          for (int64_t block = 0; block < length; block += kQueryBlock) {
            const int64_t rows = std::min(kQueryBlock, length - block);
            const int64_t first_key = window == 0 ? 0 : std::max<int64_t>(0, block - window + 1);
            const int64_t span = block + rows - first_key;
            load_head(q, begin + block, begin + block + rows, head, head_dim, queries.data());
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, span, head_dim, 1.0f, queries.data(), head_dim,
                        keys.data() + first_key * head_dim, head_dim, 0.0f, scores.data(), span);
            for (int64_t i = 0; i < rows; ++i) {
              const int64_t query = block + i;
              const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, query - window + 1);
              softmax_row(scores.data() + i * span, span, first - first_key, query - first_key, scale);
            }
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, head_dim, span, 1.0f, scores.data(), span,
                        values.data() + first_key * head_dim, head_dim, 0.0f, result.data(), head_dim);
            for (int64_t i = 0; i < rows; ++i)
              store_row(result.data() + i * head_dim, out, begin + block + i, head * head_dim, (head + 1) * head_dim);
          }
        }
      }
    }
  }
}

}  // namespace shardq
