#include "model/model_spec.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "io/output_writer.hpp"
#include "model/model_config.hpp"

namespace shardq {

namespace {

/// Names of the feed-forward part by architecture.
struct MlpNames {
  const char* block;
  const char* gate;
  const char* up;
  const char* down;
};
constexpr MlpNames kUsualNames = {"mlp.", "gate_proj", "up_proj", "down_proj"};
constexpr MlpNames kMixtralNames = {"block_sparse_moe.", "w1", "w3", "w2"};

/// Appends linears of one tap (and expert), stacked by rows.
class LinearTable {
 public:
  explicit LinearTable(LayerSpec& layer) : layer_(layer) {}

  void start(Tap tap, int64_t expert = -1) {
    tap_ = tap;
    expert_ = expert;
    next_row_ = 0;
  }
  void add(const std::string& name, int64_t rows, int64_t cols, bool bias) {
    LinearSpec linear;
    linear.module = layer_.prefix + name;
    linear.tap = tap_;
    linear.rows = rows;
    linear.cols = cols;
    linear.expert = expert_;
    linear.row_offset = next_row_;
    linear.tensor = linear.module + ".weight";
    if (bias) linear.bias = linear.module + ".bias";
    layer_.linears.push_back(std::move(linear));
    next_row_ += rows;
  }

 private:
  LayerSpec& layer_;
  Tap tap_ = Tap::qkv;
  int64_t expert_ = -1, next_row_ = 0;
};

void add_attention(const ModelConfig& config, LayerSpec& layer) {
  const ModelSpec& spec = config.spec;
  const int64_t q = spec.heads * spec.head_dim, kv = spec.kv_heads * spec.head_dim;
  LinearTable table(layer);
  table.start(Tap::qkv);
  table.add("self_attn.q_proj", q, spec.hidden, config.qkv_bias);
  table.add("self_attn.k_proj", kv, spec.hidden, config.qkv_bias);
  table.add("self_attn.v_proj", kv, spec.hidden, config.qkv_bias);
  table.start(Tap::o);
  table.add("self_attn.o_proj", spec.hidden, q, config.o_bias);
  if (config.qk_norm) {
    layer.q_norm = layer.prefix + "self_attn.q_norm.weight";
    layer.k_norm = layer.prefix + "self_attn.k_norm.weight";
  }
}

void add_mlp(const ModelConfig& config, LayerSpec& layer) {
  const ModelSpec& spec = config.spec;
  LinearTable table(layer);
  if (!layer.moe) {
    table.start(Tap::gate_up);
    table.add("mlp.gate_proj", spec.intermediate, spec.hidden, config.mlp_bias);
    table.add("mlp.up_proj", spec.intermediate, spec.hidden, config.mlp_bias);
    table.start(Tap::down);
    table.add("mlp.down_proj", spec.hidden, spec.intermediate, config.mlp_bias);
    return;
  }
  const MlpNames& names = spec.model_type == "mixtral" ? kMixtralNames : kUsualNames;
  const auto expert = [&](int64_t e, const char* name) { return fmt::format("{}experts.{}.{}", names.block, e, name); };
  layer.linears.reserve(layer.linears.size() + 3 * spec.experts);
  for (int64_t e = 0; e < spec.experts; ++e) {
    table.start(Tap::gate_up, e);
    table.add(expert(e, names.gate), spec.moe_intermediate, spec.hidden, false);
    table.add(expert(e, names.up), spec.moe_intermediate, spec.hidden, false);
  }
  for (int64_t e = 0; e < spec.experts; ++e) {
    table.start(Tap::down, e);
    table.add(expert(e, names.down), spec.hidden, spec.moe_intermediate, false);
  }
  layer.router = layer.prefix + names.block + "gate.weight";
}

ModelSpec build(const ModelConfig& config) {
  ModelSpec spec = config.spec;
  spec.embedding = "model.embed_tokens.weight";
  spec.final_norm = "model.norm.weight";
  spec.lm_head = spec.tied_embeddings ? spec.embedding : "lm_head.weight";
  spec.layer.resize(spec.layers);
  for (int64_t i = 0; i < spec.layers; ++i) {
    LayerSpec& layer = spec.layer[i];
    layer.index = i;
    layer.prefix = fmt::format("model.layers.{}.", i);
    layer.moe = config.moe[i];
    layer.window = config.windows[i];
    layer.input_norm = layer.prefix + "input_layernorm.weight";
    layer.post_attention_norm = layer.prefix + "post_attention_layernorm.weight";
    add_attention(config, layer);
    add_mlp(config, layer);
  }
  return spec;
}

std::string without_suffix(const std::string& name, const std::string& suffix) {
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : name;
}

}  // namespace

const char* to_string(Tap tap) {
  switch (tap) {
    case Tap::qkv:
      return "qkv";
    case Tap::o:
      return "o";
    case Tap::gate_up:
      return "gate_up";
    case Tap::down:
      return "down";
  }
  return "?";
}

ModelSpec::TapShape ModelSpec::tap_shape(const LayerSpec& of, Tap tap) const {
  const int64_t inner = of.moe ? moe_intermediate : intermediate;
  const int64_t count = of.routed(tap) ? experts : 1;
  switch (tap) {
    case Tap::qkv:
      return {1, (heads + 2 * kv_heads) * head_dim, hidden};
    case Tap::o:
      return {1, hidden, heads * head_dim};
    case Tap::gate_up:
      return {count, 2 * inner, hidden};
    case Tap::down:
      return {count, hidden, inner};
  }
  return {};
}

std::string ModelSpec::output_name(const std::string& tensor) const {
  if (model_type != "mixtral") return tensor;
  for (const LayerSpec& l : layer)
    if (tensor == l.router) return l.prefix + kMixtralNames.block + "gate.weight";
  return tensor;
}

void list_other_linears(ModelSpec& spec) {
  spec.other_linears.clear();
  for (const LayerSpec& layer : spec.layer)
    if (!layer.router.empty()) spec.other_linears.push_back(without_suffix(spec.output_name(layer.router), ".weight"));
  spec.other_linears.push_back("lm_head");
}

ModelSpec model_spec_from_config(const std::string& config_text, const std::string& where) {
  const ModelConfig config = parse_model_config(config_text, where);
  read_quantized_config(config_text);  // refuses what somebody else quantized
  ModelSpec spec = build(config);
  list_other_linears(spec);
  return spec;
}

double forward_flops_per_token(const ModelSpec& spec, const LayerSpec& layer, double length) {
  double flops = 0;
  for (Tap tap : kTaps) {
    const ModelSpec::TapShape shape = spec.tap_shape(layer, tap);
    const bool routed = layer.routed(tap);
    flops += 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.cols) * (routed ? spec.top_k : 1);
  }
  if (layer.moe) flops += 2.0 * static_cast<double>(spec.hidden) * static_cast<double>(spec.experts);
  // Mean over positions t = 1..length of min(t, window) keys; scores and their product with v, 2 FLOPs an element each.
  const double window = layer.window > 0 ? std::min(static_cast<double>(layer.window), length) : length;
  const double keys = length <= 0 ? 0 : (window * (window + 1) / 2 + (length - window) * window) / length;
  return flops + 4.0 * static_cast<double>(spec.heads * spec.head_dim) * keys;
}

}  // namespace shardq
