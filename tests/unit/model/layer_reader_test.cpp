#include "model/layer_reader.hpp"

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <numeric>
#include <thread>

#include "core/error.hpp"
#include "device_like_backend.hpp"
#include "model_variants.hpp"

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

/// Ranks as threads that gather through host copies, whatever backend each of them has.
class GatheringThreads {
 public:
  explicit GatheringThreads(int ranks) : ranks_(ranks), given_(ranks), barrier_(ranks) {}

  /// Runs body(rank, backend, its all_gather) on every rank.
  using AllGather = std::function<void(void*, std::span<const Range>, int64_t)>;
  void run(bool device, const std::function<void(int, Backend&, AllGather)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank)
      threads.emplace_back([&, rank] {
        const std::unique_ptr<Backend> backend = device ? std::make_unique<DeviceLikeBackend>() : make_cpu_backend();
        body(rank, *backend, [&, rank](void* data, std::span<const Range> ranges, int64_t size) {
          gather(rank, *backend, static_cast<std::byte*>(data), ranges, size);
        });
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void gather(int rank, Backend& backend, std::byte* data, std::span<const Range> ranges, int64_t size) {
    ASSERT_EQ(static_cast<int>(ranges.size()), ranks_);
    int64_t end = 0;
    for (const Range& range : ranges) {
      EXPECT_EQ(range.begin, end);
      end = range.end;
    }
    given_[rank].resize(ranges[rank].size() * size);
    backend.download(given_[rank].data(), data + ranges[rank].begin * size, ranges[rank].size() * size);
    // Had the rank read more than its share, the rest would still be there.
    std::vector<std::byte> lost(end * size, std::byte{0xff});
    backend.upload(data, lost.data(), end * size);
    barrier_.arrive_and_wait();
    for (int r = 0; r < ranks_; ++r) {
      ASSERT_EQ(static_cast<int64_t>(given_[r].size()), ranges[r].size() * size) << "ranks gather different tensors";
      backend.upload(data + ranges[r].begin * size, given_[r].data(), ranges[r].size() * size);
    }
    barrier_.arrive_and_wait();
  }
  int ranks_;
  std::vector<std::vector<std::byte>> given_;
  std::barrier<> barrier_;
};

/// Every tensor of a layer as floats; of the routed stacks only `experts`.
std::vector<std::vector<float>> values_of(Backend& backend, const LayerWeights& weights, const LayerSpec& layer,
                                          std::optional<Range> experts) {
  std::vector<std::vector<float>> all;
  for (Tap tap : kTaps) {
    const Tensor& stack = weights.taps[static_cast<size_t>(tap)];
    std::vector<float> values = to_host(backend, stack);
    if (experts && layer.moe && (tap == Tap::gate_up || tap == Tap::down)) {
      const int64_t one = stack.shape()[1] * stack.shape()[2];
      values = {values.begin() + experts->begin * one, values.begin() + experts->end * one};
    }
    all.push_back(std::move(values));
  }
  for (const Tensor& bias : weights.biases)
    if (bias) all.push_back(to_host(backend, bias));
  for (Tensor LayerWeights::*slot : {&LayerWeights::input_norm, &LayerWeights::post_attention_norm,
                                     &LayerWeights::q_norm, &LayerWeights::k_norm, &LayerWeights::router})
    if (weights.*slot) all.push_back(to_host(backend, weights.*slot));
  return all;
}

/// That 1 to 4 ranks, on host and device memory, in the dtype asked for, end with what a plain load gives.
void expect_shared_as_plain(const Checkpoint& checkpoint, DType compute, const std::string& name) {
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (const bool device : {false, true})
      for (const bool own_experts : {false, true})
        for (const bool share : {false, true})
          GatheringThreads(ranks).run(device, [&](int rank, Backend& backend, auto all_gather) {
            const std::string what = name + ", " + std::to_string(ranks) + " ranks" + (device ? ", device" : "") +
                                     (own_experts ? ", own experts" : "") + (share ? ", shared" : "");
            LayerReader reader(backend, source, spec, compute, true,
                               {.rank = rank,
                                .ranks = ranks,
                                .share = share,
                                .own_experts = own_experts,
                                .all_gather = share ? all_gather : nullptr});
            const Range experts = own_experts ? part(spec.experts, ranks, rank) : Range{0, spec.experts};
            for (const LayerSpec& layer : spec.layer) {
              const LayerWeights want = source.load(backend, layer, compute, true), got = reader.get(layer.index);
              EXPECT_EQ(got.experts, (layer.moe ? experts : Range{})) << what;
              EXPECT_TRUE(values_of(backend, got, layer, {}) == values_of(backend, want, layer, experts))
                  << what << ", layer " << layer.index;
            }
          });
}

TEST(SharedReading, GivesWhatAPlainLoadGives) {
  for (const char* name : {"llama_bias", "qwen3_moe_dense", "qwen3_moe", "mixtral_fused"})
    expect_shared_as_plain(Checkpoint(golden_directory() / name), DType::f32, name);
  expect_shared_as_plain(Checkpoint(golden_directory() / "mistral_window"), DType::f32, "f16 to f32");
  expect_shared_as_plain(Checkpoint(golden_directory() / "qwen3_moe"), DType::bf16, "f32 to bf16");
}

TEST(SharedReading, OfTransposedAndBf16AndQuantizedSources) {
  TemporaryModel turned("qwen3_moe_fused");
  transpose_down_experts(turned);
  expect_shared_as_plain(turned.write(), DType::f32, "transposed");

  TemporaryModel narrow("qwen3_moe");
  for (auto& [name, tensor] : narrow.tensors) {
    const auto wide = std::move(tensor.owned);
    tensor.owned = std::vector<std::byte>(wide.size() / 2);
    tensor.dtype = DType::bf16;
    convert_elements(wide.data(), DType::f32, tensor.owned.data(), DType::bf16, element_count(tensor.shape));
  }
  const Checkpoint narrow_checkpoint = narrow.write();
  expect_shared_as_plain(narrow_checkpoint, DType::bf16, "bf16");
  expect_shared_as_plain(narrow_checkpoint, DType::f32, "bf16 to f32");

  PackedPair pair("qwen3_moe", 3, false, 8);
  expect_shared_as_plain(pair.packed.write(), DType::bf16, "quantized");
}

TEST(SharedReading, ManyRanksLeaveSomeWithoutExperts) {
  const Checkpoint checkpoint(golden_directory() / "mixtral");
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  DeviceLikeBackend device;
  const int ranks = static_cast<int>(spec.experts) + 1;
  LayerReader last(device, source, spec, DType::f32, true, {.rank = ranks - 1, .ranks = ranks, .own_experts = true});
  for (int64_t index = 0; index < spec.layers; ++index) {
    const LayerWeights weights = last.get(index);
    EXPECT_EQ(weights.experts, (Range{spec.experts, spec.experts}));
    EXPECT_EQ(weights.taps[static_cast<size_t>(Tap::down)].shape()[0], 0);
    EXPECT_GT(weights.taps[static_cast<size_t>(Tap::qkv)].size(), 0);
  }
}

/// What prepare(layer) says on each rank; empty where it succeeds.
std::vector<std::string> messages_of_prepare(const Checkpoint& checkpoint, int ranks, int64_t layer, bool own_experts,
                                             bool device) {
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  std::vector<std::string> messages;
  for (int rank = 0; rank < ranks; ++rank) {
    DeviceLikeBackend device_memory;
    const auto host_memory = make_cpu_backend();
    Backend& backend = device ? static_cast<Backend&>(device_memory) : *host_memory;
    const auto no_gather = [](void*, std::span<const Range>, int64_t) { ADD_FAILURE() << "prepare gathers"; };
    LayerReader reader(
        backend, source, spec, DType::f32, true,
        {.rank = rank, .ranks = ranks, .share = true, .own_experts = own_experts, .all_gather = no_gather});
    messages.emplace_back();
    try {
      reader.prepare(layer);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::input);
      messages.back() = error.what();
    }
  }
  return messages;
}

/// Expects that rank `bad` alone fails, naming every word.
void expect_one_fails(const std::vector<std::string>& messages, int bad, const std::vector<std::string>& words) {
  for (int rank = 0; rank < static_cast<int>(messages.size()); ++rank) {
    if (rank != bad) {
      EXPECT_EQ(messages[rank], "") << "rank " << rank;
      continue;
    }
    for (const std::string& word : words)
      EXPECT_NE(messages[rank].find(word), std::string::npos) << "'" << messages[rank] << "' lacks " << word;
    EXPECT_EQ(messages[rank].find('\n'), std::string::npos);
  }
}

TEST(SharedReading, ABadWeightIsFoundByTheRankThatReadsItAlone) {
  for (const bool device : {false, true}) {
    for (const int64_t row : {0, 15, 16, 31, 32, 63}) {  // gate: the first 64 of the 128 rows of gate and up
      TemporaryModel model("llama");
      model.floats("model.layers.0.mlp.gate_proj.weight")[row * 48 + 7] = NAN;
      const Checkpoint checkpoint = model.write();
      for (const int ranks : {2, 4}) {
        const std::string place = "gate_proj.weight: NaN or infinity at [" + std::to_string(row) + ", 7]";
        expect_one_fails(messages_of_prepare(checkpoint, ranks, 0, false, device), static_cast<int>(row * ranks / 128),
                         {place});
      }
    }
    TemporaryModel model("qwen3_moe");
    model.floats("model.layers.1.mlp.experts.6.down_proj.weight")[5] = INFINITY;
    const Checkpoint checkpoint = model.write();
    for (const bool own_experts : {false, true})
      expect_one_fails(messages_of_prepare(checkpoint, 4, 1, own_experts, device), 3,
                       {"experts.6.down_proj", "[0, 5]"});
    // A small tensor is read by all.
    model.floats("model.layers.1.mlp.experts.6.down_proj.weight")[5] = 0;
    model.floats("model.layers.1.mlp.gate.weight")[0] = NAN;
    for (const std::string& message : messages_of_prepare(model.write(), 3, 1, false, device))
      EXPECT_NE(message.find("mlp.gate.weight"), std::string::npos) << message;
  }
}

TEST(SharedReading, ACutFileIsFoundByTheRankThatReadsItsEnd) {
  for (const bool device : {false, true}) {
    TemporaryModel model("llama");  // by name v_proj of layer 1 is last in the file, but for the final norm
    const Checkpoint checkpoint = model.write();
    const auto& path = checkpoint.shards()[0]->path();
    const TensorEntry& entry = checkpoint.entry("model.layers.1.self_attn.v_proj.weight");
    const int64_t cut = entry.end - 4;
    std::filesystem::resize_file(path, cut);
    expect_one_fails(messages_of_prepare(checkpoint, 4, 1, false, device), 3,
                     {path.string(), entry.name, "4 bytes early at byte " + std::to_string(cut)});
  }
}

TEST(SharedReading, AfterAFailedPreparationTheReaderGoesOn) {
  TemporaryModel model("llama");
  model.floats("model.layers.1.mlp.up_proj.weight")[0] = NAN;
  const Checkpoint checkpoint = model.write();
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  const auto host = make_cpu_backend();
  DeviceLikeBackend device;
  for (Backend* backend : {host.get(), static_cast<Backend*>(&device)}) {
    LayerReader reader(*backend, source, spec, DType::f32, true);
    EXPECT_THROW(reader.take(0), Error);  // nothing prepared
    reader.prepare(0);
    EXPECT_THROW(reader.take(1), Error);
    EXPECT_TRUE(reader.take(0).input_norm);
    EXPECT_THROW(reader.take(0), Error);  // taken
    reader.prepare(0);
    EXPECT_THROW(reader.prepare(1), Error);
    EXPECT_THROW(reader.take(0), Error);  // not what a failed preparation was for
    reader.prepare(0);
    EXPECT_TRUE(reader.take(0).input_norm);
  }
  EXPECT_EQ(device.in_use(), 0);
}

TEST(SharedReading, ImpossiblePlansAreRefused) {
  const Checkpoint checkpoint(golden_directory() / "llama");
  const ModelSpec spec = read_model_spec(checkpoint);
  const WeightSource source(checkpoint, spec);
  const auto host = make_cpu_backend();
  EXPECT_THROW(LayerReader(*host, source, spec, DType::f32, true, {.rank = 2, .ranks = 2}), Error);
  EXPECT_THROW(LayerReader(*host, source, spec, DType::f32, true, {.ranks = 2, .share = true}), Error);
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
