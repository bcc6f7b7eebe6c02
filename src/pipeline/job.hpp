#pragma once
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "core/timer.hpp"
#include "io/checkpoint.hpp"
#include "io/token_set.hpp"
#include "kernels/backend.hpp"
#include "model/model_spec.hpp"
#include "pipeline/recipe.hpp"
#include "pipeline/targets.hpp"

namespace shardq {

/// What every part of a quantization run works with. References outlive the run.
struct Job {
  Recipe recipe;
  Backend& backend;
  Communicator& host;    ///< host memory: control, counts, losses
  Communicator& device;  ///< memory of `backend`: Hessians and codes (the same object on the CPU)
  const Checkpoint& checkpoint;
  const ModelSpec& spec;
  const TokenSet& tokens;
  Selection selection;
  DType compute = DType::bf16;
  std::vector<Range> shares;                       ///< samples of each rank, contiguous, in rank order
  std::vector<Range> chunks;                       ///< of all ranks, ranges of samples
  ReducePlan reduce = ReducePlan::reduce_scatter;  ///< resolved, never auto
  ReadMode read = ReadMode::all;                   ///< resolved, never auto
  bool offload = false;                            ///< activations in host memory but for the chunk at work
  int64_t device_memory = 0;                       ///< bytes, of the rank that has least
  bool reproducible = false;                       ///< order-free Hessian sums
  int64_t most_chunks = 0;  ///< chunks of the rank that has most: every rank makes as many safe points
  PhaseSeconds seconds;     ///< of this rank

  Range my_samples() const { return shares[host.rank()]; }
  /// Experts live on owners, and tokens come to them.
  bool expert_parallel() const { return reduce == ReducePlan::all_to_all && host.size() > 1; }
  /// This tap's matrices belong to ranks: weights, inputs and Hessians here are those of own_matrices.
  bool owned(const LayerSpec& layer, Tap tap) const { return expert_parallel() && layer.routed(tap); }
  /// The matrices of a tap whose weights are on this rank.
  Range own_matrices(const LayerSpec& layer, Tap tap) const {
    const int64_t count = spec.tap_shape(layer, tap).count;
    return owned(layer, tap) ? part(count, host.size(), host.rank()) : Range{0, count};
  }
};

/// Chunks: ranges of consecutive whole samples of at most `chunk_tokens` tokens (a longer sample is a chunk of its
/// own). They depend on the tokens alone, not on the ranks: with order-free sums that makes results independent of the
/// ranks.
std::vector<Range> make_chunks(const TokenSet& tokens, Range samples, int64_t chunk_tokens);
/// Contiguous shares of samples with balanced token counts, split between chunks only: every sample exactly once.
/// Contiguous, so that the hidden states of a rank are one range of rows and any other number of ranks can take them
/// over. `chunks` of single samples balance best.
std::vector<Range> balanced_shares(const TokenSet& tokens, const std::vector<Range>& chunks, int ranks);

}  // namespace shardq
