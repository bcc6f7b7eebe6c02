// TapSolver's sums over ranks and over experts.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "pipeline/tap_solver.hpp"

namespace shardq {
namespace {

/// SHARDQ_REDUCE_SLICES=N or auto: the sums of a stack leave in N collectives, beginning while the last chunk is added.
/// Unset or 0: in one, once all are complete, which stays the rule until GPUs have shown that the other gains.  Every
/// rank must hold the same value.
std::string asked_slices() {
  const char* text = std::getenv("SHARDQ_REDUCE_SLICES");
  return text && std::string_view(text) != "0" ? text : "";
}

/// auto: pieces of at least 64 MiB, which links carry at full rate; more than four would hide little more, and more
/// than the matrices of an owner would be empty.
int64_t slices_for(int64_t triangle_bytes, int64_t matrices_of_owner) {
  constexpr int64_t kLeastBytes = int64_t{64} << 20, kMost = 4;
  const std::string asked = asked_slices();
  const int64_t wanted = asked.empty()     ? 1
                         : asked == "auto" ? std::min(triangle_bytes / kLeastBytes, kMost)
                                           : std::atoll(asked.c_str());
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, matrices_of_owner));
}

/// Which of rank's matrices a slice has.
Range slice_of(std::span<const Range> owners, int64_t slices, int64_t slice, int rank) {
  const Range own = owners[rank];
  const Range piece = part(own.size(), static_cast<int>(slices), static_cast<int>(slice));
  return {own.begin + piece.begin, own.begin + piece.end};
}

/// Where a slice's matrices lie among those that are sent, by rank: slice after slice, in each rank after rank.
std::vector<Range> places_of(std::span<const Range> owners, int64_t slices, int64_t slice) {
  const int ranks = static_cast<int>(owners.size());
  int64_t at = 0;
  for (int64_t s = 0; s < slice; ++s)
    for (int r = 0; r < ranks; ++r) at += slice_of(owners, slices, s, r).size();
  std::vector<Range> places;
  for (int r = 0; r < ranks; ++r) {
    const int64_t end = at + slice_of(owners, slices, slice, r).size();
    places.push_back({at, end});
    at = end;
  }
  return places;
}

}  // namespace

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
  const int64_t cols = job_.spec.tap_shape(layer_, tap).cols;
  if (wave.size() > 1) out.slices = slices_for(wave.size() * (cols * (cols + 1) / 2) * 4, out.owners[0].size());
  return out;
}

bool TapSolver::leaves_early(Tap tap, Range wave) const {
  return job_.host.size() > 1 && !job_.reproducible && !owned(tap) && wave.size() > 1 && !shared_hessian(tap) &&
         job_.recipe.experts == ExpertTokens::routed && !asked_slices().empty();
}

void TapSolver::prepare_sending(TapHessian& hessian) {
  hessian.started = true;
  const StackView sums = hessian.sums.stack();
  const int64_t triangle = sums.cols * (sums.cols + 1) / 2;
  hessian.sending = Tensor(job_.backend, DType::f32, {sums.count, triangle}, "packed Hessian triangles");
}

void TapSolver::send(TapHessian& hessian, const Reduction& reduction, int64_t slice) {
  PhaseTimer timer(job_.seconds, "reduce");
  const StackView sums = hessian.sums.stack();
  const int64_t triangle = hessian.sending.shape()[1];
  const std::vector<Range> places = places_of(reduction.owners, reduction.slices, slice);
  const int64_t first = places.front().begin, count = places.back().end - first;
  std::vector<Range> pieces;  // of the slice, by rank
  for (int r = 0; r < job_.host.size(); ++r) {
    const Range matrices = slice_of(reduction.owners, reduction.slices, slice, r);
    job_.backend.pack_lower(sums.range(matrices.begin, matrices.end),
                            hessian.sending.as<float>() + places[r].begin * triangle);
    pieces.push_back({places[r].begin - first, places[r].end - first});
  }
  const Deferred deferred(job_.device);
  float* data = hessian.sending.as<float>() + first * triangle;
  if (reduction.scatter)
    job_.device.reduce_scatter_sum(data, scaled(pieces, triangle));
  else
    job_.device.all_reduce_sum(data, count * triangle);
}

void TapSolver::add_rows_and_send(TapHessian& hessian, const MatrixView& x, const std::vector<int64_t>& offsets,
                                  const Reduction& reduction) {
  PhaseTimer timer(job_.seconds, "hessian");
  const StackView sums = hessian.sums.stack();
  for (int64_t slice = 0; slice < reduction.slices; ++slice) {
    for (int r = 0; r < job_.host.size(); ++r) {
      const Range m = slice_of(reduction.owners, reduction.slices, slice, r);
      if (m.size() == 0) continue;
      std::vector<int64_t> own(offsets.begin() + m.begin, offsets.begin() + m.end + 1);
      const int64_t first = own.front(), last = own.back();
      for (int64_t& offset : own) offset -= first;
      job_.backend.accumulate_gram(x.row_range(first, last), sums.range(m.begin, m.end), own);
    }
    send(hessian, reduction, slice);
  }
  job_.backend.synchronize();  // for the time of it; collectives go on
}

void TapSolver::start(TapHessian& hessian, const Reduction& reduction) {
  if (hessian.reduced || hessian.started) return;
  hessian.started = true;
  if (job_.host.size() == 1) return;
  {
    PhaseTimer timer(job_.seconds, "reduce");
    prepare_sending(hessian);
  }
  for (int64_t slice = 0; slice < reduction.slices; ++slice) send(hessian, reduction, slice);
}

void TapSolver::complete(TapHessian& hessian, const Reduction& reduction) {
  if (hessian.reduced) return;
  PhaseTimer timer(job_.seconds, "reduce");
  hessian.reduced = true;
  // Here and not at the start: until now sums and tokens are this rank's, and the pool is made of both.
  job_.host.all_reduce_sum(hessian.tokens.data(), static_cast<int64_t>(hessian.tokens.size()));
  if (!hessian.sending) return;
  const StackView sums = hessian.sums.stack();
  const int64_t triangle = hessian.sending.shape()[1];
  job_.device.join();
  for (int64_t slice = 0; slice < reduction.slices; ++slice) {
    const std::vector<Range> places = places_of(reduction.owners, reduction.slices, slice);
    for (int r = 0; r < job_.host.size(); ++r) {
      if (reduction.scatter && r != job_.host.rank()) continue;
      const Range m = slice_of(reduction.owners, reduction.slices, slice, r);
      job_.backend.unpack_lower(hessian.sending.as<float>() + places[r].begin * triangle, sums.range(m.begin, m.end));
    }
  }
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

}  // namespace shardq
