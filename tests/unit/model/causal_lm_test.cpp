#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/error.hpp"
#include "core/timer.hpp"
#include "golden_case.hpp"

namespace shardq {
namespace {

struct MiniMoe {
  Checkpoint checkpoint{std::filesystem::path(SHARDQ_SOURCE_DIR) / "models/mini-moe"};
  ModelSpec spec = read_model_spec(checkpoint);
  TokenSet heldout{checkpoint.directory() / "heldout_ids.npy", spec.vocab};
  std::unique_ptr<Backend> backend = make_cpu_backend();

  EvalResult score(int64_t samples, DType compute) {
    std::vector<int64_t> which(samples);
    std::iota(which.begin(), which.end(), 0);
    return evaluate(*backend, checkpoint, spec, heldout, which, compute);
  }
};

/// Largest relative difference of the losses of samples.
double loss_error(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) worst = std::max(worst, std::abs(got[i] - want[i]) / want[i]);
  return worst;
}

TEST(Evaluate, MiniMoeLossesMatchTransformers) {
  const auto reference = nlohmann::json::parse(std::ifstream(golden_directory() / "mini_moe.json"));
  MiniMoe model;
  const EvalResult f32 = model.score(reference["samples"], DType::f32);
  EXPECT_LT(loss_error(f32.sample_losses, reference["float32"]["loss_sums"].get<std::vector<double>>()), 2e-5);
  // bf16 losses of single samples move by up to 0.3 % in transformers too, depending on the order of roundings.
  const EvalResult bf16 = model.score(reference["samples"], DType::bf16);
  EXPECT_LT(loss_error(bf16.sample_losses, reference["bfloat16"]["loss_sums"].get<std::vector<double>>()), 1e-2);
  double total = 0;
  for (double loss : reference["bfloat16"]["loss_sums"]) total += loss;
  EXPECT_NEAR(bf16.loss_sum / total, 1.0, 2e-3);
}

TEST(Evaluate, BestTokensMatchTransformers) {
  const auto reference = nlohmann::json::parse(std::ifstream(golden_directory() / "mini_moe.json"));
  MiniMoe model;
  const int64_t samples = reference["samples"];
  const EvalResult result = model.score(samples, DType::f32);
  for (int64_t s = 0; s < samples; ++s) {
    const auto ids = model.heldout[s];
    ASSERT_EQ(result.best[s].size(), ids.size() - 1);
    int64_t correct = 0;
    for (size_t t = 0; t + 1 < ids.size(); ++t) correct += result.best[s][t] == ids[t + 1];
    EXPECT_EQ(correct, reference["float32"]["correct"][s].get<int64_t>()) << "sample " << s;
  }
}

TEST(Evaluate, ASampleScoresTheSameInAnyCompany) {
  MiniMoe model;
  const EvalResult together = model.score(3, DType::f32);
  const std::vector<int64_t> second = {1};
  const EvalResult alone = evaluate(*model.backend, model.checkpoint, model.spec, model.heldout, second, DType::f32);
  EXPECT_NEAR(alone.loss_sum / together.sample_losses[1], 1.0, 1e-5);
  EXPECT_EQ(alone.tokens, 511);
  EXPECT_EQ(together.tokens, 3 * 511);
}

TEST(Evaluate, SamplesOfOneTokenPredictNothing) {
  MiniMoe model;
  const TokenSet tokens({{5}, {7, 9, 11}});
  const std::vector<int64_t> which = {0, 1};
  const EvalResult result = evaluate(*model.backend, model.checkpoint, model.spec, tokens, which, DType::f32);
  EXPECT_EQ(result.tokens, 2);
  EXPECT_EQ(result.sample_losses[0], 0);
  EXPECT_TRUE(result.best[0].empty());
  EXPECT_EQ(evaluate(*model.backend, model.checkpoint, model.spec, tokens, {}, DType::f32).tokens, 0);
}

TEST(Evaluate, TokenOutsideTheVocabularyIsRefused) {
  MiniMoe model;
  const TokenSet tokens({{5, 2048}});
  const std::vector<int64_t> which = {0};
  try {
    evaluate(*model.backend, model.checkpoint, model.spec, tokens, which, DType::f32);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::input);
    EXPECT_NE(std::string(error.what()).find("2048"), std::string::npos) << error.what();
  }
}

TEST(Evaluate, ProgressCountsLayersAndHead) {
  MiniMoe model;
  std::vector<int64_t> steps;
  const TokenSet tokens({{1, 2, 3}});
  const std::vector<int64_t> which = {0};
  evaluate(*model.backend, model.checkpoint, model.spec, tokens, which, DType::f32, [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 5);
    steps.push_back(done);
  });
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 4, 5}));
}

TEST(Agreement, CountsEqualPositions) {
  EvalResult a, b;
  a.tokens = b.tokens = 4;
  a.best = {{1, 2}, {3, 4}};
  b.best = {{1, 5}, {3, 6}};
  EXPECT_DOUBLE_EQ(agreement(a, b), 0.5);
  EXPECT_DOUBLE_EQ(agreement(a, a), 1.0);
  b.tokens = 5;
  EXPECT_THROW(agreement(a, b), Error);
}

/// All 256 sequences, about 8 CPU seconds, many more under sanitizers: on request only (SHARDQ_LONG_TESTS=1).
TEST(Evaluate, MiniMoePerplexityOfTheWholeHeldoutSet) {
  if (!std::getenv("SHARDQ_LONG_TESTS")) GTEST_SKIP() << "set SHARDQ_LONG_TESTS=1 to run all 256 sequences";
  MiniMoe model;
  for (const auto& [compute, want] : {std::pair{DType::bf16, 10.440}, {DType::f32, 10.4366}}) {
    const Stopwatch watch;
    const EvalResult result = model.score(model.heldout.size(), compute);
    std::printf("%s: perplexity %.5f over %ld tokens, %.1f s\n", std::string(torch_name(compute)).c_str(),
                result.perplexity(), static_cast<long>(result.tokens), watch.seconds());
    EXPECT_NEAR(result.perplexity(), want, compute == DType::f32 ? 2e-4 : 0.01);
  }
}

}  // namespace
}  // namespace shardq
