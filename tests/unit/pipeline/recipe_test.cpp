#include "pipeline/recipe.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/error.hpp"

namespace shardq {
namespace {

std::filesystem::path write_recipe(const std::string& text) {
  const auto path = std::filesystem::temp_directory_path() /
                    fmt::format("recipe_{}.yaml", ::testing::UnitTest::GetInstance()->random_seed() + getpid());
  std::ofstream(path) << text;
  return path;
}

std::string error_of(const std::string& text, std::vector<std::pair<std::string, std::string>> overrides = {}) {
  try {
    read_recipe(text.empty() ? std::filesystem::path() : write_recipe(text), overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "";
}

TEST(Recipe, ReadsSectionsAndOverrides) {
  const Recipe r = read_recipe(
      write_recipe(
          "model: a\nscheme: W4A16\nquantization: {group_size: 32, actorder: none}\nmemory:\n  hessian_budget: 2GiB\n"),
      {{"quantization.group_size", "64"}, {"output", "o"}});
  EXPECT_EQ(r.model, "a");
  EXPECT_EQ(r.output, "o");
  EXPECT_EQ(r.scheme.group_size, 64);
  EXPECT_EQ(r.scheme.grid.bits, 4);
  EXPECT_EQ(r.scheme.actorder, ActOrder::none);
  EXPECT_EQ(r.hessian_budget, int64_t{2} << 30);
}

TEST(Recipe, SchemeFlagReplacesTheFilesFormat) {
  const Recipe r =
      read_recipe(write_recipe("scheme: W4A16\nquantization: {num_bits: 2, group_size: 16, observer: mse}\n"),
                  {{"scheme", "W8A16"}});
  EXPECT_EQ(r.scheme.grid.bits, 8);
  EXPECT_EQ(r.scheme.group_size, 128);
  EXPECT_EQ(r.scheme.observer, Observer::mse);
}

TEST(Recipe, UnknownKeyNamesLineAndNearest) {
  const std::string message = error_of("model: a\nquantization:\n  grup_size: 3\n");
  EXPECT_NE(message.find(":3: unknown recipe key 'quantization.grup_size'"), std::string::npos) << message;
  EXPECT_NE(message.find("did you mean 'quantization.group_size'"), std::string::npos) << message;
  // The section forgotten altogether.
  EXPECT_NE(error_of("group_size: 3\n").find("did you mean 'quantization.group_size'"), std::string::npos);
  EXPECT_NE(error_of("", {{"quantization.bits", "4"}}).find("did you mean 'quantization.num_bits'"), std::string::npos);
}

TEST(Recipe, WrongValuesSayWhatWasExpected) {
  EXPECT_NE(error_of("quantization: {num_bits: four}\n").find("expected an integer, found 'four'"), std::string::npos);
  EXPECT_NE(error_of("quantization: {num_bits: 9}\n").find("[2, 8]"), std::string::npos);
  EXPECT_NE(error_of("device: gpu\n").find("expected one of"), std::string::npos);
  EXPECT_NE(error_of("memory: {hessian_budget: 3 parsecs}\n").find("expected a size"), std::string::npos);
  EXPECT_NE(error_of("scheme: W5B3\n").find("W4A16"), std::string::npos);
  EXPECT_NE(error_of("model: [a\n").find("not valid YAML"), std::string::npos);
}

TEST(Recipe, ResolvedTextReadsBackToItself) {
  const Recipe r = read_recipe("", {{"model", "m"},
                                    {"quantization.group_size", "32"},
                                    {"ignore", "[lm_head, \"re:.*gate$\"]"},
                                    {"solver.nonfinite", "rtn"}});
  const std::string text = recipe_text(r, RecipeText::complete);
  EXPECT_EQ(recipe_text(read_recipe(write_recipe(text), {}), RecipeText::complete), text);
  EXPECT_EQ(r.ignore, (std::vector<std::string>{"lm_head", "re:.*gate$"}));
}

TEST(Recipe, PublishedTextHasNoPathsOfTheRun) {
  const Recipe a = read_recipe("", {{"output", "x"}, {"work", "y"}}), b = read_recipe("", {{"output", "z"}});
  EXPECT_EQ(recipe_text(a, RecipeText::published), recipe_text(b, RecipeText::published));
  EXPECT_NE(recipe_text(a, RecipeText::complete), recipe_text(b, RecipeText::complete));
}

TEST(Recipe, FingerprintTextSeesWhatDecidesTheCodesOnly) {
  const Recipe base = read_recipe("", {});
  EXPECT_EQ(
      recipe_text(read_recipe("", {{"device", "cuda"}, {"memory.hessian_budget", "1GiB"}}), RecipeText::fingerprint),
      recipe_text(base, RecipeText::fingerprint));
  for (const char* key :
       {"quantization.num_bits", "solver.block_size", "calibration.max_samples", "solver.kappa_factor"})
    EXPECT_NE(recipe_text(read_recipe("", {{key, "3"}}), RecipeText::fingerprint),
              recipe_text(base, RecipeText::fingerprint))
        << key;
}

TEST(ParseBytes, Units) {
  EXPECT_EQ(parse_bytes("1000"), 1000);
  EXPECT_EQ(parse_bytes("1.5KiB"), 1536);
  EXPECT_EQ(parse_bytes("2 GB"), 2000000000);
  EXPECT_THROW(parse_bytes("-1"), Error);
  EXPECT_THROW(parse_bytes("GiB"), Error);
}

}  // namespace
}  // namespace shardq
