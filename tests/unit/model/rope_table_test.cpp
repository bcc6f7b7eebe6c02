#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "golden_case.hpp"

namespace shardq {
namespace {

/// Angles reach 64 radians as floats, whose last bit is 2^-18; the factor 4 covers the frequency's own rounding.
constexpr double kTolerance = 4 * 64 * 0x1p-24;

double table_error(const RopeTable& table, const SafetensorsFile& golden, const std::string& name) {
  const double cosine = relative_error(table.cosine, golden_floats(golden, name + ".cos"));
  return std::max(cosine, relative_error(table.sine, golden_floats(golden, name + ".sin")));
}

TEST(RopeTable, MatchesTransformersForEveryType) {
  const SafetensorsFile golden(golden_directory() / "rope_tables.safetensors");
  const auto configs = nlohmann::json::parse(std::ifstream(golden_directory() / "rope_tables.json"));
  EXPECT_GE(configs.size(), 10u);
  for (const auto& [name, config] : configs.items()) {
    nlohmann::json complete = config;
    complete["architectures"] = {"LlamaForCausalLM"};
    complete["dtype"] = "float32";
    const ModelSpec spec = model_spec_from_config(complete.dump(), name);
    const int64_t length = golden.find(name + ".cos")->shape[0];
    EXPECT_LT(table_error(rope_table(spec, length), golden, name), kTolerance) << name;
  }
}

TEST(RopeTable, NoTypePassesForAnother) {
  const SafetensorsFile golden(golden_directory() / "rope_tables.safetensors");
  const auto configs = nlohmann::json::parse(std::ifstream(golden_directory() / "rope_tables.json"));
  for (const auto& [name, config] : configs.items()) {
    nlohmann::json complete = config;
    complete["architectures"] = {"LlamaForCausalLM"};
    complete["dtype"] = "float32";
    const ModelSpec spec = model_spec_from_config(complete.dump(), name);
    const int64_t length = golden.find(name + ".cos")->shape[0];
    for (const auto& [other, unused] : configs.items()) {
      // A dynamic table within the model's limit is the default one, but shorter; the rest differ pairwise.
      if (other == name) continue;
      EXPECT_GT(table_error(rope_table(spec, length), golden, other), 100 * kTolerance) << name << " against " << other;
    }
  }
}

TEST(RopeTable, DynamicDependsOnLengthOnlyBeyondTheLimit) {
  const auto configs = nlohmann::json::parse(std::ifstream(golden_directory() / "rope_tables.json"));
  nlohmann::json config = configs["dynamic_long"];
  config["dtype"] = "float32";
  const ModelSpec spec = model_spec_from_config(config.dump(), "config");
  ASSERT_EQ(spec.max_position, 32);
  const auto row1 = [&](int64_t length) {
    const RopeTable table = rope_table(spec, length);
    return std::vector<float>(table.cosine.begin() + 12, table.cosine.begin() + 24);
  };
  EXPECT_EQ(row1(8), row1(32));
  EXPECT_NE(row1(32), row1(33));
}

}  // namespace
}  // namespace shardq
