#include "quant/solver.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "core/error.hpp"
#include "quant/hessian_statistics.hpp"
#include "quant/observer.hpp"

namespace shardq {
namespace {

/// State of one solve: what the steps below hand on to each other.
struct Solve {
  Backend& backend;
  StackView weights;  // count equals the number of Hessians
  HessianStack hessian;
  const QuantScheme& scheme;
  const SolverOptions& options;
  PhaseSeconds& seconds;
  Quantized result;
  HessianStatistics statistics;
  Tensor importance;  // f32 [count, cols], or empty
  Tensor order;       // i32 [count, cols], or empty
  Tensor factor;      // f32 [count, cols, cols]
  Tensor pivots;      // f32 [count, cols]
  Tensor losses;      // f32 [count, rows]

  int64_t cols() const { return weights.cols; }
  int64_t group_size() const { return group_size_for(scheme, weights.cols); }
  int64_t groups() const { return weights.cols / group_size(); }
  const int32_t* order_data() const { return order ? order.as<int32_t>() : nullptr; }
};

void upload_order(Solve& s) {
  if (s.scheme.actorder == ActOrder::none) return;
  const std::vector<int32_t> order = descending_order(s.statistics, s.cols());
  s.order = Tensor(s.backend, DType::i32, {s.weights.count, s.cols()}, "activation order");
  s.backend.upload(s.order.data(), order.data(), s.order.bytes());
}

/// Matrices without a usable factor get T = 0 and R = I: the loop then rounds to nearest.
void neutral_factor(Solve& s, int64_t e) {
  const int64_t n = s.cols();
  const std::vector<float> ones(static_cast<size_t>(n), 1.0f);
  s.backend.zero(s.factor.as<float>() + e * n * n, n * n * 4);
  s.backend.upload(s.pivots.as<float>() + e * n, ones.data(), n * 4);
}

/// One factorisation for all, then the damping ladder for those that failed.
void factorize_all(Solve& s) {
  const int64_t n = s.cols(), count = s.weights.count;
  s.factor = Tensor(s.backend, DType::f32, {count, n, n}, "Cholesky factors");
  s.pivots = Tensor(s.backend, DType::f32, {count, n}, "pivots");
  std::vector<int64_t> which;
  std::vector<float> damping;
  for (int64_t e = 0; e < count; ++e) {
    if (is_fallback(s.result.outcomes[e].verdict)) continue;
    which.push_back(e);
    damping.push_back(static_cast<float>(s.options.damping_fraction * s.statistics.mean[e]));
  }
  std::vector<int> status;
  for (int attempt = 0; !which.empty(); ++attempt) {
    status.assign(which.size(), 0);
    s.backend.factorize(s.hessian.sums, s.order_data(), which, damping, s.factor.stack(), s.pivots.as<float>(), status);
    std::vector<int64_t> failed;
    std::vector<float> stronger;
    for (size_t i = 0; i < which.size(); ++i) {
      MatrixOutcome& outcome = s.result.outcomes[which[i]];
      if (status[i] == 0) {
        outcome.verdict = attempt == 0 ? Verdict::gptq : Verdict::gptq_damped;
        outcome.damping = damping[i];
      } else if (attempt < s.options.damping_retries) {
        failed.push_back(which[i]);
        // A recipe without damping still gets a ladder to climb.
        stronger.push_back(damping[i] > 0 ? 10 * damping[i] : static_cast<float>(0.01 * s.statistics.mean[which[i]]));
      } else {
        outcome.verdict = Verdict::rtn_not_positive_definite;
      }
    }
    which = std::move(failed);
    damping = std::move(stronger);
  }
  for (int64_t e = 0; e < count; ++e)
    if (is_fallback(s.result.outcomes[e].verdict)) neutral_factor(s, e);
}

/// Left-looking blocks. On a host backend calls are complete on return and each can be timed; on a device the loop is
/// enqueued without a pause, and all of it counts as "loop".
void quantize_columns(Solve& s) {
  const int64_t n = s.cols(), count = s.weights.count, rows = s.weights.rows;
  const int64_t block = std::min(s.options.block_size, n);
  Tensor residual(s.backend, DType::f32, {count, rows, n}, "residual");
  Tensor shifted(s.backend, DType::f32, {count, rows, block}, "block of columns");
  s.losses = Tensor(s.backend, DType::f32, {count, rows}, "losses");
  s.backend.zero(s.losses.data(), s.losses.bytes());
  // Under an activation order weights and codes go through the loop in that order: it reads them block by block, and
  // scattered columns would cost a cache line each, every time.
  Tensor ordered_weights, ordered_codes;
  StackView weights = s.weights;
  int8_t* codes = s.result.codes.as<int8_t>();
  if (s.order) {
    ordered_weights = Tensor(s.backend, weights.dtype, {count, rows, n}, "weights in activation order");
    ordered_codes = Tensor(s.backend, DType::i8, {count, rows, n}, "codes in activation order");
    s.backend.permute_columns(s.weights, s.order_data(), false, ordered_weights.stack());
    weights = ordered_weights.stack();
    codes = ordered_codes.as<int8_t>();
  }
  const StackView factor = s.factor.stack();
  const char* update = s.backend.is_host() ? "update" : "loop";
  PhaseTimer timer(s.seconds, "loop");
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = std::min(begin + block, n);
    const StackView target = shifted.stack().col_range(0, end - begin);
    s.backend.load_columns(weights, begin, target);
    if (begin > 0) {
      PhaseTimer updating(s.seconds, update);
      s.backend.block_update(residual.stack().col_range(0, begin), factor.row_range(begin, end).col_range(0, begin),
                             target);
    }
    s.backend.gptq_block({.shifted = target,
                          .weight = weights,
                          .order = s.order_data(),
                          .factor = factor,
                          .pivots = s.pivots.as<float>(),
                          .begin = begin,
                          .scales = s.result.scales.as<float>(),
                          .zeros = s.result.zeros ? s.result.zeros.as<int8_t>() : nullptr,
                          .group_size = s.group_size(),
                          .groups = s.groups(),
                          .grid = s.scheme.grid,
                          .codes = codes,
                          .residual = residual.stack(),
                          .losses = s.losses.as<float>()});
  }
  if (s.order) {
    StackView result = ordered_codes.stack();
    result.data = s.result.codes.data();
    s.backend.permute_columns(ordered_codes.stack(), s.order_data(), true, result);
  }
  s.backend.synchronize();
}

/// Loss of every row as the loop summed it; of matrices without a factor there is none to tell.
void collect_losses(Solve& s) {
  s.result.losses.resize(static_cast<size_t>(s.losses.size()));
  s.backend.download(s.result.losses.data(), s.losses.data(), s.losses.bytes());
  for (int64_t e = 0; e < s.weights.count; ++e)
    if (is_fallback(s.result.outcomes[e].verdict))
      std::fill_n(s.result.losses.begin() + e * s.weights.rows, s.weights.rows, 0.0f);
}

/// The loss that plain rounding would have had, on evenly spaced rows: a stack view with a longer stride.
void sample_rtn_losses(Solve& s) {
  const int64_t rows = s.weights.rows, n = s.cols(), count = s.weights.count;
  s.result.rtn_losses.assign(static_cast<size_t>(count * rows), -1.0f);
  const int64_t sample = std::min(s.options.loss_sample_rows, rows);
  if (sample <= 0) return;
  const int64_t step = rows / sample;
  StackView rows_taken = s.weights;
  rows_taken.rows = sample;
  rows_taken.stride *= step;
  const ScaleTensors grid = allocate_scales(s.backend, s.scheme, count, sample, n);
  observe(s.backend, rows_taken, s.scheme, s.importance ? s.importance.as<float>() : nullptr, grid);
  Tensor codes(s.backend, DType::i8, {count, sample, n}, "codes of sampled rows");
  Tensor residual(s.backend, DType::f32, {count, sample, n}, "residual of sampled rows");
  Tensor work(s.backend, DType::f32, {count, sample, n}, "work of sampled rows");
  Tensor losses(s.backend, DType::f32, {count, sample}, "losses of sampled rows");
  s.backend.round_to_nearest(rows_taken, s.order_data(), grid.scales.as<float>(), grid.zero_data(), s.group_size(),
                             s.scheme.grid, codes.as<int8_t>(), residual.stack());
  s.backend.quadratic_loss(residual.stack(), s.factor.stack(), s.pivots.as<float>(), work.stack(), losses.as<float>());
  std::vector<float> host(static_cast<size_t>(count * sample));
  s.backend.download(host.data(), losses.data(), losses.bytes());
  for (int64_t e = 0; e < count; ++e) {
    if (is_fallback(s.result.outcomes[e].verdict)) continue;
    for (int64_t i = 0; i < sample; ++i) s.result.rtn_losses[e * rows + i * step] = host[e * sample + i];
  }
}

/// One matrix of count * rows rows where all share a Hessian. Weights with gaps are copied (as f32, which is exact).
StackView merge_rows(Backend& backend, StackView w, Tensor& copy) {
  if (w.matrix_stride == w.rows * w.stride)
    return {w.data, w.dtype, 1, w.count * w.rows, w.cols, w.stride, w.count * w.rows * w.stride};
  copy = Tensor(backend, DType::f32, {w.count, w.rows, w.cols}, "weights that share a Hessian");
  backend.load_columns(w, 0, copy.stack());
  return as_stack(copy.matrix());
}

void check_request(const StackView& w, const HessianStack& h, const MatrixView& pool, const QuantScheme& scheme,
                   const SolverOptions& options, const MatrixNames& names) {
  SHARDQ_CHECK(h.sums.count == w.count || h.sums.count == 1, ExitCode::internal,
               "solve: {} weight matrices but {} Hessians", w.count, h.sums.count);
  SHARDQ_CHECK(h.sums.rows == w.cols && h.sums.cols == w.cols, ExitCode::internal,
               "solve: weights of {} columns but a Hessian of [{}, {}]", w.cols, h.sums.rows, h.sums.cols);
  SHARDQ_CHECK(static_cast<int64_t>(h.tokens.size()) == h.sums.count, ExitCode::internal,
               "solve: {} Hessians but {} token counts", h.sums.count, h.tokens.size());
  SHARDQ_CHECK(static_cast<int64_t>(names.size()) == w.count, ExitCode::internal, "solve: {} matrices but {} names",
               w.count, names.size());
  SHARDQ_CHECK(!pool.data || (pool.rows == w.cols && pool.cols == w.cols), ExitCode::internal,
               "solve: pooled Hessian of [{}, {}] for {} columns", pool.rows, pool.cols, w.cols);
  SHARDQ_CHECK(options.block_size > 0, ExitCode::usage, "block_size must be positive, found {}", options.block_size);
  check_groups(scheme, w.cols);
}

/// NaN or infinity in a weight (a run may leave out the scan for them) shows in the loss of its row.
void refuse_nonfinite_losses(const Solve& s, const MatrixNames& names) {
  const int64_t rows = static_cast<int64_t>(s.result.losses.size()) / static_cast<int64_t>(names.size());
  for (size_t i = 0; i < s.result.losses.size(); ++i)
    SHARDQ_CHECK(std::isfinite(s.result.losses[i]), ExitCode::input,
                 "{}: the loss of row {} is not finite: expected finite weights, or nonfinite: rtn",
                 names[i / static_cast<size_t>(rows)], static_cast<int64_t>(i) % rows);
}

}  // namespace

Quantized solve(Backend& backend, StackView weights, HessianStack hessian, MatrixView pool, int64_t pool_tokens,
                const QuantScheme& scheme, const SolverOptions& options, const MatrixNames& names,
                PhaseSeconds& seconds) {
  check_request(weights, hessian, pool, scheme, options, names);
  if (scheme.method == Method::rtn) return round_to_nearest(backend, weights, scheme);
  Tensor merged;
  const StackView given = weights;
  const bool shared = hessian.sums.count == 1 && weights.count > 1;
  if (shared) weights = merge_rows(backend, weights, merged);

  Solve s{backend, weights, hessian, scheme, options, seconds, {}, {}, {}, {}, {}, {}, {}};
  {
    PhaseTimer timer(seconds, "other");
    const Shrinkage shrinkage{pool, pool_tokens, options.kappa_factor * static_cast<double>(weights.cols)};
    s.statistics = normalise(backend, hessian, shrinkage, options, names);
    s.result.outcomes = first_verdicts(s.statistics, hessian.tokens, weights.cols, options);
    s.importance = observer_importance(backend, scheme, s.statistics, s.result.outcomes);
    upload_order(s);
  }
  {
    PhaseTimer timer(seconds, "scales");
    ScaleTensors grid = allocate_scales(backend, scheme, given.count, given.rows, given.cols);
    observe(backend, weights, scheme, s.importance ? s.importance.as<float>() : nullptr, grid);
    check_scales(backend, grid, scheme, names);
    backend.synchronize();
    s.result.scales = std::move(grid.scales);
    s.result.zeros = std::move(grid.zeros);
  }
  {
    PhaseTimer timer(seconds, "factor");
    factorize_all(s);
  }
  s.result.codes = Tensor(backend, DType::i8, {given.count, given.rows, given.cols}, "codes");
  quantize_columns(s);
  {
    PhaseTimer timer(seconds, "other");
    collect_losses(s);
    sample_rtn_losses(s);
    if (options.nonfinite_is_error) refuse_nonfinite_losses(s, names);
  }
  if (shared) s.result.outcomes.resize(static_cast<size_t>(given.count), MatrixOutcome(s.result.outcomes.front()));
  return std::move(s.result);
}

Quantized round_to_nearest(Backend& backend, StackView weights, const QuantScheme& scheme) {
  check_groups(scheme, weights.cols);
  MatrixNames names;
  for (int64_t e = 0; e < weights.count; ++e) names.push_back(fmt::format("matrix {}", e));
  ScaleTensors grid = allocate_scales(backend, scheme, weights.count, weights.rows, weights.cols);
  observe(backend, weights, scheme, nullptr, grid);
  check_scales(backend, grid, scheme, names);
  Quantized result;
  result.codes = Tensor(backend, DType::i8, {weights.count, weights.rows, weights.cols}, "codes");
  if (weights.cols > 0)
    backend.round_to_nearest(weights, nullptr, grid.scales.as<float>(), grid.zero_data(),
                             group_size_for(scheme, weights.cols), scheme.grid, result.codes.as<int8_t>(), {});
  result.scales = std::move(grid.scales);
  result.zeros = std::move(grid.zeros);
  result.outcomes.assign(static_cast<size_t>(weights.count), {.verdict = Verdict::rtn});
  result.losses.assign(static_cast<size_t>(weights.count * weights.rows), 0.0f);
  result.rtn_losses.assign(static_cast<size_t>(weights.count * weights.rows), -1.0f);
  return result;
}

}  // namespace shardq
