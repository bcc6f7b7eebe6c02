#include <gtest/gtest.h>

#include "model/model_spec.hpp"

namespace shardq {
namespace {

/// What matters of the config.json of published models, in the spelling they were published with.
constexpr const char* kLlama31 =
    R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling":
  {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
   "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "vocab_size": 128256})";
constexpr const char* kMistral01 =
    R"({"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000})";
constexpr const char* kQwen25 = R"({"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584,
  "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
  "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}, "sliding_window": 131072,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 152064})";
constexpr const char* kQwen3Moe =
    R"({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1,
  "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
  "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
  "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
  "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936})";
constexpr const char* kMixtral = R"({"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
  "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "vocab_size": 32000})";

/// Weights of all linears, embeddings and norms, as the models' cards count them.
double billions(const ModelSpec& spec) {
  double parameters = static_cast<double>(spec.vocab * spec.hidden) * (spec.tied_embeddings ? 1 : 2);
  for (const LayerSpec& layer : spec.layer) {
    for (const LinearSpec& linear : layer.linears)
      parameters += static_cast<double>(linear.rows * linear.cols + (linear.bias.empty() ? 0 : linear.rows));
    parameters += static_cast<double>(2 * spec.hidden + (layer.moe ? spec.experts * spec.hidden : 0));
  }
  return parameters / 1e9;
}

TEST(PublishedConfigs, ParameterCountsAreThoseOfTheModels) {
  EXPECT_NEAR(billions(model_spec_from_config(kLlama31, "llama")), 8.03, 0.005);
  EXPECT_NEAR(billions(model_spec_from_config(kMistral01, "mistral")), 7.24, 0.005);
  EXPECT_NEAR(billions(model_spec_from_config(kQwen25, "qwen2")), 7.62, 0.005);
  EXPECT_NEAR(billions(model_spec_from_config(kQwen3Moe, "qwen3_moe")), 30.53, 0.005);
  EXPECT_NEAR(billions(model_spec_from_config(kMixtral, "mixtral")), 46.70, 0.005);
}

TEST(PublishedConfigs, Details) {
  const ModelSpec llama = model_spec_from_config(kLlama31, "llama");
  EXPECT_EQ(llama.rope.type, RopeSpec::Type::llama3);
  EXPECT_EQ(llama.rope.original_max_position, 8192);
  EXPECT_EQ(llama.rope.theta, 500000);
  EXPECT_EQ(llama.head_dim, 128);
  const ModelSpec mistral = model_spec_from_config(kMistral01, "mistral");
  EXPECT_EQ(mistral.layer[31].window, 4096);
  const ModelSpec qwen2 = model_spec_from_config(kQwen25, "qwen2");
  EXPECT_EQ(qwen2.rope.type, RopeSpec::Type::yarn);
  EXPECT_EQ(qwen2.layer[27].window, 0);
  EXPECT_EQ(qwen2.layer[0].linears[2].bias, "model.layers.0.self_attn.v_proj.bias");
  EXPECT_TRUE(qwen2.layer[0].linears[3].bias.empty());
  const ModelSpec qwen3 = model_spec_from_config(kQwen3Moe, "qwen3_moe");
  EXPECT_EQ(qwen3.tap_shape(qwen3.layer[0], Tap::o).cols, 4096);  // 32 heads of 128 over a hidden size of 2048
  EXPECT_EQ(qwen3.other_linears.size(), 49u);
  EXPECT_EQ(qwen3.layer[47].linears.back().module, "model.layers.47.mlp.experts.127.down_proj");
  const ModelSpec mixtral = model_spec_from_config(kMixtral, "mixtral");
  EXPECT_TRUE(mixtral.normalize_top_k);
  EXPECT_EQ(mixtral.layer[0].router, "model.layers.0.block_sparse_moe.gate.weight");
}

}  // namespace
}  // namespace shardq
