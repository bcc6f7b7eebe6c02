#include "model/model_spec.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "core/error.hpp"
#include "temporary_model.hpp"

namespace shardq {
namespace {

using Change = std::function<void(TemporaryModel&)>;

/// The message of the Error(input) that reading the changed model gives.
std::string refusal(const char* golden, const Change& change) {
  TemporaryModel model(golden);
  change(model);
  const Checkpoint checkpoint = model.write();
  try {
    read_model_spec(checkpoint);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::input) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "no error";
}

void expect_refusal(const char* golden, const Change& change, const std::vector<std::string>& words) {
  const std::string message = refusal(golden, change);
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << message << " lacks " << word;
}

TEST(ModelSpec, UntouchedModelsAreAccepted) {
  for (const char* name : {"llama", "mistral_window", "qwen2", "qwen3", "mixtral", "qwen3_moe"})
    EXPECT_EQ(refusal(name, [](TemporaryModel&) {}), "no error") << name;
}

TEST(ModelSpec, WhatIsNotSupportedIsRefusedByName) {
  const auto set = [](const char* key, nlohmann::json value) {
    return [key, value](TemporaryModel& m) { m.config[key] = value; };
  };
  expect_refusal("llama", set("model_type", "gpt_oss"), {"config.json", "model_type", "gpt_oss"});
  expect_refusal("llama", set("hidden_act", "gelu"), {"config.json", "hidden_act", "gelu"});
  expect_refusal("llama", set("architectures", {"LlamaForSequenceClassification"}),
                 {"architectures", "LlamaForSequenceClassification"});
  expect_refusal("llama", set("rope_parameters", {{"rope_type", "longrope"}}), {"rope_parameters", "longrope"});
  expect_refusal("llama", set("rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}),
                 {"rope_parameters.full_attention"});
  expect_refusal("llama_linear", set("rope_scaling", {{"type", "su"}, {"factor", 2}}), {"rope_scaling", "su"});
  expect_refusal("llama_linear", set("rope_scaling", {{"type", "linear"}}), {"rope_scaling.factor", "missing"});
  expect_refusal("llama", set("partial_rotary_factor", 0.5), {"partial_rotary_factor", "0.5"});
  expect_refusal("llama", set("dtype", "float8_e4m3fn"), {"dtype", "float8_e4m3fn"});
  expect_refusal("llama", set("quantization_config", {{"quant_method", "awq"}}), {"awq"});
  expect_refusal("qwen2_window", set("layer_types", {"full_attention", "chunked_attention", "full_attention"}),
                 {"layer_types", "chunked_attention"});
}

TEST(ModelSpec, NonsenseInTheConfigNamesTheKey) {
  const auto set = [](const char* key, nlohmann::json value) {
    return [key, value](TemporaryModel& m) { m.config[key] = value; };
  };
  expect_refusal("llama", [](TemporaryModel& m) { m.config.erase("hidden_size"); }, {"hidden_size", "missing"});
  expect_refusal("llama", set("hidden_size", "48"), {"hidden_size", "integer"});
  expect_refusal("llama", set("num_hidden_layers", 0), {"num_hidden_layers", "positive"});
  expect_refusal("llama", set("num_hidden_layers", 1000000000), {"num_hidden_layers", "1000000000"});
  expect_refusal("llama", set("num_key_value_heads", 3), {"num_key_value_heads", "3"});
  expect_refusal("llama", set("head_dim", 11), {"head_dim", "11"});
  expect_refusal("qwen3_moe", set("num_experts_per_tok", 9), {"num_experts_per_tok", "9"});
  expect_refusal("llama", set("tie_word_embeddings", "yes"), {"tie_word_embeddings", "yes"});
  expect_refusal("qwen3_moe", set("mlp_only_layers", {"x"}), {"mlp_only_layers"});
}

TEST(ModelSpec, TensorsAreChecked) {
  const std::string q = "model.layers.1.self_attn.q_proj.weight";
  expect_refusal("llama", [&](TemporaryModel& m) { m.tensors.erase(q); }, {q, "missing"});
  expect_refusal("llama", [&](TemporaryModel& m) { m.add(q, DType::f32, {48, 47}); }, {q, "[48, 48]", "[48, 47]"});
  expect_refusal("llama", [&](TemporaryModel& m) { m.add(q, DType::f8_e4m3, {48, 48}); }, {q, "F8_E4M3"});
  expect_refusal("llama", [](TemporaryModel& m) { m.tensors.erase("lm_head.weight"); }, {"lm_head.weight", "missing"});
  expect_refusal("llama", [](TemporaryModel& m) { m.config["vocab_size"] = 97; }, {"model.embed_tokens.weight", "97"});
  expect_refusal("llama_bias", [](TemporaryModel& m) { m.tensors.erase("model.layers.0.mlp.up_proj.bias"); },
                 {"mlp.up_proj.bias"});
  expect_refusal("qwen3", [](TemporaryModel& m) { m.tensors.erase("model.layers.0.self_attn.k_norm.weight"); },
                 {"k_norm"});
  expect_refusal("qwen3_moe", [](TemporaryModel& m) { m.tensors.erase("model.layers.1.mlp.experts.5.up_proj.weight"); },
                 {"experts.5.up_proj"});
  expect_refusal("qwen3_moe",
                 [](TemporaryModel& m) {
                   m.config["num_local_experts"] = 9;
                   m.config.erase("num_experts");
                 },
                 {"[9, 48]"});
  const std::string fused = "model.layers.0.mlp.experts.gate_up_proj";
  expect_refusal("qwen3_moe_fused",
                 [&](TemporaryModel& m) {
                   m.add(fused, DType::f32, {8, 47, 48});
                 },
                 {fused, "[8, 47, 48]"});
}

TEST(ModelSpec, OldAndNewSpellingsGiveTheSame) {
  TemporaryModel old_style("llama_yarn"), new_style("llama_yarn");
  new_style.config.erase("rope_scaling");
  new_style.config.erase("rope_theta");
  new_style.config.erase("torch_dtype");
  new_style.config["dtype"] = "float32";
  new_style.config["rope_parameters"] = {
      {"rope_type", "yarn"}, {"rope_theta", 1000.0}, {"factor", 4.0}, {"original_max_position_embeddings", 32}};
  const ModelSpec a = read_model_spec(old_style.write()), b = read_model_spec(new_style.write());
  EXPECT_EQ(a.rope.type, RopeSpec::Type::yarn);
  EXPECT_EQ(b.rope.type, RopeSpec::Type::yarn);
  EXPECT_EQ(a.rope.theta, b.rope.theta);
  EXPECT_EQ(rope_table(a, 9).cosine, rope_table(b, 9).cosine);
}

TEST(ModelSpec, WindowsFollowEachFamilysRule) {
  const auto windows = [](const char* golden, const Change& change) {
    TemporaryModel model(golden);
    change(model);
    std::vector<int64_t> result;
    for (const LayerSpec& layer : read_model_spec(model.write()).layer) result.push_back(layer.window);
    return result;
  };
  using W = std::vector<int64_t>;
  EXPECT_EQ(windows("mistral_window", [](TemporaryModel&) {}), (W{7, 7}));
  EXPECT_EQ(windows("mistral_window", [](TemporaryModel& m) { m.config["sliding_window"] = nullptr; }), (W{0, 0}));
  EXPECT_EQ(windows("mistral_window", [](TemporaryModel& m) { m.config.erase("sliding_window"); }), (W{4096, 4096}));
  EXPECT_EQ(windows("llama", [](TemporaryModel& m) { m.config["sliding_window"] = 5; }), (W{0, 0}));
  EXPECT_EQ(windows("qwen2_window", [](TemporaryModel&) {}), (W{0, 5, 5}));
  EXPECT_EQ(windows("qwen2_window", [](TemporaryModel& m) { m.config["use_sliding_window"] = false; }), (W{0, 0, 0}));
  EXPECT_EQ(windows("qwen2_window",
                    [](TemporaryModel& m) {
                      m.config["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention"};
                    }),
            (W{5, 0, 5}));
}

TEST(ModelSpec, DenseAndRoutedLayers) {
  const auto moe = [](const char* golden) {
    std::vector<bool> result;
    for (const LayerSpec& layer : read_model_spec(TemporaryModel(golden).write()).layer) result.push_back(layer.moe);
    return result;
  };
  EXPECT_EQ(moe("qwen3_moe"), (std::vector<bool>{true, true}));
  EXPECT_EQ(moe("qwen3_moe_dense"), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(moe("qwen3_moe_step"), (std::vector<bool>{false, true}));
  EXPECT_EQ(moe("llama"), (std::vector<bool>{false, false}));
}

/// Every tensor is either the weight of a linear or passed through, and none is both.
TEST(ModelSpec, EveryTensorHasOnePlace) {
  for (const char* name :
       {"llama", "llama_bias", "llama_tied", "qwen3", "mixtral", "mixtral_fused", "qwen3_moe", "qwen3_moe_fused"}) {
    const Checkpoint checkpoint(golden_directory() / name);
    // golden.safetensors lies in the same directory, but a checkpoint is model*.safetensors or what the index names.
    const ModelSpec spec = read_model_spec(checkpoint);
    std::multiset<std::string> seen(spec.passthrough.begin(), spec.passthrough.end());
    for (const LayerSpec& layer : spec.layer) {
      for (const std::string& tensor : layer.passthrough) {
        EXPECT_TRUE(tensor.starts_with(layer.prefix)) << tensor;
        seen.insert(tensor);
      }
      std::set<std::string> weights;
      for (const LinearSpec& linear : layer.linears) weights.insert(linear.tensor);
      seen.insert(weights.begin(), weights.end());
    }
    const auto all = checkpoint.names();
    EXPECT_EQ(seen, std::multiset<std::string>(all.begin(), all.end())) << name;
    EXPECT_TRUE(spec.unknown.empty()) << name << " " << spec.unknown.front();
  }
}

TEST(ModelSpec, UnknownTensorsAreListedAndPassedThrough) {
  TemporaryModel model("llama");
  model.add("model.layers.2.eh_proj.weight", DType::f32, {48, 96});
  model.add("model.layers.0.self_attn.rotary_emb.inv_freq", DType::f32, {6});
  model.add("mtp.norm.weight", DType::f32, {48});
  const ModelSpec spec = read_model_spec(model.write());
  EXPECT_EQ(spec.unknown, (std::vector<std::string>{"model.layers.0.self_attn.rotary_emb.inv_freq",
                                                    "model.layers.2.eh_proj.weight", "mtp.norm.weight"}));
  EXPECT_EQ(std::count(spec.passthrough.begin(), spec.passthrough.end(), "mtp.norm.weight"), 1);
  EXPECT_EQ(std::count(spec.passthrough.begin(), spec.passthrough.end(), "model.layers.2.eh_proj.weight"), 1);
  EXPECT_EQ(std::count(spec.layer[0].passthrough.begin(), spec.layer[0].passthrough.end(),
                       "model.layers.0.self_attn.rotary_emb.inv_freq"),
            1);
}

TEST(ModelSpec, FusedExpertsGetPerExpertNames) {
  const ModelSpec qwen = read_model_spec(TemporaryModel("qwen3_moe_fused").write());
  const ModelSpec plain = read_model_spec(TemporaryModel("qwen3_moe").write());
  ASSERT_EQ(qwen.layer[0].linears.size(), plain.layer[0].linears.size());
  for (size_t i = 0; i < plain.layer[0].linears.size(); ++i)
    EXPECT_EQ(qwen.layer[0].linears[i].module, plain.layer[0].linears[i].module);
  EXPECT_EQ(qwen.other_linears, plain.other_linears);
  EXPECT_EQ(qwen.other_linears,
            (std::vector<std::string>{"model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"}));

  const ModelSpec mixtral = read_model_spec(TemporaryModel("mixtral_fused").write());
  EXPECT_EQ(mixtral.layer[0].router, "model.layers.0.mlp.gate.weight");
  EXPECT_EQ(mixtral.output_name(mixtral.layer[0].router), "model.layers.0.block_sparse_moe.gate.weight");
  EXPECT_EQ(mixtral.output_name("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(mixtral.other_linears.front(), "model.layers.0.block_sparse_moe.gate");
  EXPECT_EQ(mixtral.layer[0].linears[5].module, "model.layers.0.block_sparse_moe.experts.0.w3");
  EXPECT_EQ(mixtral.layer[0].linears[5].fused_row, 64);
}

TEST(ModelSpec, TapShapes) {
  const ModelSpec spec = read_model_spec(TemporaryModel("qwen3_moe_dense").write());
  const auto shape = [&](int64_t layer, Tap tap) {
    const auto s = spec.tap_shape(spec.layer[layer], tap);
    return std::vector<int64_t>{s.count, s.rows, s.cols};
  };
  using S = std::vector<int64_t>;
  EXPECT_EQ(shape(0, Tap::qkv), (S{1, 128, 48}));  // 4 + 2 + 2 heads of 16
  EXPECT_EQ(shape(0, Tap::o), (S{1, 48, 64}));
  EXPECT_EQ(shape(0, Tap::gate_up), (S{8, 48, 48}));
  EXPECT_EQ(shape(0, Tap::down), (S{8, 48, 24}));
  EXPECT_EQ(shape(1, Tap::gate_up), (S{1, 128, 48}));
  EXPECT_EQ(shape(1, Tap::down), (S{1, 48, 64}));
  for (const LayerSpec& layer : spec.layer)
    for (const LinearSpec& linear : layer.linears) {
      const auto whole = spec.tap_shape(layer, linear.tap);
      EXPECT_EQ(linear.cols, whole.cols);
      EXPECT_LE(linear.row_offset + linear.rows, whole.rows);
    }
}

TEST(ModelSpec, SpecFromConfigAloneHasTheSameLinears) {
  TemporaryModel model("mixtral");
  const ModelSpec full = read_model_spec(model.write()),
                  alone = model_spec_from_config(model.config.dump(), "config.json");
  ASSERT_EQ(full.layer.size(), alone.layer.size());
  for (size_t i = 0; i < full.layer[1].linears.size(); ++i)
    EXPECT_EQ(full.layer[1].linears[i].tensor, alone.layer[1].linears[i].tensor);
}

TEST(ForwardFlops, CountsLinearsAndVisibleKeys) {
  const ModelSpec spec = read_model_spec(TemporaryModel("mistral_window").write());
  // q, k, v [96, 48], o [48, 48], gate, up [128, 48], down [48, 64]; window 7 over 10 tokens sees (1 + .. + 7 + 3 * 7)
  // / 10 keys.
  const double linears = 2.0 * (96 * 48 + 48 * 48 + 128 * 48 + 48 * 64);
  EXPECT_DOUBLE_EQ(forward_flops_per_token(spec, spec.layer[0], 10), linears + 4.0 * 48 * 4.9);
}

}  // namespace
}  // namespace shardq
