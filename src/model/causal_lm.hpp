#pragma once
#include <functional>
#include <span>
#include <vector>

#include "io/checkpoint.hpp"
#include "io/token_set.hpp"
#include "kernels/backend.hpp"
#include "model/model_spec.hpp"

namespace shardq {

/// What a model says about sequences: every token but the first of each is predicted from those before it.
struct EvalResult {
  double loss_sum = 0;                ///< natural logarithm, over all predicted tokens
  int64_t tokens = 0;                 ///< predicted tokens
  std::vector<double> sample_losses;  ///< sum per sample, in the order asked for
  std::vector<std::vector<int32_t>>
      best;  ///< per sample, the most likely token at each predicted position (lowest id on ties)
  double perplexity() const;
};

/// Called after each layer (and once more after the head) with how many of `total` steps are done.
using EvalProgress = std::function<void(int64_t done, int64_t total)>;

/// Runs the model over the named samples, layer by layer: memory holds the hidden states of all of them and the weights
/// of one layer. Rotary tables are made for the longest sequence of the whole set, so that a rank's share gives what
/// the whole would. Errors: Error(input) for a token id outside the vocabulary or a non-finite weight.
EvalResult evaluate(Backend& backend, const Checkpoint& checkpoint, const ModelSpec& spec, const TokenSet& tokens,
                    std::span<const int64_t> samples, DType compute, const EvalProgress& progress = {});

/// Share of predicted positions at which two results name the same token.  Requires: same samples.
double agreement(const EvalResult& a, const EvalResult& b);

/// Final norm and lm_head: logits of hidden states.  Shapes: hidden [rows, hidden] -> logits [rows, vocab], both of the
/// compute dtype.
void head_logits(Backend& backend, const ModelSpec& spec, const Tensor& final_norm, const Tensor& lm_head,
                 MatrixView hidden, MatrixView scratch, MatrixView logits);

}  // namespace shardq
