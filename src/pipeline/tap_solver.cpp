#include "pipeline/tap_solver.hpp"

#include <algorithm>

#include "core/error.hpp"

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

std::vector<Range> TapSolver::waves(Tap tap, int64_t count) const {
  const int64_t cols = job_.spec.tap_shape(layer_, tap).cols;
  return split_waves(count, cols, hessian_budget(job_.recipe, job_.backend.memory().total));
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

void TapSolver::add(TapHessian& hessian, Tap tap, LayerForward& forward, ChunkState& chunk) {
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
  TapInput input;
  {
    PhaseTimer timer(job_.seconds, "forward");
    input = forward.to(tap, chunk);
    if (shared_hessian(tap)) input = {forward.mlp_input(chunk), {0, chunk.starts.back()}};
    job_.backend.synchronize();
  }
  std::vector<int64_t> offsets(input.offsets.begin() + m.begin, input.offsets.begin() + m.end + 1);
  const int64_t first = offsets.front(), last = offsets.back();
  for (int64_t& o : offsets) o -= first;
  add_rows(hessian, 0, input.x.row_range(first, last), offsets);
  for (int64_t i = 0; i < m.size(); ++i) hessian.tokens[i] += offsets[i + 1] - offsets[i];
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

void TapSolver::reduce_exact(TapHessian& hessian) {
  if (!job_.reproducible) return;
  PhaseTimer timer(job_.seconds, "reduce");
  job_.host.all_reduce_sum(hessian.tokens.data(), static_cast<int64_t>(hessian.tokens.size()));
  if (job_.host.size() > 1) {
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

void TapSolver::reduce(TapHessian& hessian, bool scatter, std::span<const Range> owners) {
  if (hessian.reduced) return;
  PhaseTimer timer(job_.seconds, "reduce");
  job_.host.all_reduce_sum(hessian.tokens.data(), static_cast<int64_t>(hessian.tokens.size()));
  if (job_.host.size() == 1) return;
  const StackView sums = hessian.sums.stack();
  const int64_t triangle = sums.cols * (sums.cols + 1) / 2;
  Tensor packed(job_.backend, DType::f32, {sums.count, triangle}, "packed Hessian triangles");
  job_.backend.pack_lower(sums, packed.as<float>());
  if (scatter) {
    job_.device.reduce_scatter_sum(packed.as<float>(), scaled(owners, triangle));
    const Range own = owners[job_.host.rank()];
    job_.backend.unpack_lower(packed.as<float>() + own.begin * triangle, sums.range(own.begin, own.end));
  } else {
    job_.device.all_reduce_sum(packed.as<float>(), packed.size());
    job_.backend.unpack_lower(packed.as<float>(), sums);
  }
  job_.backend.synchronize();
}

TapResult TapSolver::new_result(const StackView& w) {
  TapResult result;
  const int64_t groups =
      (w.cols + group_size_for(job_.recipe.scheme, w.cols) - 1) / group_size_for(job_.recipe.scheme, w.cols);
  result.codes = Tensor(job_.backend, DType::i8, {w.count, w.rows, w.cols}, "codes");
  result.scales = Tensor(job_.backend, DType::f32, {w.count, w.rows, groups}, "scales");
  if (!job_.recipe.scheme.grid.symmetric)
    result.zeros = Tensor(job_.backend, DType::i8, {w.count, w.rows, groups}, "zero points");
  result.outcomes.resize(w.count);
  result.losses.assign(w.count * w.rows, 0.0f);
  result.rtn_losses.assign(w.count * w.rows, -1.0f);
  return result;
}

void TapSolver::finish_wave(TapResult& result, const StackView& w, Range wave, bool by_rows, Quantized mine,
                            Range own) {
  PhaseTimer timer(job_.seconds, "gather");
  Backend& backend = job_.backend;
  const int ranks = job_.host.size();
  const int64_t wave_rows = wave.size() * w.rows, first_row = wave.begin * w.rows;
  std::vector<Range> rows;  // of the wave, by rank
  for (int r = 0; r < ranks; ++r) {
    const Range share = by_rows ? part(w.rows, ranks, r) : part(wave.size(), ranks, r);
    rows.push_back(by_rows ? share : Range{share.begin * w.rows, share.end * w.rows});
  }
  const Range my_rows = rows[job_.host.rank()];
  result.pieces.push_back({{first_row + my_rows.begin, first_row + my_rows.end}, {first_row, first_row + wave_rows}});

  const auto gather = [&](Tensor& whole, const Tensor& part_tensor) {
    if (!whole) return;
    const int64_t cols = whole.shape().back(), bytes = cols * size_of(whole.dtype());
    char* base = whole.as<char>() + first_row * bytes;
    if (part_tensor) backend.copy(base + my_rows.begin * bytes, part_tensor.data(), part_tensor.bytes());
    if (ranks > 1) job_.device.all_gather(base, scaled(rows, cols), size_of(whole.dtype()));
  };
  gather(result.codes, mine.codes);
  gather(result.scales, mine.scales);
  gather(result.zeros, mine.zeros);

  std::copy(mine.losses.begin(), mine.losses.end(), result.losses.begin() + first_row + my_rows.begin);
  std::copy(mine.rtn_losses.begin(), mine.rtn_losses.end(), result.rtn_losses.begin() + first_row + my_rows.begin);
  if (by_rows) {
    // Rows of one matrix are solved under one Hessian, so every rank with rows has the same outcome; ranks without rows
    // learn it from rank 0.
    if (!mine.outcomes.empty()) result.outcomes[wave.begin] = mine.outcomes[0];
  } else {
    std::copy(mine.outcomes.begin(), mine.outcomes.end(), result.outcomes.begin() + wave.begin + own.begin);
  }
  if (ranks > 1) {
    job_.host.all_gather(result.losses.data() + first_row, rows, sizeof(float));
    job_.host.all_gather(result.rtn_losses.data() + first_row, rows, sizeof(float));
    if (by_rows) {
      job_.host.broadcast(&result.outcomes[wave.begin], sizeof(MatrixOutcome), 0);
    } else {
      std::vector<Range> owners;
      for (int r = 0; r < ranks; ++r) owners.push_back(part(wave.size(), ranks, r));
      job_.host.all_gather(result.outcomes.data() + wave.begin, owners, sizeof(MatrixOutcome));
    }
  }
  backend.synchronize();
}

void TapSolver::solve_wave(Tap tap, TapHessian& hessian, MatrixView pool, int64_t pool_tokens, const StackView& weights,
                           Range wave, TapResult& result) {
  const int ranks = job_.host.size(), rank = job_.host.rank();
  // One matrix: its rows are independent given the factor, so ranks take rows. Several: ranks take whole matrices.
  const bool by_rows = wave.size() == 1;
  const bool shared = shared_hessian(tap);
  std::vector<Range> owners;
  for (int r = 0; r < ranks; ++r) owners.push_back(part(wave.size(), ranks, r));
  reduce(hessian, !by_rows && !shared && job_.recipe.reduce == ReducePlan::reduce_scatter, owners);

  const Range own = by_rows ? part(weights.rows, ranks, rank) : owners[rank];
  StackView mine = weights.range(wave.begin, wave.end);
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
    solved = shardq::solve(job_.backend, mine, std::move(stack), pool, pool_tokens, job_.recipe.scheme, options_of(tap),
                           names(tap, matrices), job_.seconds);
  });
  finish_wave(result, weights, wave, by_rows, std::move(solved), own);
}

TapResult TapSolver::solve(Tap tap, LayerForward& forward, std::vector<ChunkState>& chunks, const StackView& weights) {
  Stopwatch watch;
  TapResult result = new_result(weights);
  if (shared_hessian(tap)) {
    TapHessian hessian = new_hessian(tap, {0, 1});
    each_chunk(chunks, [&](ChunkState& chunk) { add(hessian, tap, forward, chunk); });
    reduce_exact(hessian);
    solve_wave(tap, hessian, {}, 0, weights, {0, weights.count}, result);
    result.seconds = watch.seconds();
    return result;
  }
  const std::vector<Range> ranges = waves(tap, weights.count);
  const auto accumulate = [&](Range range) {
    TapHessian hessian = new_hessian(tap, range);
    each_chunk(chunks, [&](ChunkState& chunk) { add(hessian, tap, forward, chunk); });
    reduce_exact(hessian);
    return hessian;
  };
  Tensor pool;
  int64_t pool_tokens = 0;
  if (wants_pool(tap)) {
    pool = Tensor(job_.backend, DType::f32, {weights.cols, weights.cols}, "pooled Hessian");
    job_.backend.zero(pool.data(), pool.bytes());
  }
  // The pool is the sum over ALL experts, in expert order, before any is solved. With several waves it takes a pass of
  // its own.
  const auto add_to_pool = [&](const TapHessian& hessian) {
    PhaseTimer timer(job_.seconds, "hessian");
    job_.backend.sum_stack(hessian.sums.stack(), pool.matrix());
    for (int64_t n : hessian.tokens) pool_tokens += n;
  };
  const auto reduce_pool = [&] {
    if (job_.reproducible) return;  // summed from Hessians that are sums over all ranks already
    PhaseTimer timer(job_.seconds, "reduce");
    job_.host.all_reduce_sum(&pool_tokens, 1);
    if (job_.host.size() == 1) return;
    const int64_t triangle = weights.cols * (weights.cols + 1) / 2;
    Tensor packed(job_.backend, DType::f32, {triangle}, "packed pooled Hessian");
    job_.backend.pack_lower(pool.stack(), packed.as<float>());
    job_.device.all_reduce_sum(packed.as<float>(), triangle);
    job_.backend.unpack_lower(packed.as<float>(), pool.stack());
  };
  if (pool && ranges.size() > 1) {
    for (const Range& range : ranges) add_to_pool(accumulate(range));
    reduce_pool();
  }
  for (const Range& range : ranges) {
    TapHessian hessian = accumulate(range);
    if (pool && ranges.size() == 1) {
      add_to_pool(hessian);
      reduce_pool();
    }
    solve_wave(tap, hessian, pool ? pool.matrix() : MatrixView{}, pool_tokens, weights, range, result);
  }
  if (layer_.moe && tap == Tap::down && job_.recipe.experts == ExpertTokens::all) advance(tap, forward, chunks);
  result.seconds = watch.seconds();
  return result;
}

std::vector<TapHessian> TapSolver::accumulate_all(LayerForward& forward, std::vector<ChunkState>& chunks) {
  std::vector<TapHessian> hessians;
  for (Tap tap : kTaps)
    hessians.push_back(new_hessian(tap, {0, shared_hessian(tap) ? 1 : job_.spec.tap_shape(layer_, tap).count}));
  each_chunk(chunks, [&](ChunkState& chunk) {
    ChunkState copy = clone(job_.backend, chunk);
    for (size_t t = 0; t < hessians.size(); ++t) add(hessians[t], kTaps[t], forward, copy);
  });
  for (TapHessian& hessian : hessians) reduce_exact(hessian);
  return hessians;
}

TapResult TapSolver::solve_accumulated(Tap tap, TapHessian hessian, const StackView& weights) {
  Stopwatch watch;
  TapResult result = new_result(weights);
  Tensor pool;
  int64_t pool_tokens = 0;
  if (wants_pool(tap)) {
    pool = Tensor(job_.backend, DType::f32, {weights.cols, weights.cols}, "pooled Hessian");
    job_.backend.zero(pool.data(), pool.bytes());
    job_.backend.sum_stack(hessian.sums.stack(), pool.matrix());
    for (int64_t n : hessian.tokens) pool_tokens += n;
    if (!hessian.reduced) {
      job_.host.all_reduce_sum(&pool_tokens, 1);
      if (job_.host.size() > 1) job_.device.all_reduce_sum(pool.as<float>(), pool.size());
    }
  }
  solve_wave(tap, hessian, pool ? pool.matrix() : MatrixView{}, pool_tokens, weights, {0, weights.count}, result);
  result.seconds = watch.seconds();
  return result;
}

TapResult TapSolver::round(const StackView& weights) {
  Stopwatch watch;
  TapResult result = new_result(weights);
  const int ranks = job_.host.size(), rank = job_.host.rank();
  const bool by_rows = weights.count == 1;
  const Range own = part(by_rows ? weights.rows : weights.count, ranks, rank);
  const StackView mine = by_rows ? weights.row_range(own.begin, own.end) : weights.range(own.begin, own.end);
  Quantized rounded;
  agree(job_.host, [&] {
    PhaseTimer timer(job_.seconds, "scales");
    if (own.size() > 0) rounded = round_to_nearest(job_.backend, mine, job_.recipe.scheme);
    job_.backend.synchronize();
  });
  finish_wave(result, weights, {0, weights.count}, by_rows, std::move(rounded), own);
  result.seconds = watch.seconds();
  return result;
}

void TapSolver::advance(Tap tap, LayerForward& forward, std::vector<ChunkState>& chunks) {
  each_chunk(chunks, [&](ChunkState& chunk) {
    PhaseTimer timer(job_.seconds, "forward");
    forward.to(tap, chunk);
    job_.backend.synchronize();
  });
}

void TapSolver::each_chunk(std::vector<ChunkState>& chunks, const std::function<void(ChunkState&)>& body) {
  for (ChunkState& chunk : chunks) {
    body(chunk);
    safe_point_();
  }
  for (int64_t extra = static_cast<int64_t>(chunks.size()); extra < job_.most_chunks; ++extra) safe_point_();
}

}  // namespace shardq
