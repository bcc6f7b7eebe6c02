#include <nlohmann/json.hpp>

#include "io/output_writer.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using nlohmann::json;

OutputGroup default_group() {
  return {{"Linear"}, 4, true, 128, "static", "memoryless_minmax"};
}

TEST(QuantizedConfig, IsWrittenAsTheLibraryWritesIt) {
  const std::string text =
      compressed_tensors_config(R"({"z":1e-06,"model_type":"llama","a":"\u00e9"})", {default_group()}, {"lm_head"});
  EXPECT_EQ(text, R"({
  "a": "\u00e9",
  "model_type": "llama",
  "quantization_config": {
    "config_groups": {
      "group_0": {
        "format": "pack-quantized",
        "input_activations": null,
        "output_activations": null,
        "targets": [
          "Linear"
        ],
        "weights": {
          "actorder": "static",
          "block_structure": null,
          "dynamic": false,
          "group_size": 128,
          "num_bits": 4,
          "observer": "memoryless_minmax",
          "observer_kwargs": {},
          "scale_dtype": null,
          "strategy": "group",
          "symmetric": true,
          "type": "int",
          "zp_dtype": null
        }
      }
    },
    "format": "pack-quantized",
    "global_compression_ratio": null,
    "ignore": [
      "lm_head"
    ],
    "kv_cache_scheme": null,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.18.0"
  },
  "z": 1e-06
})");
}

TEST(QuantizedConfig, ReadsBackWhatItWrote) {
  std::vector<OutputGroup> groups{default_group(), {{"re:.*down_proj", "exact.name"}, 8, false, -1, "", "mse"}};
  const std::string text = compressed_tensors_config("{}", groups, {"lm_head", "model.layers.0.mlp.gate"});
  const QuantizedConfig config = read_quantized_config(text);
  EXPECT_TRUE(config.quantized);
  ASSERT_EQ(config.groups.size(), 2u);
  EXPECT_EQ(config.ignore, (std::vector<std::string>{"lm_head", "model.layers.0.mlp.gate"}));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(config.groups[i].targets, groups[i].targets);
    EXPECT_EQ(config.groups[i].bits, groups[i].bits);
    EXPECT_EQ(config.groups[i].symmetric, groups[i].symmetric);
    EXPECT_EQ(config.groups[i].group_size, groups[i].group_size);
    EXPECT_EQ(config.groups[i].actorder, groups[i].actorder);
    EXPECT_EQ(config.groups[i].observer, groups[i].observer);
  }
  const json channel = json::parse(text)["quantization_config"]["config_groups"]["group_1"]["weights"];
  EXPECT_EQ(channel["strategy"], "channel");
  EXPECT_TRUE(channel["group_size"].is_null());
  EXPECT_EQ(channel["zp_dtype"], "torch.int8");
}

// Ten groups and more: "group_10" sorts before "group_2", and the order decides which of two matching groups a module
// gets.
TEST(QuantizedConfig, KeepsTheOrderOfManyGroups) {
  std::vector<OutputGroup> groups;
  for (int i = 0; i < 12; ++i)
    groups.push_back({{"re:layer" + std::to_string(i)}, 4, true, 32 * (i + 1), "", "minmax"});
  const QuantizedConfig config = read_quantized_config(compressed_tensors_config("{}", groups, {}));
  ASSERT_EQ(config.groups.size(), 12u);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(config.groups[i].targets, groups[i].targets);
}

TEST(QuantizedConfig, APlainModelIsNotQuantized) {
  EXPECT_FALSE(read_quantized_config(R"({"model_type":"llama"})").quantized);
  EXPECT_FALSE(read_quantized_config(R"({"quantization_config":null})").quantized);
}

TEST(QuantizedConfig, ReadsWhatTheLibraryOmits) {
  const QuantizedConfig config = read_quantized_config(
      R"({"quantization_config":{"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"group_0":{"targets":["Linear"],)"
      R"("weights":{"num_bits":4,"group_size":32,"strategy":"group"}}}}})");
  ASSERT_EQ(config.groups.size(), 1u);
  EXPECT_TRUE(config.groups[0].symmetric);
  EXPECT_EQ(config.groups[0].group_size, 32);
  EXPECT_TRUE(config.ignore.empty());
}

TEST(QuantizedConfig, RefusesWhatItCannotRead) {
  const json good = json::parse(compressed_tensors_config("{}", {default_group()}, {"lm_head"}));
  const auto refuses = [&](const std::string& pointer, const json& value, const std::vector<std::string>& words) {
    json changed = good;
    changed[json::json_pointer("/quantization_config" + pointer)] = value;
    EXPECT_EQ(io_testing::error_mismatch(ExitCode::input, words, [&] { read_quantized_config(changed.dump()); }), "")
        << pointer;
  };
  const std::string group = "/config_groups/group_0";
  refuses("/quant_method", "gptq", {"quant_method", "\"gptq\""});
  refuses("/format", "nvfp4-pack-quantized", {"format", "nvfp4-pack-quantized"});
  refuses("/quantization_status", "frozen", {"quantization_status"});
  refuses("/kv_cache_scheme", {{"num_bits", 8}}, {"kv_cache_scheme"});
  refuses("/config_groups", json::object(), {"config_groups"});
  refuses("/ignore", "lm_head", {"ignore"});
  refuses(group, {"Linear"}, {"group_0", "object"});
  refuses(group + "/format", "int-quantized", {"group_0.format"});
  refuses(group + "/input_activations", {{"num_bits", 8}}, {"input_activations"});
  refuses(group + "/weights", nullptr, {"weights"});
  refuses(group + "/weights/num_bits", 9, {"num_bits", "9"});
  refuses(group + "/weights/num_bits", "4", {"num_bits"});
  refuses(group + "/weights/type", "float", {"type", "float"});
  refuses(group + "/weights/dynamic", true, {"dynamic"});
  refuses(group + "/weights/strategy", "block", {"strategy", "block"});
  refuses(group + "/weights/group_size", nullptr, {"group_size", "null"});
  refuses(group + "/weights/actorder", "group", {"actorder", "group"});
  EXPECT_ERROR(ExitCode::input, ({"config.json"}), read_quantized_config("{"));
  EXPECT_ERROR(ExitCode::input, ({"config.json"}), compressed_tensors_config("[]", {}, {}));
}

}  // namespace
}  // namespace shardq
