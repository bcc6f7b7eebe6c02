#pragma once
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "quant/solver.hpp"

namespace shardq::testing {

/// A layer with correlated inputs of uneven strength, as weights, tokens and sums of x x^T.
struct Problem {
  int64_t count = 1, rows = 0, cols = 0;
  std::vector<float> weights;         // [count, rows, cols], representable in bf16
  std::vector<std::vector<float>> x;  // [count][tokens, cols], representable in bf16
  std::vector<int64_t> tokens;        // [count]

  /// Sums of x x^T in double, rounded once to float: [count, cols, cols], lower triangles.
  std::vector<float> sums() const;
};

struct ProblemShape {
  int64_t count = 1, rows = 64, cols = 128, tokens = 512;
  double correlation = 0.9;  ///< of neighbouring channels
  unsigned seed = 1;
};

/// Tokens of the distribution that `seed` names: channel strengths depend on cols only, so two seeds give two samples
/// of one distribution.
std::vector<float> correlated_tokens(int64_t tokens, int64_t cols, double correlation, unsigned seed);
Problem make_problem(const ProblemShape& shape);

/// What solve() left, on the host.
struct Solved {
  int64_t count = 0, rows = 0, cols = 0, groups = 0, group_size = 0;
  QuantScheme scheme;
  std::vector<int8_t> codes, zeros;
  std::vector<float> scales;
  std::vector<float> hessian;  // normalised, [hessians, cols, cols], lower triangles
  std::vector<MatrixOutcome> outcomes;
  std::vector<float> losses, rtn_losses;

  float scale(int64_t e, int64_t r, int64_t c) const { return scales[(e * rows + r) * groups + c / group_size]; }
  int zero(int64_t e, int64_t r, int64_t c) const {
    return zeros.empty() ? 0 : zeros[(e * rows + r) * groups + c / group_size];
  }
  int8_t code(int64_t e, int64_t r, int64_t c) const { return codes[(e * rows + r) * cols + c]; }
  /// What a reader reconstructs.
  float value(int64_t e, int64_t r, int64_t c) const {
    return dequantize_code(code(e, r, c), scale(e, r, c), zero(e, r, c), scheme.grid.scale_dtype);
  }
};

struct SolveRequest {
  QuantScheme scheme;
  SolverOptions options = {};
  bool shared = false;  ///< one Hessian (the first) for all matrices
  std::vector<float> pool = {};
  int64_t pool_tokens = 0;
  DType weight_dtype = DType::bf16;
};

/// Uploads, solves on the CPU backend, downloads.
Solved run_solve(const Problem& problem, const SolveRequest& request);
/// The same from given sums.
Solved run_solve(const Problem& problem, const SolveRequest& request, std::vector<float> sums);

QuantScheme scheme_of(int bits, int64_t group_size, bool symmetric = true, ActOrder order = ActOrder::none,
                      Observer observer = Observer::minmax);

/// Share of positions where the codes differ.
double differing_share(const std::vector<int8_t>& a, const std::vector<int8_t>& b);

}  // namespace shardq::testing
