// TapSolver's walks over chunks: how they come to a tap, and what of their inputs goes into its Hessian.
#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "pipeline/tap_solver.hpp"

namespace shardq {
namespace {

ChunkState clone(Backend& backend, const ChunkState& chunk) {
  ChunkState copy;
  copy.starts = chunk.starts;
  copy.hidden = Tensor(backend, chunk.hidden.dtype(), chunk.hidden.shape(), "hidden states (copy)");
  backend.copy(copy.hidden.data(), chunk.hidden.data(), chunk.hidden.bytes());
  return copy;
}

}  // namespace

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

void TapSolver::add(TapHessian& hessian, Tap tap, LayerForward& forward, ChunkStore& chunks, ChunkState& chunk,
                    const Reduction* early) {
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
    if (early) {
      with_room(chunks, [&] { prepare_sending(hessian); });
      add_rows_and_send(hessian, input.x.row_range(first, last), offsets, *early);
    } else {
      add_rows(hessian, 0, input.x.row_range(first, last), offsets);
    }
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

void TapSolver::each_chunk(ChunkStore& chunks, const std::function<void(ChunkState&)>& body,
                           const std::function<void()>& before_last) {
  for (int64_t i = 0; i < job_.most_chunks; ++i) {
    if (i < chunks.size()) chunks.visit(i, body);
    if (before_last && i + 1 == job_.most_chunks) before_last();
    safe_point_();
  }
}

}  // namespace shardq
