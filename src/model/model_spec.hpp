#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/view.hpp"

namespace shardq {

class Checkpoint;

/// Rotary position embedding. Source: transformers, modeling_rope_utils.py.
struct RopeSpec {
  enum class Type { default_, linear, dynamic, llama3, yarn } type = Type::default_;
  double theta = 10000.0;
  double factor = 1.0;
  int64_t original_max_position = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1, attention_factor = 0, mscale = 0,
         mscale_all_dim = 0;  // yarn; attention_factor 0: derived
  bool truncate = true;
};

/// The four places of a decoder layer where linears take their input; one Hessian each (one per expert for MoE).
enum class Tap { qkv, o, gate_up, down };
inline constexpr Tap kTaps[] = {Tap::qkv, Tap::o, Tap::gate_up, Tap::down};
const char* to_string(Tap tap);

/// One linear of a layer as it stands in the checkpoint. Linears of a tap are stacked by rows in the order of this
/// table.
struct LinearSpec {
  std::string module;  ///< output module name, e.g. "model.layers.3.mlp.experts.17.gate_proj"
  Tap tap = Tap::qkv;
  int64_t rows = 0, cols = 0;
  int64_t expert = -1;     ///< -1: not a routed expert
  int64_t row_offset = 0;  ///< first row within the tap's (expert's) stacked matrix [rows, cols]
  // Where the weight comes from: a tensor of its own, or rows of a fused tensor.
  std::string tensor;             ///< e.g. module + ".weight", or "...experts.gate_up_proj" (fused 3-D)
  int64_t fused_index = -1;       ///< index on the first axis of a fused 3-D tensor; -1: the tensor is 2-D
  int64_t fused_row = 0;          ///< first row inside that slice (up_proj starts at moe_intermediate)
  bool fused_transposed = false;  ///< slice is stored [cols, rows]
  std::string bias;               ///< tensor name, or empty
};

/// One decoder layer.
struct LayerSpec {
  int64_t index = 0;
  std::string prefix;  ///< "model.layers.3."
  bool moe = false;
  /// A tap of routed experts: a stack of one matrix an expert.
  bool routed(Tap tap) const { return moe && (tap == Tap::gate_up || tap == Tap::down); }
  int64_t window = 0;  ///< sliding window, 0: full
  std::vector<LinearSpec> linears;
  std::string input_norm, post_attention_norm, q_norm, k_norm,
      router;  ///< tensor names; q_norm, k_norm, router may be empty
  /// Tensors of this layer, by prefix, that are no weight of a linear above (norms, biases, router, unknown ones):
  /// copied to the output as they are.
  std::vector<std::string> passthrough;
};

/// What the program needs to know of an architecture. Made from config.json and checked against the checkpoint's
/// tensors.
struct ModelSpec {
  std::string model_type;     ///< llama, mistral, qwen2, qwen3, mixtral, qwen3_moe
  std::string architecture;   ///< LlamaForCausalLM, ...
  DType dtype = DType::bf16;  ///< of the weights in the files
  int64_t vocab = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0, max_position = 0;
  int64_t experts = 0, top_k = 0, moe_intermediate = 0;
  bool normalize_top_k = false;
  bool tied_embeddings = false;
  double rms_norm_eps = 1e-6;
  RopeSpec rope;
  std::string embedding, final_norm, lm_head;  ///< tensor names; lm_head == embedding where tied
  std::vector<LayerSpec> layer;
  /// Linear modules that exist beside the quantizable ones (lm_head, routers), in module order, for the ignore list.
  std::vector<std::string> other_linears;
  /// Tensors outside the layers of this table (embedding, final norm, lm_head, unknown ones): copied to the output as
  /// they are.
  std::vector<std::string> passthrough;
  /// The passthrough tensors, of all layers and outside, that the forward does not use (e.g. multi-token prediction
  /// layers), for a warning.
  std::vector<std::string> unknown;
  /// The name a passthrough tensor gets in the output. Differs from `tensor` only for the router of a fused Mixtral,
  /// whose experts are written under the names of the per-expert layout.
  std::string output_name(const std::string& tensor) const;

  /// Rows of the stacked matrix of a tap (per expert for MoE), its columns, and how many matrices (experts; 1 for
  /// dense).
  struct TapShape {
    int64_t count = 1, rows = 0, cols = 0;
  };
  TapShape tap_shape(const LayerSpec& layer, Tap tap) const;
};

/// Reads config.json (old and transformers-5 spellings) and matches it with the tensors present.
/// Errors: Error(input) naming the file and key: unknown architecture, activation or rope type, missing tensor, shape
/// mismatch. For a checkpoint quantized by us (weight_packed instead of weight), tensors are checked by module instead.
ModelSpec read_model_spec(const Checkpoint& checkpoint);
/// From config text alone, tensor names filled in by convention (fused experts unknown: per-expert names). For plan
/// without weights.
ModelSpec model_spec_from_config(const std::string& config_text, const std::string& where);

/// cos and sin tables f32 [positions, head_dim / 2], attention scaling folded in. `length`: longest sequence (dynamic
/// rope depends on it).
struct RopeTable {
  std::vector<float> cosine, sine;
};
RopeTable rope_table(const ModelSpec& spec, int64_t length);

/// FLOPs of the linears and of attention for one token in a sequence of `length` (forward).
double forward_flops_per_token(const ModelSpec& spec, const LayerSpec& layer, double length);

}  // namespace shardq
