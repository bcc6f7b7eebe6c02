#pragma once
#include <cstdint>
#include <vector>

#include "quant_problem.hpp"

// GPTQ in double precision, four ways, on one matrix with given scales. They share only the grid.
namespace shardq::testing {

/// One matrix with everything that the column loop needs. Positions: the order in which columns are quantized.
struct ReferenceProblem {
  int64_t rows = 0, cols = 0;
  std::vector<double> weights;  // [rows, cols] at positions
  std::vector<double> hessian;  // [cols, cols] full, damped, at positions
  std::vector<float> scales;    // [rows, cols] at positions
  std::vector<int> zeros;       // [rows, cols] at positions
  std::vector<int64_t> column;  // position -> original column
  Grid grid;
};

/// Matrix e as the solver saw it: the normalised Hessian it left, its damping, dead columns set to 1, its order and
/// scales.
ReferenceProblem reference_problem(const Problem& problem, const Solved& solved, int64_t e,
                                   bool shared_hessian = false);

/// R and T of H = R R^T, T(k, j) = R(k, j) / R(j, j): [cols, cols] row-major.
struct ReferenceFactor {
  std::vector<double> t, pivots;
};
ReferenceFactor reversed_cholesky(const std::vector<double>& h, int64_t n);

/// Codes [rows, cols] at ORIGINAL columns, and the loss of every row.
struct ReferenceCodes {
  std::vector<int8_t> codes;
  std::vector<double> losses;
};
/// Inverse-free form; left-looking blocks of `block` columns (their sums are kept apart, as a blocked code has them).
ReferenceCodes inverse_free(const ReferenceProblem& p, int64_t block);
/// Cholesky, inverse, Cholesky of the inverse; lazy right-looking blocks. Source: Frantar et al., algorithm 1.
ReferenceCodes three_step(const ReferenceProblem& p, int64_t block);
/// Equation 2: after each column its row and column are removed from H^-1 by Gaussian elimination, all weights updated.
ReferenceCodes explicit_obs(const ReferenceProblem& p);

/// What each column was rounded from, [rows, cols] at positions, given the codes that the run itself chose before it.
std::vector<double> shifted_weights(const ReferenceProblem& p, const Solved& solved, int64_t e);

/// Largest distance, in steps, by which any unclipped code of `codes` misses being the nearest one to its shifted
/// weight, the shift computed in double from the codes before it: 0 for a perfect run. No cascade: every column is
/// judged on the history that the run itself made.
double worst_miss(const ReferenceProblem& p, const Solved& solved, int64_t e);

}  // namespace shardq::testing
