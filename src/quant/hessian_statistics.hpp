#pragma once
#include <cstdint>
#include <vector>

#include "quant/solver.hpp"

namespace shardq {

/// What the solver must know on the host of each normalised Hessian of a stack.
struct HessianStatistics {
  std::vector<float> diagonal;     ///< [count, cols], after normalisation and shrinkage
  std::vector<double> mean;        ///< [count] of the diagonal
  std::vector<int64_t> dead;       ///< [count] zeros on the diagonal
  std::vector<int64_t> nonfinite;  ///< [count] NaN or Inf on the diagonal of the sums as they came
  bool shrunk = false;             ///< a pooled Hessian was blended in
};

/// Blending of expert Hessians with their pool; off where the view is empty or kappa is 0.
struct Shrinkage {
  MatrixView pool;  // f32 [cols, cols], sum over all experts of all ranks
  int64_t tokens = 0;
  double kappa = 0;
};

/// Turns sums into means in place: H = (S + kappa P) / (tokens + kappa), P = pool / pool tokens; S / tokens without a
/// pool. Errors: Error(input) naming the matrix and its non-finite entries when options.nonfinite_is_error. Source:
/// quality.md "shrinkage"; numerics.md "Ranks" (divided once, after the reduction).
HessianStatistics normalise(Backend& backend, const HessianStack& hessian, const Shrinkage& shrinkage,
                            const SolverOptions& options, const MatrixNames& names);

/// gptq, or the fallback that is certain before any factorisation (few tokens, not finite), with tokens and dead
/// columns filled in.
std::vector<MatrixOutcome> first_verdicts(const HessianStatistics& statistics, const std::vector<int64_t>& tokens,
                                          int64_t cols, const SolverOptions& options);

/// [count, cols]: columns by descending diagonal, ties by index; the identity where the diagonal is not finite.
std::vector<int32_t> descending_order(const HessianStatistics& statistics, int64_t cols);

}  // namespace shardq
