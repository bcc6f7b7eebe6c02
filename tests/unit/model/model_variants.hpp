#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "io/packing.hpp"
#include "temporary_model.hpp"

namespace shardq {

/// Turns the fused down_proj of "qwen3_moe_fused" (8 experts, hidden 48, inner 24) into its transposed form.
inline void transpose_down_experts(TemporaryModel& model) {
  constexpr int64_t kRows = 48, kCols = 24;
  for (int64_t layer = 0; layer < 2; ++layer) {
    const std::string name = "model.layers." + std::to_string(layer) + ".mlp.experts.down_proj";
    const std::vector<float> before(model.floats(name), model.floats(name) + 8 * kRows * kCols);
    model.tensors[name].shape = {8, kCols, kRows};
    for (int64_t e = 0; e < 8; ++e)
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t c = 0; c < kCols; ++c)
          model.floats(name)[(e * kCols + c) * kRows + r] = before[(e * kRows + r) * kCols + c];
  }
}

/// Replaces every linear of a model by random codes, and returns the same model with the reconstructed weights in full.
struct PackedPair {
  PackedPair(const char* golden, int bits, bool symmetric, int64_t group_size) : packed(golden), full(golden) {
    const ModelSpec spec = read_model_spec(Checkpoint(golden_directory() / golden));
    std::mt19937 generator(7);
    const int lowest = -(1 << (bits - 1)), highest = (1 << (bits - 1)) - 1;
    std::uniform_int_distribution<int> code(lowest, highest);
    std::uniform_real_distribution<float> unit(0.01f, 0.05f);
    for (const LayerSpec& layer : spec.layer)
      for (const LinearSpec& linear : layer.linears) {
        const int64_t groups = linear.cols / (group_size < 0 ? linear.cols : group_size);
        std::vector<int8_t> codes(linear.rows * linear.cols), zeros(linear.rows * groups, 0);
        for (int8_t& c : codes) c = static_cast<int8_t>(code(generator));
        if (!symmetric)
          for (int8_t& z : zeros) z = static_cast<int8_t>(code(generator));
        packed.tensors.erase(linear.tensor);
        packed.add(linear.module + ".weight_scale", DType::bf16, {linear.rows, groups});
        auto* scales = reinterpret_cast<BFloat16*>(packed.tensors[linear.module + ".weight_scale"].owned.data());
        for (int64_t i = 0; i < linear.rows * groups; ++i) scales[i] = to_bf16(unit(generator));
        put(linear.module + ".weight_packed", pack_rows(codes, linear.rows, linear.cols, bits),
            {linear.rows, packed_words(linear.cols, bits)});
        if (!symmetric)
          put(linear.module + ".weight_zero_point", pack_columns(zeros, linear.rows, groups, bits),
              {packed_words(linear.rows, bits), groups});
        packed.add(linear.module + ".weight_shape", DType::i64, {2});
        for (int64_t r = 0; r < linear.rows; ++r)
          for (int64_t c = 0; c < linear.cols; ++c) {
            const int64_t g = r * groups + c * groups / linear.cols;
            full.floats(linear.tensor)[r * linear.cols + c] =
                round_to_bf16(static_cast<float>(codes[r * linear.cols + c] - zeros[g]) * to_float(scales[g]));
          }
      }
    nlohmann::json weights = {{"num_bits", bits},       {"type", "int"},
                              {"symmetric", symmetric}, {"strategy", group_size < 0 ? "channel" : "group"},
                              {"dynamic", false},       {"observer", "minmax"},
                              {"actorder", nullptr}};
    weights["group_size"] = group_size < 0 ? nlohmann::json(nullptr) : nlohmann::json(group_size);
    packed.config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                            {"format", "pack-quantized"},
                                            {"quantization_status", "compressed"},
                                            {"ignore", {"lm_head"}},
                                            {"config_groups",
                                             {{"group_0",
                                               {{"format", "pack-quantized"},
                                                {"targets", {"Linear"}},
                                                {"weights", weights},
                                                {"input_activations", nullptr},
                                                {"output_activations", nullptr}}}}}};
  }
  void put(const std::string& name, const std::vector<int32_t>& words, Shape shape) {
    packed.add(name, DType::i32, shape);
    ASSERT_EQ(packed.tensors[name].owned.size(), words.size() * 4);
    std::memcpy(packed.tensors[name].owned.data(), words.data(), words.size() * 4);
  }
  TemporaryModel packed, full;
};

}  // namespace shardq
