#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/timer.hpp"
#include "kernels/backend.hpp"
#include "quant/scheme.hpp"

namespace shardq {

/// Options of the solve that are no property of the output format.
struct SolverOptions {
  int64_t block_size = 128;
  double damping_fraction = 0.01;  ///< of mean(diag H)
  int damping_retries = 3;         ///< each multiplies damping by 10
  double kappa_factor = 4.0;       ///< shrinkage of expert Hessians: kappa = factor * cols; 0 turns it off (quality.md)
  int64_t min_tokens = -1;         ///< experts with fewer get rtn; -1: 2 * cols when shrinkage is off, else 0
  bool nonfinite_is_error = true;  ///< policy `nonfinite: error | rtn`
  int64_t loss_sample_rows =
      64;  ///< rows a matrix on which the loss of plain rounding is computed for comparison; 0: none
};

/// What happened to one matrix. Source: numerics.md "Damping, dead columns, failure".
enum class Verdict { gptq, gptq_damped, rtn, rtn_few_tokens, rtn_not_positive_definite, rtn_nonfinite };
std::string to_string(Verdict verdict);
/// Inverse of to_string; throws Error(internal) for an unknown one.
Verdict verdict_from_string(const std::string& text);
bool is_fallback(Verdict verdict);  ///< an rtn verdict that was not asked for

/// Per matrix of a stack (for experts: one a expert; for a dense tap: one for the rows at hand).
struct MatrixOutcome {
  Verdict verdict = Verdict::gptq;
  int64_t tokens = 0;
  double damping = 0;  ///< absolute, as added to the diagonal
  int64_t dead_columns = 0;
};

/// A solved stack, in backend memory.
struct Quantized {
  Tensor codes;                         ///< i8 [count, rows, cols], original column order
  Tensor scales;                        ///< f32 [count, rows, groups], values exactly representable in grid.scale_dtype
  Tensor zeros;                         ///< i8 [count, rows, groups]; empty when symmetric
  std::vector<MatrixOutcome> outcomes;  // [count]
  std::vector<float> losses;  ///< [count, rows]: (W - Q) H (W - Q)^T of each row, H normalised by tokens (mean x x^T);
                              ///< 0 for rtn without a factor
  std::vector<float> rtn_losses;  ///< [count, rows]: the same for plain rounding, -1 where not sampled
};

/// Sums of x x^T over tokens (lower triangles) and how many tokens went in.
struct HessianStack {
  StackView sums;  // f32 [count or 1, cols, cols]; count 1 with more weights: shared by all (one factorisation)
  std::vector<int64_t> tokens;  // [count or 1]
};

/// Names for messages: name(i) is matrix i of the stack ("model.layers.3.mlp.experts.17 gate_proj/up_proj").
using MatrixNames = std::vector<std::string>;

/// Quantizes a stack of matrices that share their shape. Pure: knows nothing of ranks, files or models.
///
/// Shapes: weights [count, rows, cols] in backend memory; hessian.sums is overwritten by the normalised Hessian.
/// `pool`, where given (experts, shrinkage on), is the lower triangle [cols, cols] of the SUM over all experts of all
/// ranks, and pool_tokens its tokens. Errors: Error(input) for a non-finite Hessian when nonfinite_is_error, naming the
/// matrix and counts; Error(input) for a scale that overflows its dtype. Source: numerics.md; Frantar et al. 2023
/// (GPTQ) section 3; Babai's nearest plane.
Quantized solve(Backend& backend, StackView weights, HessianStack hessian, MatrixView pool, int64_t pool_tokens,
                const QuantScheme& scheme, const SolverOptions& options, const MatrixNames& names,
                PhaseSeconds& seconds);

/// Round to nearest without any Hessian (method rtn).
Quantized round_to_nearest(Backend& backend, StackView weights, const QuantScheme& scheme);

}  // namespace shardq
