#include <gtest/gtest.h>

#include <random>

#include "core/error.hpp"
#include "pipeline/job.hpp"
#include "pipeline/tap_solver.hpp"
#include "pipeline/targets.hpp"

namespace shardq {
namespace {

TokenSet ragged(int64_t samples, unsigned seed, int longest) {
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> all;
  for (int64_t i = 0; i < samples; ++i) all.emplace_back(1 + random() % longest, 1);
  return TokenSet(std::move(all));
}

int64_t tokens_in(const TokenSet& tokens, const Range& share) {
  int64_t sum = 0;
  for (int64_t s = share.begin; s < share.end; ++s) sum += static_cast<int64_t>(tokens[s].size());
  return sum;
}

TEST(BalancedShares, EverySampleExactlyOnce) {
  for (int64_t samples : {0, 1, 2, 5, 7, 64, 257})
    for (int ranks : {1, 2, 3, 4, 8})
      for (int longest : {1, 300}) {
        const TokenSet tokens = ragged(samples, 7, longest);
        const auto shares = balanced_shares(tokens, make_chunks(tokens, {0, tokens.size()}, 0), ranks);
        ASSERT_EQ(shares.size(), static_cast<size_t>(ranks));
        int64_t next = 0;
        for (const Range& share : shares) {
          EXPECT_EQ(share.begin, next);
          EXPECT_GE(share.size(), 0);
          next = share.end;
        }
        EXPECT_EQ(next, samples);
      }
}

TEST(BalancedShares, RemaindersGoToTheFirstRanks) {
  const TokenSet tokens(std::vector<std::vector<int32_t>>(7, std::vector<int32_t>(10, 1)));
  EXPECT_EQ(balanced_shares(tokens, make_chunks(tokens, {0, tokens.size()}, 0), 3),
            (std::vector<Range>{{0, 3}, {3, 5}, {5, 7}}));
}

TEST(BalancedShares, RaggedTokensDifferByLessThanTheLongestSample) {
  const TokenSet tokens = ragged(500, 3, 400);
  for (int ranks : {2, 3, 4, 8})
    for (const Range& share : balanced_shares(tokens, make_chunks(tokens, {0, tokens.size()}, 0), ranks))
      EXPECT_LE(std::abs(tokens_in(tokens, share) - tokens.tokens() / ranks), 400) << ranks;
}

TEST(Waves, CoverAllMatricesWithinTheBudget) {
  for (int64_t count : {1, 2, 16, 128})
    for (int64_t cols : {64, 128})
      for (int64_t budget : {int64_t{1}, cols * cols * 4, cols * cols * 4 * 7, int64_t{1} << 40}) {
        const auto waves = split_waves(count, cols, budget);
        int64_t next = 0;
        for (const Range& wave : waves) {
          EXPECT_EQ(wave.begin, next);
          EXPECT_GT(wave.size(), 0);
          if (budget >= cols * cols * 4) {
            EXPECT_LE(wave.size() * cols * cols * 4, budget);
          }
          next = wave.end;
        }
        EXPECT_EQ(next, count);
      }
  EXPECT_EQ(split_waves(16, 128, 128 * 128 * 4 * 6).size(), 3u);
}

TEST(Matching, FollowsCompressedTensors) {
  EXPECT_TRUE(matches_any({"Linear"}, "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(matches_any({"re:.*gate_proj"}, "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(matches_any({"re:model\\.layers"}, "model.layers.0"));  // anchored at the start only
  EXPECT_FALSE(matches_any({"re:layers"}, "model.layers.0"));
  EXPECT_FALSE(matches_any({"model.layers.0.*"}, "model.layers.0.mlp"));  // globs match nothing
  EXPECT_TRUE(matches_any({"lm_head"}, "lm_head"));
  EXPECT_THROW(matches_any({"re:("}, "x"), Error);
}

}  // namespace
}  // namespace shardq
