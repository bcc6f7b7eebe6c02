#include "quant/scheme.hpp"

#include <gtest/gtest.h>

#include "core/error.hpp"

namespace shardq {
namespace {

TEST(SchemePreset, ReadsBitsSymmetryAndGroup) {
  const QuantScheme plain = scheme_preset("W4A16");
  EXPECT_EQ(plain.name, "W4A16");
  EXPECT_EQ(plain.grid.bits, 4);
  EXPECT_TRUE(plain.grid.symmetric);
  EXPECT_EQ(plain.group_size, 128);
  EXPECT_EQ(plain.method, Method::gptq);
  EXPECT_FALSE(scheme_preset("W4A16_ASYM").grid.symmetric);
  EXPECT_EQ(scheme_preset("W8A16").grid.bits, 8);
  EXPECT_EQ(scheme_preset("W3A16-g32").group_size, 32);
  EXPECT_EQ(scheme_preset("W4A16_ASYM-g64").group_size, 64);
  EXPECT_EQ(scheme_preset("W4A16-channel").group_size, -1);
  EXPECT_EQ(group_size_for(scheme_preset("W4A16-channel"), 576), 576);
}

TEST(SchemePreset, EveryListedNameIsKnown) {
  for (const std::string& name : scheme_preset_names()) EXPECT_EQ(scheme_preset(name).name, name);
}

TEST(SchemePreset, RefusesOthersAndListsTheKnown) {
  for (const char* name :
       {"", "W", "W4", "W1A16", "W9A16", "W4A8", "w4a16", "W4A16-", "W4A16-g", "W4A16-g0", "W4A16-g-8", "W4A16-g32x",
        "W4A16-channels", "W4A16_SYM", "NVFP4", "W99999999999999999999A16"}) {
    try {
      scheme_preset(name);
      FAIL() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find("W4A16_ASYM"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace shardq
