#include "pipeline/tap_solver.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace shardq {
namespace {

/// Bytes of one Hessian.
int64_t hessian_bytes(int64_t cols) {
  return cols * cols * 4;
}

}  // namespace

int64_t hessian_budget(const Recipe& recipe, int64_t device_bytes) {
  return recipe.hessian_budget > 0 ? recipe.hessian_budget : device_bytes / 4;
}

std::vector<Range> split_waves(int64_t count, int64_t cols, int64_t budget) {
  const int64_t fit = std::max<int64_t>(1, budget / hessian_bytes(cols));
  const int64_t waves = (count + fit - 1) / fit;
  std::vector<Range> ranges;
  for (int64_t w = 0; w < waves; ++w) ranges.push_back(part(count, static_cast<int>(waves), static_cast<int>(w)));
  return ranges;
}

TapSolver::TapSolver(Job& job, const LayerSpec& layer, std::function<void()> safe_point)
    : job_(job), layer_(layer), safe_point_(std::move(safe_point)) {}

bool TapSolver::shared_hessian(Tap tap) const {
  return layer_.moe && tap == Tap::gate_up && job_.recipe.experts == ExpertTokens::all;
}

bool TapSolver::wants_pool(Tap tap) const {
  return layer_.routed(tap) && job_.recipe.experts == ExpertTokens::routed && job_.recipe.solver.kappa_factor > 0;
}

/// min_tokens is a rule for routed experts, whose counts are an accident of routing. A dense linear sees every token
/// there is: with a few it still gains from its Hessian, and rounding the whole model because the calibration set is
/// small would help nobody.
SolverOptions TapSolver::options_of(Tap tap) const {
  SolverOptions options = job_.recipe.solver;
  if (!layer_.routed(tap) && options.min_tokens < 0) options.min_tokens = 0;
  return options;
}

std::vector<Range> TapSolver::waves(Tap tap) const {
  const ModelSpec::TapShape shape = job_.spec.tap_shape(layer_, tap);
  const int64_t budget = hessian_budget(job_.recipe, job_.device_memory);
  if (!owned(tap)) return split_waves(shape.count, shape.cols, budget);
  // Waves are walks over chunks with safe points, so their number is that of the rank with most experts: the first.
  const int64_t most = part(shape.count, job_.host.size(), 0).size();
  const int count = static_cast<int>(std::max<size_t>(1, split_waves(most, shape.cols, budget).size()));
  const Range own = job_.own_matrices(layer_, tap);
  std::vector<Range> ranges;
  for (int w = 0; w < count; ++w) {
    const Range r = part(own.size(), count, w);
    ranges.push_back({own.begin + r.begin, own.begin + r.end});
  }
  return ranges;
}

MatrixNames TapSolver::names(Tap tap, Range matrices) const {
  MatrixNames out;
  for (int64_t m = matrices.begin; m < matrices.end; ++m) {
    std::string name = layer_.prefix;
    for (const LinearSpec& linear : layer_.linears)
      if (linear.tap == tap && std::max<int64_t>(linear.expert, 0) == m) {
        name = linear.module;
        break;
      }
    out.push_back(name);
  }
  return out;
}

TapResult TapSolver::new_result(Tap tap) {
  TapResult result;
  const ModelSpec::TapShape shape = job_.spec.tap_shape(layer_, tap);
  const int64_t group = group_size_for(job_.recipe.scheme, shape.cols), groups = (shape.cols + group - 1) / group;
  result.codes = Tensor(job_.backend, DType::i8, {shape.count, shape.rows, shape.cols}, "codes");
  result.scales = Tensor(job_.backend, DType::f32, {shape.count, shape.rows, groups}, "scales");
  if (!job_.recipe.scheme.grid.symmetric)
    result.zeros = Tensor(job_.backend, DType::i8, {shape.count, shape.rows, groups}, "zero points");
  result.outcomes.resize(shape.count);
  result.losses.assign(shape.count * shape.rows, 0.0f);
  result.rtn_losses.assign(shape.count * shape.rows, -1.0f);
  return result;
}

void TapSolver::place(TapResult& result, Quantized mine, int64_t first_row, int64_t first_matrix) {
  const auto copy = [&](Tensor& whole, const Tensor& part_tensor) {
    if (!whole || !part_tensor) return;
    const int64_t row_bytes = whole.shape().back() * size_of(whole.dtype());
    job_.backend.copy(whole.as<char>() + first_row * row_bytes, part_tensor.data(), part_tensor.bytes());
  };
  copy(result.codes, mine.codes);
  copy(result.scales, mine.scales);
  copy(result.zeros, mine.zeros);
  std::copy(mine.losses.begin(), mine.losses.end(), result.losses.begin() + first_row);
  std::copy(mine.rtn_losses.begin(), mine.rtn_losses.end(), result.rtn_losses.begin() + first_row);
  std::copy(mine.outcomes.begin(), mine.outcomes.end(), result.outcomes.begin() + first_matrix);
}

void TapSolver::gather(TapResult& result, Range wave, bool by_rows) {
  PhaseTimer timer(job_.seconds, "gather");
  const int ranks = job_.host.size();
  const int64_t rows_each = result.codes.shape()[1];
  const int64_t wave_rows = wave.size() * rows_each, first_row = wave.begin * rows_each;
  std::vector<Range> rows, matrices;  // of the wave, by rank
  for (int r = 0; r < ranks; ++r) {
    matrices.push_back(part(wave.size(), ranks, r));
    rows.push_back(by_rows ? part(rows_each, ranks, r)
                           : Range{matrices[r].begin * rows_each, matrices[r].end * rows_each});
  }
  const Range my_rows = rows[job_.host.rank()];
  result.pieces.push_back({{first_row + my_rows.begin, first_row + my_rows.end}, {first_row, first_row + wave_rows}});
  if (ranks > 1) {
    std::vector<Communicator::Gathered> arrays;
    for (Tensor* whole : {&result.codes, &result.scales, &result.zeros}) {
      if (!*whole) continue;
      const int64_t cols = whole->shape().back(), size = size_of(whole->dtype());
      arrays.push_back({whole->as<char>() + first_row * cols * size, scaled(rows, cols), size});
    }
    job_.device.all_gather_each(arrays);
    job_.host.all_gather(result.losses.data() + first_row, rows, sizeof(float));
    job_.host.all_gather(result.rtn_losses.data() + first_row, rows, sizeof(float));
    // Rows of one matrix are solved under one Hessian, so every rank with rows has the same outcome; ranks without rows
    // learn it from rank 0.
    if (by_rows)
      job_.host.broadcast(&result.outcomes[wave.begin], sizeof(MatrixOutcome), 0);
    else
      job_.host.all_gather(result.outcomes.data() + wave.begin, matrices, sizeof(MatrixOutcome));
  }
  job_.backend.synchronize();
}

void TapSolver::solve_wave(Tap tap, TapHessian& hessian, const HessianPool& pool, const StackView& weights, Range wave,
                           TapResult& result) {
  const int ranks = job_.host.size(), rank = job_.host.rank();
  // One matrix: its rows are independent given the factor, so ranks take rows. Several: ranks take whole matrices.
  const bool alone = owned(tap), by_rows = !alone && wave.size() == 1, shared = shared_hessian(tap);
  if (!alone) {
    const Reduction how = reduction(tap, wave);
    start(hessian, how);
    complete(hessian, how);
  }
  // Rows of one matrix, or matrices of the wave.
  const Range own = alone     ? Range{0, wave.size()}
                    : by_rows ? part(weights.rows, ranks, rank)
                              : part(wave.size(), ranks, rank);
  const int64_t here = wave.begin - job_.own_matrices(layer_, tap).begin;  // in `weights`
  StackView mine = weights.range(here, here + wave.size());
  mine = by_rows ? mine.row_range(own.begin, own.end) : mine.range(own.begin, own.end);
  Quantized solved;
  report_progress("a reduction");
  std::optional<PhaseTimer> waiting(std::in_place, job_.seconds, "wait");  // for the slowest rank; the solve has phases
  agree(job_.host, [&] {
    if (own.size() == 0) return;
    HessianStack stack;
    const bool whole = by_rows || shared;
    stack.sums = whole ? hessian.sums.stack() : hessian.sums.stack().range(own.begin, own.end);
    if (whole)
      stack.tokens = hessian.tokens;
    else
      stack.tokens.assign(hessian.tokens.begin() + own.begin, hessian.tokens.begin() + own.end);
    const Range matrices = by_rows ? wave : Range{wave.begin + own.begin, wave.begin + own.end};
    solved = shardq::solve(job_.backend, mine, std::move(stack), pool.view(), pool.tokens, job_.recipe.scheme,
                           options_of(tap), names(tap, matrices), job_.seconds);
  });
  waiting.reset();
  if (by_rows)
    place(result, std::move(solved), wave.begin * weights.rows + own.begin, wave.begin);
  else
    place(result, std::move(solved), (wave.begin + own.begin) * weights.rows, wave.begin + own.begin);
  if (!alone) gather(result, wave, by_rows);
}

TapResult TapSolver::solve(Tap tap, LayerForward& forward, ChunkStore& chunks, const StackView& weights) {
  Stopwatch watch;
  TapResult result = new_result(tap);
  const int64_t count = result.codes.shape()[0];
  // Sums over ranks, unless only the pool wants them, set out with the last chunk.
  const auto accumulate = [&](Range range, bool send) {
    TapHessian hessian = with_room(chunks, [&] { return new_hessian(tap, range); });
    const std::optional<Reduction> early =
        send && leaves_early(tap, range) ? std::optional(reduction(tap, range)) : std::nullopt;
    int64_t visited = 0;
    const auto add_chunk = [&](ChunkState& chunk) {
      add(hessian, tap, forward, chunks, chunk, ++visited == job_.most_chunks && early ? &*early : nullptr);
    };
    // Ranks with fewer chunks than others send where those add their last one: collectives come in the same order
    // everywhere, safe points among them.
    const auto send_rest = [&] {
      if (early) start(hessian, *early);
    };
    if (owned(tap) && tap == Tap::gate_up && !chunks.offloaded())
      each_chunk_in_turns(
          chunks, true, [&](ChunkState& chunk) { move(tap, forward, chunks, chunk); }, add_chunk);
    else
      each_chunk(chunks, add_chunk, send_rest);
    reduce_exact(hessian, tap);
    return hessian;
  };
  if (shared_hessian(tap)) {
    TapHessian hessian = accumulate({0, 1}, false);
    solve_wave(tap, hessian, {}, weights, {0, count}, result);
    result.seconds = watch.seconds();
    return result;
  }
  const std::vector<Range> ranges = waves(tap);
  // The pool is the sum over ALL experts before any is solved. With several waves it takes a pass of its own.
  HessianPool pool = new_pool(tap);
  if (pool.sum && ranges.size() > 1) {
    for (const Range& range : ranges) add_to_pool(pool, accumulate(range, false));
    finish_pool(pool, tap);
  }
  for (const Range& range : ranges) {
    TapHessian hessian = accumulate(range, true);
    if (ranges.size() == 1) {
      add_to_pool(pool, hessian);
      finish_pool(pool, tap);
    }
    solve_wave(tap, hessian, pool, weights, range, result);
  }
  if (owned(tap)) gather(result, {0, count}, false);
  if (layer_.moe && tap == Tap::down && job_.recipe.experts == ExpertTokens::all) advance(tap, forward, chunks);
  result.seconds = watch.seconds();
  return result;
}

TapResult TapSolver::solve_accumulated(Tap tap, TapHessian hessian, const StackView& weights) {
  Stopwatch watch;
  TapResult result = new_result(tap);
  HessianPool pool = new_pool(tap);
  add_to_pool(pool, hessian);
  finish_pool(pool, tap);
  const Range all{0, result.codes.shape()[0]};
  solve_wave(tap, hessian, pool, weights, owned(tap) ? job_.own_matrices(layer_, tap) : all, result);
  if (owned(tap)) gather(result, all, false);
  result.seconds = watch.seconds();
  return result;
}

TapResult TapSolver::round(Tap tap, const StackView& weights) {
  Stopwatch watch;
  TapResult result = new_result(tap);
  const int ranks = job_.host.size(), rank = job_.host.rank();
  const int64_t count = result.codes.shape()[0];
  const bool alone = owned(tap), by_rows = !alone && count == 1;
  const Range own = by_rows ? part(weights.rows, ranks, rank) : part(count, ranks, rank);
  const StackView mine = alone     ? weights
                         : by_rows ? weights.row_range(own.begin, own.end)
                                   : weights.range(own.begin, own.end);
  Quantized rounded;
  agree(job_.host, [&] {
    PhaseTimer timer(job_.seconds, "scales");
    if (own.size() > 0) rounded = round_to_nearest(job_.backend, mine, job_.recipe.scheme);
    job_.backend.synchronize();
  });
  place(result, std::move(rounded), by_rows ? own.begin : own.begin * weights.rows, by_rows ? 0 : own.begin);
  gather(result, {0, count}, by_rows);
  result.seconds = watch.seconds();
  return result;
}

}  // namespace shardq
