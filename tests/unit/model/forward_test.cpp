#include <gtest/gtest.h>

#include <fstream>

#include "golden_case.hpp"

namespace shardq {
namespace {

class Forward : public testing::TestWithParam<const char*> {};

TEST_P(Forward, MatchesTransformersInF32) {
  const GoldenCase golden(GetParam());
  const auto backend = make_cpu_backend();
  const ModelSpec spec = read_model_spec(golden.checkpoint);
  ASSERT_EQ(golden.want.hidden.size(), static_cast<size_t>(spec.layers));
  const ForwardOutput got = golden.run(*backend, spec, DType::f32);
  const int64_t width = std::max(spec.hidden, spec.intermediate);
  for (int64_t i = 0; i < spec.layers; ++i)
    EXPECT_LT(relative_error(got.hidden[i], golden.want.hidden[i]), forward_tolerance(DType::f32, width, i + 1))
        << "layer " << i;
  EXPECT_LT(relative_error(got.logits, golden.want.logits), forward_tolerance(DType::f32, width, spec.layers + 1));
}

TEST_P(Forward, IsCloseInBf16) {
  const GoldenCase golden(GetParam());
  const auto backend = make_cpu_backend();
  const ModelSpec spec = read_model_spec(golden.checkpoint);
  // Experts chosen near a tie may flip in bf16, so for routed layers only the typical error is bounded.
  const ForwardOutput got = golden.run(*backend, spec, DType::bf16);
  double squares = 0, errors = 0;
  for (size_t i = 0; i < got.logits.size(); ++i) {
    squares += std::pow(golden.want.logits[i], 2);
    errors += std::pow(got.logits[i] - golden.want.logits[i], 2);
  }
  EXPECT_LT(std::sqrt(errors / squares), spec.experts > 0 ? 0.25 : 0.05);
}

INSTANTIATE_TEST_SUITE_P(Golden, Forward,
                         testing::Values("llama", "llama_heads", "llama_llama3", "llama_linear", "llama_dynamic",
                                         "llama_yarn", "llama_bias", "llama_tied", "mistral_window", "qwen2",
                                         "qwen2_window", "qwen3", "mixtral", "mixtral_fused", "qwen3_moe",
                                         "qwen3_moe_dense", "qwen3_moe_step", "qwen3_moe_fused"),
                         [](const auto& info) { return std::string(info.param); });

/// A model that differs in one property must be told apart by a wide margin, or the comparison above proves nothing.
void expect_told_apart(const char* name, const std::function<void(ModelSpec&)>& change) {
  const GoldenCase golden(name);
  const auto backend = make_cpu_backend();
  ModelSpec spec = read_model_spec(golden.checkpoint);
  change(spec);
  const double error = relative_error(golden.run(*backend, spec, DType::f32).logits, golden.want.logits);
  EXPECT_GT(error, 10 * forward_tolerance(DType::f32, 64, spec.layers + 1)) << name;
}

TEST(ForwardSensitivity, WrongAnswersAreSeen) {
  expect_told_apart("llama", [](ModelSpec& s) { s.rope.theta = 1100; });
  expect_told_apart("llama", [](ModelSpec& s) { s.rms_norm_eps = 1e-3; });
  expect_told_apart("llama_linear", [](ModelSpec& s) { s.rope.factor = 3.9; });
  expect_told_apart("llama_dynamic", [](ModelSpec& s) { s.rope.factor = 2.9; });
  expect_told_apart("llama_llama3", [](ModelSpec& s) { s.rope.high_freq_factor = 5; });
  expect_told_apart("llama_yarn", [](ModelSpec& s) { s.rope.attention_factor = 1; });
  expect_told_apart("llama_yarn", [](ModelSpec& s) { s.rope.beta_slow = 3; });
  expect_told_apart("mistral_window", [](ModelSpec& s) { s.layer[1].window = 8; });
  expect_told_apart("qwen2_window", [](ModelSpec& s) { s.layer[0].window = 5; });
  expect_told_apart("mixtral", [](ModelSpec& s) { s.normalize_top_k = false; });
  expect_told_apart("qwen3_moe_dense", [](ModelSpec& s) { s.normalize_top_k = true; });
  expect_told_apart("qwen3_moe", [](ModelSpec& s) { s.top_k = 2; });
  expect_told_apart("qwen3_moe_fused",
                    [](ModelSpec& s) { std::swap(s.layer[1].linears[4].fused_row, s.layer[1].linears[5].fused_row); });
  expect_told_apart("llama_bias", [](ModelSpec& s) { s.layer[1].linears[2].bias.clear(); });
  expect_told_apart("llama_bias", [](ModelSpec& s) { s.layer[0].linears[6].bias.clear(); });
}

TEST(RelativeError, FailsWhereItMust) {
  EXPECT_EQ(relative_error({1, 2}, {1, 2}), 0);
  EXPECT_NEAR(relative_error({1, 2.5}, {1, 2}), 0.25, 1e-12);
  EXPECT_TRUE(std::isinf(relative_error({1, NAN}, {1, 2})));
  EXPECT_TRUE(std::isinf(relative_error({1}, {1, 2})));
  EXPECT_TRUE(std::isinf(relative_error({}, {})));
}

TEST(Forward, SequencesDoNotSeeEachOther) {
  // The same sequence alone and packed behind others: nothing leaks over a boundary.
  const GoldenCase golden("qwen3");
  const auto backend = make_cpu_backend();
  const ModelSpec spec = read_model_spec(golden.checkpoint);
  const ForwardOutput packed = golden.run(*backend, spec, DType::f32);
  GoldenCase alone("qwen3");
  alone.ids.assign(golden.ids.begin() + golden.starts[2], golden.ids.end());
  alone.starts = {0, static_cast<int64_t>(alone.ids.size())};
  const ForwardOutput last = alone.run(*backend, spec, DType::f32);
  const std::vector<float> tail(packed.logits.end() - static_cast<int64_t>(last.logits.size()), packed.logits.end());
  EXPECT_LT(relative_error(last.logits, tail), forward_tolerance(DType::f32, spec.hidden, 1));
}

}  // namespace
}  // namespace shardq
