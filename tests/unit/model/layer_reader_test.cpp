#include "model/layer_reader.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "core/error.hpp"
#include "device_like_backend.hpp"
#include "temporary_model.hpp"

namespace shardq {
namespace {

TEST(LayerReader, GivesTheSameLayersOnHostAndDevice) {
  const Checkpoint checkpoint(golden_directory() / "qwen3_moe_dense");
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  const auto host = make_cpu_backend();
  DeviceLikeBackend device;
  LayerReader on_host(*host, source, spec, DType::f32, true), on_device(device, source, spec, DType::f32, true);
  for (int64_t index : {0, 1, 2, 0, 2, 1}) {  // in order, and not
    const LayerWeights a = on_host.get(index), b = on_device.get(index);
    for (Tap tap : kTaps)
      EXPECT_EQ(to_host(*host, a.taps[static_cast<size_t>(tap)]), to_host(device, b.taps[static_cast<size_t>(tap)]))
          << index;
    EXPECT_EQ(to_host(*host, a.q_norm), to_host(device, b.q_norm));
  }
}

TEST(LayerReader, AnErrorOfALayerReadAheadComesWhenItIsAskedFor) {
  TemporaryModel model("llama");
  model.floats("model.layers.1.mlp.up_proj.weight")[0] = NAN;
  const Checkpoint checkpoint = model.write();
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  DeviceLikeBackend device;
  LayerReader layers(device, source, spec, DType::f32, true);
  EXPECT_NO_THROW(layers.get(0));
  EXPECT_THROW(layers.get(1), Error);
  EXPECT_NO_THROW(layers.get(0));  // still usable
}

/// The whole forward on a backend whose memory the host must not touch: poisoned addresses would crash or differ.
TEST(DeviceMemory, EvaluationNeverTouchesItDirectly) {
  for (const char* name : {"llama_bias", "qwen3_moe_dense", "mixtral_fused"}) {
    const GoldenCase golden(name);
    const ModelSpec spec = read_model_spec(golden.checkpoint);
    std::vector<std::vector<int32_t>> samples;
    for (size_t i = 0; i + 1 < golden.starts.size(); ++i)
      samples.emplace_back(golden.ids.begin() + golden.starts[i], golden.ids.begin() + golden.starts[i + 1]);
    const TokenSet tokens(samples);
    std::vector<int64_t> which(samples.size());
    std::iota(which.begin(), which.end(), 0);
    const auto host = make_cpu_backend();
    DeviceLikeBackend device;
    const EvalResult a = evaluate(*host, golden.checkpoint, spec, tokens, which, DType::f32);
    const EvalResult b = evaluate(device, golden.checkpoint, spec, tokens, which, DType::f32);
    EXPECT_EQ(a.sample_losses, b.sample_losses) << name;
    EXPECT_EQ(a.best, b.best) << name;
    EXPECT_EQ(device.in_use(), 0) << name;  // everything was released
  }
}

}  // namespace
}  // namespace shardq
