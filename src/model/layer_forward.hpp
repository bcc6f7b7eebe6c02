#pragma once
#include <array>
#include <optional>
#include <span>
#include <vector>

#include "kernels/backend.hpp"
#include "model/expert_exchange.hpp"
#include "model/model_spec.hpp"

namespace shardq {

/// Weights of one decoder layer in backend memory; taps are stacks [count, rows, cols] in the row order of
/// LayerSpec::linears.
struct LayerWeights {
  std::array<Tensor, 4> taps;  ///< by Tap; qkv and o are stacks of one; gate_up [count, 2 * intermediate, hidden]: gate
                               ///< rows, then up rows
  std::array<Tensor, 4> biases;  ///< [rows] or empty (dense taps only)
  Range experts;                 ///< which experts the gate_up and down stacks hold; {0, 0} in dense layers
  Tensor input_norm, post_attention_norm, q_norm, k_norm, router;
};

/// A few whole sequences on their way through a layer. The tap state is what the next step needs, nothing else.
struct ChunkState {
  std::vector<int64_t> starts;  ///< sequence offsets into rows, sequences + 1 values
  Tensor hidden;                ///< [tokens, hidden]: the residual stream
  Tensor tap;                   ///< input of the tap just reached, kept where recomputing it would be dear (o, down)
  Tensor order, place, route_weights;  ///< MoE routing of this chunk
  std::vector<int64_t> offsets;  ///< rows of each expert in the tap input, count + 1 values ({0, tokens} for dense)
  OwnedRows owned;  ///< under expert parallelism: inputs of gate/up of own experts, of all ranks' tokens of this chunk
  Tensor outgoing, returned;  ///< outputs of own experts, and of all experts for own tokens, on their way back
  bool returning = false;     ///< they are on their way
  std::optional<Tap> at;      ///< the tap whose input was reached last; empty between layers
};

/// Input of a tap for one chunk, in expert order for MoE; valid until the next call for this chunk.
struct TapInput {
  MatrixView x;                  // [rows, cols]
  std::vector<int64_t> offsets;  // [count + 1]
};

/// Walks chunks through one decoder layer, tap by tap, so that the weights of a tap can be replaced between its input
/// being seen and its forward. Each linear runs once: to_X runs the linears of the PREVIOUS tap with the weights that
/// `weights` holds now, and ends at X's input. Called again for a chunk that is already there, it gives the same input
/// without running anything twice. Requires: `spec`, `layer` and `weights` outlive the object; steps in order
/// (Error(internal) otherwise). Source: transformers modeling_{llama,mistral,qwen2,qwen3,mixtral,qwen3_moe}.py.
///
/// With `exchange`, a routed layer's gate/up and down stacks hold the own experts only, and their inputs are those of
/// every rank's tokens: reaching gate_up and finishing are then collectives, for which chunks without tokens stand in
/// on ranks that have fewer.
class LayerForward {
 public:
  LayerForward(Backend& backend, const ModelSpec& spec, const LayerSpec& layer, const LayerWeights& weights,
               const RopeTable& rope, DType compute, ExpertExchange* exchange = nullptr);

  /// hidden -> input of q/k/v.
  TapInput to_qkv(ChunkState& chunk);
  /// q/k/v, rope, attention -> input of o (kept in chunk.tap).
  TapInput to_o(ChunkState& chunk);
  /// o and residual, norm, router -> input of gate/up, gathered by expert (recomputed by the next step, not kept).
  TapInput to_gate_up(ChunkState& chunk);
  /// gate/up, SiLU product -> input of down (kept in chunk.tap).
  TapInput to_down(ChunkState& chunk);
  /// down, weighted combination, residual: chunk.hidden becomes the next layer's input; everything else is released.
  void finish(ChunkState& chunk);
  /// First part of finish under expert parallelism (nothing otherwise): down, and its outputs on their way to the
  /// tokens.
  void start_return(ChunkState& chunk);
  /// The tap's input by name; calls one of the above.
  TapInput to(Tap tap, ChunkState& chunk);
  /// The same in parts that were routed together: one, or under expert parallelism one a rank that sent rows.
  std::vector<TapInput> inputs(Tap tap, ChunkState& chunk);
  /// For `experts: all`: the input of the router and of every expert's gate/up, one row a token.  Requires: the chunk
  /// is at gate_up.
  MatrixView mlp_input(ChunkState& chunk);
  /// For `experts: all`: the input of down for EVERY token at expert e, from the gate/up input; scratch reused between
  /// calls.
  MatrixView down_input_of_expert(ChunkState& chunk, int64_t expert);

 private:
  void route(ChunkState& chunk, MatrixView x);
  MatrixView normed(const ChunkState& chunk, const Tensor& weight);
  TapInput gate_up_input(ChunkState& chunk);
  const int32_t* positions(const ChunkState& chunk);
  void run_linear(Tap tap, MatrixView x, const std::vector<int64_t>& offsets, MatrixView y, bool accumulate);
  /// Own experts' rows part by part: a matrix product must not depend on how many ranks there are.
  void run_owned(Tap tap, const OwnedRows& owned, MatrixView x, MatrixView y);
  bool exchanged(Tap tap) const { return exchange_ && layer_.routed(tap); }

  Backend& backend_;
  const ModelSpec& spec_;
  const LayerSpec& layer_;
  const LayerWeights& weights_;
  DType compute_;
  ExpertExchange* exchange_;
  Tensor cosine_, sine_;
  int64_t rope_length_ = 0;
  std::vector<int64_t> positions_starts_;  ///< the sequences that positions_ was made for
  Tensor positions_;
  Tensor x_, gathered_;  ///< scratch: the last normed and gathered tap input
  Tensor expert_scratch_, expert_act_;
};

}  // namespace shardq
