#include <gtest/gtest.h>

#include "core/error.hpp"
#include "golden_case.hpp"

namespace shardq {
namespace {

/// One layer of a golden model, ready to step through.
struct Stepper {
  Stepper(const char* name, int64_t layer_index, DType compute = DType::f32)
      : golden(name),
        spec(read_model_spec(golden.checkpoint)),
        layer(spec.layer[layer_index]),
        weights(WeightSource(golden.checkpoint, spec).load(*backend, layer, compute, true)),
        rope(rope_table(spec, golden.longest)),
        forward(*backend, spec, layer, weights, rope, compute) {
    chunk.starts = golden.starts;
    chunk.hidden = Embedding(*backend, golden.checkpoint, spec, compute)(golden.ids);
  }
  std::vector<float> values(const TapInput& input) const { return values(input.x); }
  std::vector<float> values(MatrixView x) const {
    std::vector<float> result;
    for (int64_t r = 0; r < x.rows; ++r)
      for (int64_t c = 0; c < x.cols; ++c) result.push_back(x.as<float>()[r * x.stride + c]);
    return result;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend();
  GoldenCase golden;
  ModelSpec spec;
  const LayerSpec& layer;
  LayerWeights weights;
  RopeTable rope;
  LayerForward forward;
  ChunkState chunk;
};

class LayerSteps : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, LayerSteps, testing::Values("llama_bias", "qwen3_moe"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(LayerSteps, AskingTwiceChangesNothing) {
  Stepper once(GetParam(), 0), twice(GetParam(), 0);
  for (Tap tap : kTaps) {
    const TapInput a = once.forward.to(tap, once.chunk);
    const auto want = once.values(a);
    for (int repeat = 0; repeat < 2; ++repeat) {
      const TapInput b = twice.forward.to(tap, twice.chunk);
      EXPECT_EQ(twice.values(b), want) << to_string(tap);
      EXPECT_EQ(b.offsets, a.offsets);
    }
  }
  once.forward.finish(once.chunk);
  twice.forward.finish(twice.chunk);
  EXPECT_EQ(to_host(*once.backend, once.chunk.hidden), to_host(*twice.backend, twice.chunk.hidden));
  EXPECT_FALSE(once.chunk.tap || once.chunk.order || once.chunk.place || once.chunk.route_weights || once.chunk.at);
}

TEST_P(LayerSteps, InputsHaveTheShapesOfTheirTaps) {
  Stepper s(GetParam(), 1);
  for (Tap tap : kTaps) {
    const TapInput input = s.forward.to(tap, s.chunk);
    const auto shape = s.spec.tap_shape(s.layer, tap);
    EXPECT_EQ(input.x.cols, shape.cols);
    ASSERT_EQ(static_cast<int64_t>(input.offsets.size()), shape.count + 1);
    EXPECT_EQ(input.offsets.back(), input.x.rows);
    EXPECT_EQ(input.x.rows, s.golden.starts.back() * (shape.count > 1 ? s.spec.top_k : 1));
  }
}

/// Chunks may be interleaved, as the pipeline does: every chunk reaches a tap before any goes on, over shared scratch.
TEST_P(LayerSteps, ChunksDoNotDisturbEachOther) {
  Stepper s(GetParam(), 0);
  for (Tap tap : kTaps) s.forward.to(tap, s.chunk);
  s.forward.finish(s.chunk);
  const auto whole = to_host(*s.backend, s.chunk.hidden);

  const Embedding embed(*s.backend, s.golden.checkpoint, s.spec, DType::f32);
  std::vector<ChunkState> chunks(s.golden.starts.size() - 1);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t begin = s.golden.starts[i], end = s.golden.starts[i + 1];
    chunks[i].starts = {0, end - begin};
    chunks[i].hidden = embed(std::span(s.golden.ids).subspan(begin, end - begin));
  }
  for (Tap tap : kTaps)
    for (ChunkState& chunk : chunks) s.forward.to(tap, chunk);
  std::vector<float> parts;
  for (ChunkState& chunk : chunks) {
    s.forward.finish(chunk);
    const auto part = to_host(*s.backend, chunk.hidden);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  EXPECT_LT(relative_error(parts, whole), forward_tolerance(DType::f32, s.spec.hidden, 1));
}

/// A weight that is replaced between a tap's input and its forward is the one that is used.
TEST_P(LayerSteps, ReplacedWeightsAreUsed) {
  for (Tap tap : kTaps) {
    Stepper s(GetParam(), 0), plain(GetParam(), 0);
    for (Tap step : kTaps) {
      const auto before = s.values(s.forward.to(step, s.chunk));
      const auto want = plain.values(plain.forward.to(step, plain.chunk));
      if (step <= tap) {
        EXPECT_EQ(before, want) << to_string(tap) << " at " << to_string(step);
      }
      if (step == tap) {
        Tensor& weight = s.weights.taps[static_cast<int>(tap)];
        for (int64_t i = 0; i < weight.size(); ++i) weight.as<float>()[i] *= 1.25f;
      }
      if (static_cast<int>(step) == static_cast<int>(tap) + 1) {
        EXPECT_NE(before, want) << to_string(tap);
      }
    }
    s.forward.finish(s.chunk);
    plain.forward.finish(plain.chunk);
    EXPECT_NE(to_host(*s.backend, s.chunk.hidden), to_host(*plain.backend, plain.chunk.hidden)) << to_string(tap);
  }
}

TEST(LayerSteps, StepsOutOfOrderAreRefused) {
  Stepper s("llama", 0);
  EXPECT_THROW(s.forward.to_o(s.chunk), Error);
  EXPECT_THROW(s.forward.finish(s.chunk), Error);
  s.forward.to_qkv(s.chunk);
  EXPECT_THROW(s.forward.to_down(s.chunk), Error);
  s.forward.to_o(s.chunk);
  EXPECT_THROW(s.forward.to_qkv(s.chunk), Error);
  s.forward.to_gate_up(s.chunk);
  EXPECT_THROW(s.forward.finish(s.chunk), Error);
}

TEST(LayerSteps, GatheredRowsAreTheTokensOfEachExpert) {
  Stepper s("qwen3_moe", 0);
  for (Tap tap : {Tap::qkv, Tap::o}) s.forward.to(tap, s.chunk);
  const TapInput input = s.forward.to_gate_up(s.chunk);
  const auto gathered = s.values(input);
  const auto tokens = s.values(s.forward.mlp_input(s.chunk));
  const int64_t cols = s.spec.hidden;
  for (int64_t i = 0; i < input.x.rows; ++i) {
    const int64_t token = s.chunk.order.as<int32_t>()[i] / s.spec.top_k;
    EXPECT_TRUE(
        std::equal(gathered.begin() + i * cols, gathered.begin() + (i + 1) * cols, tokens.begin() + token * cols));
  }
}

/// The rows that an expert gets by routing are among those that it gives for every token.
TEST(LayerSteps, DownInputOfOneExpertForEveryToken) {
  Stepper s("qwen3_moe", 1), routed("qwen3_moe", 1);
  for (Tap tap : {Tap::qkv, Tap::o, Tap::gate_up}) s.forward.to(tap, s.chunk);
  TapInput down;
  for (Tap tap : kTaps) down = routed.forward.to(tap, routed.chunk);
  const auto rows = routed.values(down);
  const int64_t cols = s.spec.moe_intermediate;
  for (int64_t expert : {0, 5}) {
    const auto all = s.values(s.forward.down_input_of_expert(s.chunk, expert));
    ASSERT_EQ(static_cast<int64_t>(all.size()), s.golden.starts.back() * cols);
    ASSERT_GT(down.offsets[expert + 1], down.offsets[expert]);
    for (int64_t i = down.offsets[expert]; i < down.offsets[expert + 1]; ++i) {
      const int64_t token = routed.chunk.order.as<int32_t>()[i] / s.spec.top_k;
      for (int64_t c = 0; c < cols; ++c) EXPECT_NEAR(rows[i * cols + c], all[token * cols + c], 1e-5);
    }
  }
}

TEST(Embed, TakesRowsOfTheTable) {
  Stepper s("llama", 0);
  const auto table = golden_floats(*s.golden.checkpoint.shards().front(), "model.embed_tokens.weight");
  const std::vector<int32_t> ids = {95, 0, 7, 7};
  const Embedding embed(*s.backend, s.golden.checkpoint, s.spec, DType::f32);
  const auto rows = to_host(*s.backend, embed(ids));
  for (size_t i = 0; i < ids.size(); ++i)
    for (int64_t c = 0; c < 48; ++c) EXPECT_EQ(rows[i * 48 + c], table[ids[i] * 48 + c]);
  const std::vector<int32_t> bad = {1, 96}, negative = {-1};
  EXPECT_THROW(embed(bad), Error);
  EXPECT_THROW(embed(negative), Error);
  EXPECT_EQ(embed({}).size(), 0);
}

}  // namespace
}  // namespace shardq
