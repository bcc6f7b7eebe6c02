#include "pipeline/tap_solver.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/fault_point.hpp"

namespace shardq {
namespace {

/// Bytes of one Hessian.
int64_t hessian_bytes(int64_t cols) {
  return cols * cols * 4;
}

/// Scales ranges of matrices to ranges of `unit` elements each.
std::vector<Range> scaled(std::span<const Range> ranges, int64_t unit) {
  std::vector<Range> out;
  for (const Range& r : ranges) out.push_back({r.begin * unit, r.end * unit});
  return out;
}

ChunkState clone(Backend& backend, const ChunkState& chunk) {
  ChunkState copy;
  copy.starts = chunk.starts;
  copy.hidden = Tensor(backend, chunk.hidden.dtype(), chunk.hidden.shape(), "hidden states (copy)");
  backend.copy(copy.hidden.data(), chunk.hidden.data(), chunk.hidden.bytes());
  return copy;
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
  return layer_.moe && (tap == Tap::gate_up || tap == Tap::down) && job_.recipe.experts == ExpertTokens::routed &&
         job_.recipe.solver.kappa_factor > 0;
}

/// min_tokens is a rule for routed experts, whose counts are an accident of routing. A dense linear sees every token
/// there is: with a few it still gains from its Hessian, and rounding the whole model because the calibration set is
/// small would help nobody.
SolverOptions TapSolver::options_of(Tap tap) const {
  SolverOptions options = job_.recipe.solver;
  const bool expert = layer_.moe && (tap == Tap::gate_up || tap == Tap::down);
  if (!expert && options.min_tokens < 0) options.min_tokens = 0;
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

TapHessian TapSolver::new_hessian(Tap tap, Range matrices) {
  TapHessian hessian;
  fault_point("new_hessian");
  const int64_t cols = job_.spec.tap_shape(layer_, tap).cols;
  hessian.matrices = matrices;
  hessian.sums = Tensor(job_.backend, DType::f32, {matrices.size(), cols, cols}, "Hessian sums");
  job_.backend.zero(hessian.sums.data(), hessian.sums.bytes());
  hessian.tokens.assign(matrices.size(), 0);
  if (job_.reproducible) {
    const Shape triangles{matrices.size(), cols * (cols + 1) / 2};
    hessian.packed = Tensor(job_.backend, DType::f32, triangles, "Hessian triangles of a chunk");
    for (Tensor* sum : {&hessian.coarse, &hessian.fine}) {
      *sum = Tensor(job_.backend, DType::i64, triangles, "order-free Hessian sums");
      job_.backend.zero(sum->data(), sum->bytes());
    }
  }
  return hessian;
}

std::vector<TapInput> TapSolver::reach(Tap tap, LayerForward& forward, ChunkStore& chunks, ChunkState& chunk) {
  const auto step = [&] {
    fault_point("forward");
    return forward.inputs(tap, chunk);
  };
  return owned(tap) ? step() : with_room(chunks, step);
}

void TapSolver::add(TapHessian& hessian, Tap tap, LayerForward& forward, ChunkStore& chunks, ChunkState& chunk) {
  const Range m = hessian.matrices;
  if (layer_.moe && tap == Tap::down && job_.recipe.experts == ExpertTokens::all) {
    // Every expert sees every token; the chunk stays at gate/up until all experts have, and solve() then moves it on.
    const int64_t tokens = chunk.starts.back();
    for (int64_t i = m.begin; i < m.end; ++i) {
      MatrixView x;
      {
        PhaseTimer timer(job_.seconds, "forward");
        x = forward.down_input_of_expert(chunk, i);
        job_.backend.synchronize();
      }
      add_rows(hessian, i - m.begin, x, std::vector<int64_t>{0, tokens});
      hessian.tokens[i - m.begin] += tokens;
    }
    return;
  }
  std::vector<TapInput> parts;
  {
    PhaseTimer timer(job_.seconds, "forward");
    parts = reach(tap, forward, chunks, chunk);
    if (shared_hessian(tap)) parts = {{forward.mlp_input(chunk), {0, chunk.starts.back()}}};
    job_.backend.synchronize();
  }
  const int64_t before = owned(tap) ? job_.own_matrices(layer_, tap).begin : 0;
  // Part by part: under expert parallelism a part is one rank's chunk, and order-free sums need a chunk's own sum.
  for (const TapInput& input : parts) {
    const auto begin = input.offsets.begin() + (m.begin - before);
    std::vector<int64_t> offsets(begin, begin + m.size() + 1);
    const int64_t first = offsets.front(), last = offsets.back();
    for (int64_t& o : offsets) o -= first;
    add_rows(hessian, 0, input.x.row_range(first, last), offsets);
    for (int64_t i = 0; i < m.size(); ++i) hessian.tokens[i] += offsets[i + 1] - offsets[i];
  }
}

void TapSolver::add_rows(TapHessian& hessian, int64_t first, const MatrixView& x, const std::vector<int64_t>& offsets) {
  PhaseTimer timer(job_.seconds, "hessian");
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  const StackView sums = hessian.sums.stack().range(first, first + count);
  if (job_.reproducible) {
    // A chunk's own sum first (chunks are the same whatever the ranks), then an addition that no order can change.
    const int64_t triangle = sums.cols * (sums.cols + 1) / 2;
    float* packed = hessian.packed.as<float>() + first * triangle;
    job_.backend.zero(sums.data, count * sums.matrix_stride * 4);
    job_.backend.accumulate_gram(x, sums, offsets);
    job_.backend.pack_lower(sums, packed);
    job_.backend.add_exact(packed, count * triangle, hessian.coarse.as<int64_t>() + first * triangle,
                           hessian.fine.as<int64_t>() + first * triangle);
  } else {
    job_.backend.accumulate_gram(x, sums, offsets);
  }
  job_.backend.synchronize();
}

void TapSolver::reduce_exact(TapHessian& hessian, Tap tap) {
  const bool complete = owned(tap);
  hessian.reduced = complete;
  if (!job_.reproducible) return;
  PhaseTimer timer(job_.seconds, "reduce");
  if (!complete) job_.host.all_reduce_sum(hessian.tokens.data(), static_cast<int64_t>(hessian.tokens.size()));
  if (job_.host.size() > 1 && !complete) {
    job_.device.all_reduce_sum(hessian.coarse.as<int64_t>(), hessian.coarse.size());
    job_.device.all_reduce_sum(hessian.fine.as<int64_t>(), hessian.fine.size());
  }
  job_.backend.read_exact(hessian.coarse.as<int64_t>(), hessian.fine.as<int64_t>(), hessian.coarse.size(),
                          hessian.packed.as<float>());
  job_.backend.unpack_lower(hessian.packed.as<float>(), hessian.sums.stack());
  job_.backend.synchronize();
  hessian.packed = Tensor();
  hessian.coarse = Tensor();
  hessian.fine = Tensor();
  hessian.reduced = true;
}

TapSolver::Reduction TapSolver::reduction(Tap tap, Range wave) const {
  Reduction out;
  const int ranks = job_.host.size();
  for (int r = 0; r < ranks; ++r) out.owners.push_back(part(wave.size(), ranks, r));
  // One matrix: its rows are independent given the factor, so ranks take rows, and all need the Hessian.
  out.scatter = wave.size() > 1 && !shared_hessian(tap) && job_.reduce == ReducePlan::reduce_scatter;
  return out;
}

void TapSolver::start(TapHessian& hessian, const Reduction& reduction) {
  if (hessian.reduced || hessian.started) return;
  PhaseTimer timer(job_.seconds, "reduce");
  hessian.started = true;
  job_.host.all_reduce_sum(hessian.tokens.data(), static_cast<int64_t>(hessian.tokens.size()));
  if (job_.host.size() == 1) return;
  const StackView sums = hessian.sums.stack();
  const int64_t triangle = sums.cols * (sums.cols + 1) / 2;
  hessian.sending = Tensor(job_.backend, DType::f32, {sums.count, triangle}, "packed Hessian triangles");
  job_.backend.pack_lower(sums, hessian.sending.as<float>());
  const Deferred deferred(job_.device);
  if (reduction.scatter)
    job_.device.reduce_scatter_sum(hessian.sending.as<float>(), scaled(reduction.owners, triangle));
  else
    job_.device.all_reduce_sum(hessian.sending.as<float>(), hessian.sending.size());
}

void TapSolver::complete(TapHessian& hessian, const Reduction& reduction) {
  if (hessian.reduced) return;
  PhaseTimer timer(job_.seconds, "reduce");
  hessian.reduced = true;
  if (!hessian.sending) return;
  const StackView sums = hessian.sums.stack();
  const int64_t triangle = hessian.sending.shape()[1];
  const Range mine = reduction.scatter ? reduction.owners[job_.host.rank()] : Range{0, sums.count};
  job_.device.join();
  job_.backend.unpack_lower(hessian.sending.as<float>() + mine.begin * triangle, sums.range(mine.begin, mine.end));
  job_.backend.synchronize();
  hessian.sending = Tensor();
}

void TapSolver::start_reduction(Tap tap, TapHessian& hessian) {
  if (!owned(tap)) start(hessian, reduction(tap, {0, job_.spec.tap_shape(layer_, tap).count}));
}

HessianPool TapSolver::new_pool(Tap tap) {
  HessianPool pool;
  if (!wants_pool(tap)) return pool;
  const int64_t cols = job_.spec.tap_shape(layer_, tap).cols;
  pool.sum = Tensor(job_.backend, DType::f32, {cols, cols}, "pooled Hessian");
  job_.backend.zero(pool.sum.data(), pool.sum.bytes());
  if (!job_.reproducible) return pool;
  for (Tensor* sum : {&pool.coarse, &pool.fine}) {
    *sum = Tensor(job_.backend, DType::i64, {cols * (cols + 1) / 2}, "order-free sum of the pooled Hessian");
    job_.backend.zero(sum->data(), sum->bytes());
  }
  return pool;
}

void TapSolver::add_to_pool(HessianPool& pool, const TapHessian& hessian) {
  if (!pool.sum) return;
  PhaseTimer timer(job_.seconds, "hessian");
  for (int64_t n : hessian.tokens) pool.tokens += n;
  if (!job_.reproducible) return job_.backend.sum_stack(hessian.sums.stack(), pool.sum.matrix());
  // Order-free over experts too: with owners, each rank adds its own.
  const int64_t triangle = pool.coarse.size();
  const Tensor packed(job_.backend, DType::f32, {triangle}, "triangle of one Hessian");
  for (int64_t e = 0; e < hessian.matrices.size(); ++e) {
    job_.backend.pack_lower(hessian.sums.stack().range(e, e + 1), packed.as<float>());
    job_.backend.add_exact(packed.as<float>(), triangle, pool.coarse.as<int64_t>(), pool.fine.as<int64_t>());
  }
}

void TapSolver::finish_pool(HessianPool& pool, Tap tap) {
  if (!pool.sum) return;
  PhaseTimer timer(job_.seconds, "reduce");
  const bool several = job_.host.size() > 1;
  const int64_t cols = pool.sum.shape()[1], triangle = cols * (cols + 1) / 2;
  // Reproducible Hessians are sums over all ranks before they come here, unless each rank has experts of its own.
  const bool complete = job_.reproducible && !owned(tap);
  if (several && !complete) job_.host.all_reduce_sum(&pool.tokens, 1);
  Tensor packed(job_.backend, DType::f32, {triangle}, "packed pooled Hessian");
  if (job_.reproducible) {
    if (several && !complete) {
      job_.device.all_reduce_sum(pool.coarse.as<int64_t>(), triangle);
      job_.device.all_reduce_sum(pool.fine.as<int64_t>(), triangle);
    }
    job_.backend.read_exact(pool.coarse.as<int64_t>(), pool.fine.as<int64_t>(), triangle, packed.as<float>());
    pool.coarse = Tensor();
    pool.fine = Tensor();
  } else {
    if (!several) return;
    job_.backend.pack_lower(pool.sum.stack(), packed.as<float>());
    job_.device.all_reduce_sum(packed.as<float>(), triangle);
  }
  job_.backend.unpack_lower(packed.as<float>(), pool.sum.stack());
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
    for (Tensor* whole : {&result.codes, &result.scales, &result.zeros}) {
      if (!*whole) continue;
      const int64_t cols = whole->shape().back(), size = size_of(whole->dtype());
      job_.device.all_gather(whole->as<char>() + first_row * cols * size, scaled(rows, cols), size);
    }
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
  const auto accumulate = [&](Range range) {
    TapHessian hessian = with_room(chunks, [&] { return new_hessian(tap, range); });
    const auto add_chunk = [&](ChunkState& chunk) { add(hessian, tap, forward, chunks, chunk); };
    if (owned(tap) && tap == Tap::gate_up && !chunks.offloaded())
      each_chunk_in_turns(
          chunks, true, [&](ChunkState& chunk) { move(tap, forward, chunks, chunk); }, add_chunk);
    else
      each_chunk(chunks, add_chunk);
    reduce_exact(hessian, tap);
    return hessian;
  };
  if (shared_hessian(tap)) {
    TapHessian hessian = accumulate({0, 1});
    solve_wave(tap, hessian, {}, weights, {0, count}, result);
    result.seconds = watch.seconds();
    return result;
  }
  const std::vector<Range> ranges = waves(tap);
  // The pool is the sum over ALL experts before any is solved. With several waves it takes a pass of its own.
  HessianPool pool = new_pool(tap);
  if (pool.sum && ranges.size() > 1) {
    for (const Range& range : ranges) add_to_pool(pool, accumulate(range));
    finish_pool(pool, tap);
  }
  for (const Range& range : ranges) {
    TapHessian hessian = accumulate(range);
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

std::vector<TapHessian> TapSolver::accumulate_all(LayerForward& forward, ChunkStore& chunks) {
  std::vector<TapHessian> hessians;
  for (Tap tap : kTaps)
    hessians.push_back(new_hessian(tap, shared_hessian(tap) ? Range{0, 1} : job_.own_matrices(layer_, tap)));
  each_chunk(chunks, [&](ChunkState& chunk) {
    ChunkState copy = clone(job_.backend, chunk);
    for (size_t t = 0; t < hessians.size(); ++t) add(hessians[t], kTaps[t], forward, chunks, copy);
  });
  for (size_t t = 0; t < hessians.size(); ++t) reduce_exact(hessians[t], kTaps[t]);
  return hessians;
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

void TapSolver::move(Tap tap, LayerForward& forward, ChunkStore& chunks, ChunkState& chunk) {
  PhaseTimer timer(job_.seconds, "forward");
  reach(tap, forward, chunks, chunk);
  job_.backend.synchronize();
}

void TapSolver::advance(Tap tap, LayerForward& forward, ChunkStore& chunks) {
  each_chunk(chunks, [&](ChunkState& chunk) { move(tap, forward, chunks, chunk); });
}

void TapSolver::finish(LayerForward& forward, ChunkStore& chunks) {
  PhaseTimer timer(job_.seconds, "forward");
  const auto end = [&](ChunkState& chunk) {
    const auto step = [&] {
      fault_point("forward");
      forward.finish(chunk);
    };
    if (owned(Tap::down))
      step();
    else
      with_room(chunks, step);
  };
  if (owned(Tap::down) && !chunks.offloaded())
    each_chunk_in_turns(
        chunks, false, [&](ChunkState& chunk) { forward.start_return(chunk); }, end);
  else
    for (int64_t i = 0; i < chunks.size(); ++i) chunks.visit(i, end);
  job_.backend.synchronize();
}

void TapSolver::settle() {
  job_.backend.synchronize();
  PhaseTimer timer(job_.seconds, "exchange");
  job_.device.join();
  job_.backend.synchronize();
}

void TapSolver::each_chunk_in_turns(ChunkStore& chunks, bool settle_each, const std::function<void(ChunkState&)>& begin,
                                    const std::function<void(ChunkState&)>& end) {
  // Owners meet at every chunk, so all ranks have as many.
  for (int64_t i = 0; i <= chunks.size(); ++i) {
    if (i < chunks.size()) {
      const Deferred deferred(job_.device);
      chunks.visit(i, begin);
    } else if (!settle_each) {
      settle();
    }
    if (i > 0) chunks.visit(i - 1, end);
    if (settle_each && i < chunks.size()) {
      settle();
      safe_point_();
    }
  }
}

void TapSolver::each_chunk(ChunkStore& chunks, const std::function<void(ChunkState&)>& body) {
  for (int64_t i = 0; i < chunks.size(); ++i) {
    chunks.visit(i, body);
    safe_point_();
  }
  for (int64_t extra = chunks.size(); extra < job_.most_chunks; ++extra) safe_point_();
}

}  // namespace shardq
