#include "model/weight_source.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "core/error.hpp"
#include "model_variants.hpp"
#include "temporary_model.hpp"

namespace shardq {
namespace {

/// Values of a tap's stack as floats.
std::vector<float> tap_values(Backend& backend, const LayerWeights& weights, Tap tap) {
  return to_host(backend, weights.taps[static_cast<int>(tap)]);
}

TEST(WeightSource, StacksLinearsInTheOrderOfTheTable) {
  const auto backend = make_cpu_backend();
  const Checkpoint checkpoint(golden_directory() / "qwen3_moe");
  const ModelSpec spec = read_model_spec(checkpoint);
  const LayerSpec& layer = spec.layer[1];
  const LayerWeights weights = WeightSource(checkpoint, spec).load(*backend, layer, DType::f32, true);
  for (const LinearSpec& linear : layer.linears) {
    const auto shape = spec.tap_shape(layer, linear.tap);
    const auto stack = tap_values(*backend, weights, linear.tap);
    ASSERT_EQ(static_cast<int64_t>(stack.size()), shape.count * shape.rows * shape.cols);
    const int64_t first = (std::max<int64_t>(linear.expert, 0) * shape.rows + linear.row_offset) * shape.cols;
    std::vector<float> want(linear.rows * linear.cols);
    std::memcpy(want.data(), checkpoint.bytes(linear.tensor).data(), want.size() * 4);
    EXPECT_TRUE(std::equal(want.begin(), want.end(), stack.begin() + first)) << linear.module;
  }
}

TEST(WeightSource, ReadingAheadGivesTheSameAsLoading) {
  const auto backend = make_cpu_backend();
  for (const char* name : {"llama_bias", "qwen3_moe_dense"}) {
    const Checkpoint checkpoint(golden_directory() / name);
    const ModelSpec spec = read_model_spec(checkpoint);
    const WeightSource source(checkpoint, spec);
    HostLayer host(*backend);  // one for layers of different sizes
    for (const LayerSpec& layer : spec.layer) {
      const LayerWeights want = source.load(*backend, layer, DType::bf16, true);
      std::thread reader([&] { source.read(layer, DType::bf16, true, host); });
      reader.join();
      const LayerWeights got = source.upload(*backend, layer, DType::bf16, host);
      for (Tap tap : kTaps) {
        const auto index = static_cast<size_t>(tap);
        EXPECT_EQ(tap_values(*backend, got, tap), tap_values(*backend, want, tap));
        ASSERT_EQ(static_cast<bool>(got.biases[index]), static_cast<bool>(want.biases[index]));
        if (want.biases[index]) {
          EXPECT_EQ(to_host(*backend, got.biases[index]), to_host(*backend, want.biases[index]));
        }
      }
      for (Tensor LayerWeights::*part : {&LayerWeights::input_norm, &LayerWeights::post_attention_norm,
                                         &LayerWeights::q_norm, &LayerWeights::k_norm, &LayerWeights::router}) {
        ASSERT_EQ(static_cast<bool>(got.*part), static_cast<bool>(want.*part));
        if (want.*part) {
          EXPECT_EQ(to_host(*backend, got.*part), to_host(*backend, want.*part));
        }
      }
    }
  }
}

TEST(WeightSource, FusedAndPerExpertLayoutsAreTheSameWeights) {
  const auto backend = make_cpu_backend();
  for (const char* name : {"qwen3_moe", "mixtral"}) {
    const Checkpoint plain(golden_directory() / name), fused(golden_directory() / (std::string(name) + "_fused"));
    const ModelSpec plain_spec = read_model_spec(plain), fused_spec = read_model_spec(fused);
    for (int64_t i = 0; i < plain_spec.layers; ++i) {
      const LayerWeights a = WeightSource(plain, plain_spec).load(*backend, plain_spec.layer[i], DType::f32, true);
      const LayerWeights b = WeightSource(fused, fused_spec).load(*backend, fused_spec.layer[i], DType::f32, true);
      for (Tap tap : kTaps)
        EXPECT_EQ(tap_values(*backend, a, tap), tap_values(*backend, b, tap)) << name << " " << to_string(tap);
      EXPECT_EQ(to_host(*backend, a.router), to_host(*backend, b.router));
    }
  }
}

TEST(WeightSource, ATransposedFusedTensorIsTurned) {
  const auto backend = make_cpu_backend();
  TemporaryModel model("qwen3_moe_fused");
  transpose_down_experts(model);
  const Checkpoint turned = model.write(), plain(golden_directory() / "qwen3_moe");
  const ModelSpec turned_spec = read_model_spec(turned), plain_spec = read_model_spec(plain);
  EXPECT_TRUE(turned_spec.layer[0].linears.back().fused_transposed);
  const LayerWeights a = WeightSource(turned, turned_spec).load(*backend, turned_spec.layer[1], DType::f32, true);
  const LayerWeights b = WeightSource(plain, plain_spec).load(*backend, plain_spec.layer[1], DType::f32, true);
  EXPECT_EQ(tap_values(*backend, a, Tap::down), tap_values(*backend, b, Tap::down));
}

TEST(WeightSource, BiasesAreConcatenated) {
  const auto backend = make_cpu_backend();
  const Checkpoint checkpoint(golden_directory() / "llama_bias");
  ModelSpec spec = read_model_spec(checkpoint);
  spec.layer[0].linears[1].bias.clear();  // a linear without one among others that have it gets zeros
  const LayerWeights weights = WeightSource(checkpoint, spec).load(*backend, spec.layer[0], DType::f32, true);
  std::vector<float> want;
  for (const char* name : {"q", "k", "v"}) {
    const std::string tensor = std::string("model.layers.0.self_attn.") + name + "_proj.bias";
    std::vector<float> part(checkpoint.entry(tensor).shape[0]);
    std::memcpy(part.data(), checkpoint.bytes(tensor).data(), part.size() * 4);
    if (name[0] == 'k') std::fill(part.begin(), part.end(), 0.0f);
    want.insert(want.end(), part.begin(), part.end());
  }
  EXPECT_EQ(to_host(*backend, weights.biases[0]), want);
  EXPECT_TRUE(weights.biases[3]);
}

TEST(WeightSource, ConvertsToTheComputeDtype) {
  const auto backend = make_cpu_backend();
  const Checkpoint checkpoint(golden_directory() / "mistral_window");  // stored in f16
  const ModelSpec spec = read_model_spec(checkpoint);
  EXPECT_EQ(spec.dtype, DType::f16);
  const WeightSource source(checkpoint, spec);
  const LayerWeights f32 = source.load(*backend, spec.layer[0], DType::f32, true),
                     bf16 = source.load(*backend, spec.layer[0], DType::bf16, true);
  EXPECT_EQ(bf16.taps[0].dtype(), DType::bf16);
  EXPECT_EQ(bf16.input_norm.dtype(), DType::bf16);
  auto want = tap_values(*backend, f32, Tap::qkv);
  for (float& value : want) value = round_to_bf16(value);
  EXPECT_EQ(tap_values(*backend, bf16, Tap::qkv), want);
}

/// Equal tensors, or both absent.
void expect_equal(Backend& backend, const Tensor& got, const Tensor& want) {
  ASSERT_EQ(static_cast<bool>(got), static_cast<bool>(want));
  if (!want) return;
  EXPECT_EQ(got.shape(), want.shape());
  EXPECT_EQ(to_host(backend, got), to_host(backend, want));
}

TEST(WeightSource, StacksHoldTheExpertsAskedFor) {
  const auto backend = make_cpu_backend();
  for (const char* name : {"qwen3_moe_dense", "mixtral_fused"}) {
    const Checkpoint checkpoint(golden_directory() / name);
    const ModelSpec spec = read_model_spec(checkpoint);
    const WeightSource source(checkpoint, spec);
    HostLayer host(*backend);
    for (const LayerSpec& layer : spec.layer) {
      const LayerWeights all = source.load(*backend, layer, DType::f32, true);
      EXPECT_EQ(all.experts, (layer.moe ? Range{0, spec.experts} : Range{}));
      for (const Range experts :
           {Range{0, spec.experts}, Range{1, 3}, Range{2, 2}, Range{spec.experts, spec.experts}}) {
        const WeightPart part{.experts = experts};
        source.read(layer, DType::f32, true, host, part);
        const LayerWeights both_ways[] = {source.load(*backend, layer, DType::f32, true, part),
                                          source.upload(*backend, layer, DType::f32, host, part)};
        for (const LayerWeights& some : both_ways) {
          EXPECT_EQ(some.experts, (layer.moe ? experts : Range{}));
          for (Tap tap : kTaps) {
            const auto index = static_cast<size_t>(tap);
            const bool routed = layer.moe && (tap == Tap::gate_up || tap == Tap::down);
            const Range held = routed ? experts : Range{0, 1};
            const std::vector<float> whole = tap_values(*backend, all, tap);
            const Shape shape = all.taps[index].shape();
            const int64_t one = shape[1] * shape[2];
            EXPECT_EQ(some.taps[index].shape(), (Shape{held.size(), shape[1], shape[2]}));
            EXPECT_EQ(tap_values(*backend, some, tap),
                      std::vector<float>(whole.begin() + held.begin * one, whole.begin() + held.end * one));
            expect_equal(*backend, some.biases[index], all.biases[index]);
          }
          expect_equal(*backend, some.router, all.router);
          expect_equal(*backend, some.input_norm, all.input_norm);
        }
      }
      if (layer.moe) {
        EXPECT_LT(source.layer_bytes(layer, DType::f32, {.experts = Range{1, 3}}),
                  source.layer_bytes(layer, DType::f32));
      }
    }
  }
}

TEST(WeightSource, ExpertsNotHeldAreNotLookedAt) {
  const auto backend = make_cpu_backend();
  TemporaryModel model("qwen3_moe");
  model.floats("model.layers.0.mlp.experts.5.up_proj.weight")[3] = NAN;
  const Checkpoint checkpoint = model.write();
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  const auto load = [&](Range experts) {
    source.load(*backend, spec.layer[0], DType::f32, true, {.experts = experts});
  };
  EXPECT_NO_THROW(load({0, 5}));
  EXPECT_NO_THROW(load({6, 8}));
  EXPECT_THROW(load({5, 6}), Error);
  EXPECT_THROW(load({7, 9}), Error);  // there are eight
  EXPECT_THROW(load({3, 2}), Error);
}

void expect_nonfinite(const char* golden, const std::string& tensor, int64_t flat, const std::string& position) {
  const auto backend = make_cpu_backend();
  for (const float bad : {NAN, -INFINITY}) {
    TemporaryModel model(golden);
    model.floats(tensor)[flat] = bad;
    const Checkpoint checkpoint = model.write();
    const ModelSpec spec = read_model_spec(checkpoint);
    const WeightSource source(checkpoint, spec);
    EXPECT_NO_THROW(source.load(*backend, spec.layer[0], DType::f32, false));
    try {
      source.load(*backend, spec.layer[0], DType::f32, true);
      ADD_FAILURE() << "no error for " << tensor;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::input);
      const std::string message = error.what();
      EXPECT_NE(message.find(tensor), std::string::npos) << message;
      EXPECT_NE(message.find(position), std::string::npos) << message;
    }
  }
}

TEST(WeightSource, NonFiniteWeightsAreNamedWithTheirPlace) {
  expect_nonfinite("llama", "model.layers.0.mlp.up_proj.weight", 48 * 5 + 7, "[5, 7]");
  expect_nonfinite("llama", "model.layers.0.input_layernorm.weight", 11, "[11]");
  expect_nonfinite("llama_bias", "model.layers.0.self_attn.v_proj.bias", 3, "[3]");
  expect_nonfinite("qwen3_moe", "model.layers.0.mlp.experts.6.down_proj.weight", 24 * 2 + 1, "[2, 1]");
  expect_nonfinite("qwen3_moe", "model.layers.0.mlp.gate.weight", 48, "[1, 0]");
  expect_nonfinite("qwen3_moe_fused", "model.layers.0.mlp.experts.gate_up_proj", 48 * 48 * 3 + 48 * 30 + 2,
                   "[3, 30, 2]");
}

TEST(WeightSource, QuantizedWeightsAreReconstructedBitForBit) {
  const auto backend = make_cpu_backend();
  struct Format {
    int bits;
    bool symmetric;
    int64_t group_size;
  };
  for (const auto& [bits, symmetric, group_size] :
       {Format{4, true, 8}, Format{4, false, 8}, Format{3, true, -1}, Format{8, false, -1}, Format{2, true, 24}}) {
    PackedPair pair("qwen3_moe", bits, symmetric, group_size);
    const Checkpoint packed = pair.packed.write(), full = pair.full.write();
    const ModelSpec packed_spec = read_model_spec(packed), full_spec = read_model_spec(full);
    EXPECT_TRUE(packed_spec.unknown.empty());
    EXPECT_EQ(packed_spec.dtype, DType::bf16);
    const WeightSource source(packed, packed_spec);
    EXPECT_TRUE(source.quantized());
    EXPECT_FALSE(WeightSource(full, full_spec).quantized());
    for (int64_t i = 0; i < full_spec.layers; ++i) {
      const LayerWeights a = source.load(*backend, packed_spec.layer[i], DType::f32, true);
      const LayerWeights b = WeightSource(full, full_spec).load(*backend, full_spec.layer[i], DType::f32, true);
      for (Tap tap : kTaps)
        EXPECT_EQ(tap_values(*backend, a, tap), tap_values(*backend, b, tap)) << bits << " bits " << to_string(tap);
    }
  }
}

TEST(WeightSource, DamagedQuantizedTensorsAreRefused) {
  const auto backend = make_cpu_backend();
  const std::string module = "model.layers.0.self_attn.q_proj";
  const auto message = [&](const std::function<void(TemporaryModel&)>& change) -> std::string {
    PackedPair pair("qwen3_moe", 4, false, 8);
    change(pair.packed);
    const Checkpoint checkpoint = pair.packed.write();
    try {
      const ModelSpec spec = read_model_spec(checkpoint);
      WeightSource(checkpoint, spec).load(*backend, spec.layer[0], DType::f32, true);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::input) << error.what();
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(
      message([&](TemporaryModel& m) { m.tensors.erase(module + ".weight_scale"); }).find(module + ".weight_scale"),
      std::string::npos);
  EXPECT_NE(message([&](TemporaryModel& m) {
              m.add(module + ".weight_scale", DType::bf16, {64, 5});
            }).find("[64, 5]"),
            std::string::npos);
  EXPECT_NE(message([&](TemporaryModel& m) {
              m.add(module + ".weight_packed", DType::i32, {64, 7});
            }).find("7 words"),
            std::string::npos);
  EXPECT_NE(message([&](TemporaryModel& m) {
              m.add(module + ".weight_zero_point", DType::i32, {9, 6});
            }).find("weight_zero_point"),
            std::string::npos);
  EXPECT_NE(message([&](TemporaryModel& m) { m.add(module + ".weight_g_idx", DType::i32, {48}); }).find("weight_g_idx"),
            std::string::npos);
}

}  // namespace
}  // namespace shardq
