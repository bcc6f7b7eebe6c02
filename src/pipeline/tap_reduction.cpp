// TapSolver's sums over ranks and over experts.
#include "core/error.hpp"
#include "pipeline/tap_solver.hpp"

namespace shardq {

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
  // Here and not at the start: until now sums and tokens are this rank's, and the pool is made of both.
  job_.host.all_reduce_sum(hessian.tokens.data(), static_cast<int64_t>(hessian.tokens.size()));
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

}  // namespace shardq
