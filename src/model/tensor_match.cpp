#include <algorithm>
#include <set>

#include "core/error.hpp"
#include "io/checkpoint.hpp"
#include "io/output_writer.hpp"
#include "model/model_config.hpp"
#include "model/model_spec.hpp"

// Matching of a ModelSpec with the tensors that a checkpoint really holds: fused experts, shapes, and what is left
// over.

namespace shardq {

namespace {

constexpr const char* kPackedSuffixes[] = {".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point"};

class Matcher {
 public:
  Matcher(const Checkpoint& checkpoint, ModelSpec& spec) : checkpoint_(checkpoint), spec_(spec) {}

  void run() {
    for (LayerSpec& layer : spec_.layer)
      if (layer.moe) find_experts(layer);
    expect(spec_.embedding, {spec_.vocab, spec_.hidden});
    expect(spec_.final_norm, {spec_.hidden});
    if (!spec_.tied_embeddings) expect(spec_.lm_head, {spec_.vocab, spec_.hidden});
    for (LayerSpec& layer : spec_.layer) match_layer(layer);
    SHARDQ_CHECK(missing_.empty(), ExitCode::input, "{}: tensor {} is missing{}", where(), missing_.front(),
                 missing_.size() > 1 ? fmt::format(" (and {} more)", missing_.size() - 1) : "");
    list_leftovers();
    spec_.dtype = stored_dtype();
  }

 private:
  std::string where() const { return checkpoint_.directory().string(); }

  /// Experts come as one tensor each or as one 3-D tensor for all; Mixtral's block goes by two names.
  void find_experts(LayerSpec& layer) {
    const std::string usual = layer.prefix + "mlp.", mixtral = layer.prefix + "block_sparse_moe.";
    for (const std::string& block : {usual, mixtral}) {
      const std::string gate_up = block + "experts.gate_up_proj", down = block + "experts.down_proj";
      if (!checkpoint_.has(gate_up)) continue;
      const int64_t inner = spec_.moe_intermediate;
      const bool gate_up_transposed = expect_fused(gate_up, 2 * inner, spec_.hidden);
      const bool down_transposed = expect_fused(down, spec_.hidden, inner);
      for (LinearSpec& linear : layer.linears) {
        if (linear.expert < 0) continue;
        const bool is_down = linear.tap == Tap::down;
        linear.tensor = is_down ? down : gate_up;
        linear.fused_index = linear.expert;
        linear.fused_row = linear.row_offset;
        linear.fused_transposed = is_down ? down_transposed : gate_up_transposed;
      }
      break;
    }
    if (!checkpoint_.has(layer.router) && checkpoint_.has(usual + "gate.weight")) layer.router = usual + "gate.weight";
  }

  /// Checks [experts, rows, cols] or its transposed form; true for the latter.
  bool expect_fused(const std::string& name, int64_t rows, int64_t cols) {
    if (!checkpoint_.has(name)) {
      missing_.push_back(name);
      return false;
    }
    const TensorEntry& entry = checkpoint_.entry(name);
    check_dtype(entry);
    if (entry.shape == Shape{spec_.experts, rows, cols}) return false;
    SHARDQ_CHECK((entry.shape == Shape{spec_.experts, cols, rows}), ExitCode::input,
                 "{}: tensor {}: expected shape {} (or {}), found {}", where(), name,
                 to_string(Shape{spec_.experts, rows, cols}), to_string(Shape{spec_.experts, cols, rows}),
                 to_string(entry.shape));
    return true;
  }

  void check_dtype(const TensorEntry& entry) const {
    SHARDQ_CHECK(entry.dtype == DType::bf16 || entry.dtype == DType::f16 || entry.dtype == DType::f32, ExitCode::input,
                 "{}: tensor {}: expected BF16, F16 or F32, found {}", where(), entry.name,
                 safetensors_name(entry.dtype));
  }

  void expect(const std::string& name, const Shape& shape) {
    known_.insert(name);
    if (!checkpoint_.has(name)) {
      missing_.push_back(name);
      return;
    }
    const TensorEntry& entry = checkpoint_.entry(name);
    check_dtype(entry);
    SHARDQ_CHECK(entry.shape == shape, ExitCode::input, "{}: tensor {}: expected shape {}, found {}", where(), name,
                 to_string(shape), to_string(entry.shape));
  }

  void match_layer(LayerSpec& layer) {
    expect(layer.input_norm, {spec_.hidden});
    expect(layer.post_attention_norm, {spec_.hidden});
    if (!layer.q_norm.empty()) {
      expect(layer.q_norm, {spec_.head_dim});
      expect(layer.k_norm, {spec_.head_dim});
    }
    if (layer.moe) expect(layer.router, {spec_.experts, spec_.hidden});
    for (const LinearSpec& linear : layer.linears) {
      match_weight(linear);
      if (!linear.bias.empty()) expect(linear.bias, {linear.rows});
    }
  }

  void match_weight(const LinearSpec& linear) {
    covered_.insert(linear.tensor);
    if (linear.fused_index >= 0) return;
    const std::string packed = linear.module + ".weight_packed";
    if (!checkpoint_.has(linear.tensor) && checkpoint_.has(packed)) {
      match_packed(linear, packed);
      return;
    }
    expect(linear.tensor, {linear.rows, linear.cols});
  }

  /// The number of bits, and with it the exact packed width, is checked where the weight is read.
  void match_packed(const LinearSpec& linear, const std::string& packed) {
    for (const char* suffix : kPackedSuffixes) covered_.insert(linear.module + suffix);
    const std::string scale = linear.module + ".weight_scale";
    if (!checkpoint_.has(scale)) {
      missing_.push_back(scale);
      return;
    }
    const TensorEntry& codes = checkpoint_.entry(packed);
    const TensorEntry& scales = checkpoint_.entry(scale);
    check_dtype(scales);
    SHARDQ_CHECK(codes.dtype == DType::i32 && codes.shape.size() == 2 && codes.shape[0] == linear.rows, ExitCode::input,
                 "{}: tensor {}: expected I32 [{}, words], found {} {}", where(), packed, linear.rows,
                 safetensors_name(codes.dtype), to_string(codes.shape));
    const bool groups_fit = scales.shape.size() == 2 && scales.shape[0] == linear.rows && scales.shape[1] > 0 &&
                            linear.cols % scales.shape[1] == 0;
    SHARDQ_CHECK(groups_fit, ExitCode::input, "{}: tensor {}: expected [{}, groups] with groups dividing {}, found {}",
                 where(), scale, linear.rows, linear.cols, to_string(scales.shape));
  }

  void list_leftovers() {
    const std::string stem = "model.layers.";
    for (const std::string& name : checkpoint_.names()) {
      if (covered_.contains(name)) continue;
      LayerSpec* layer = nullptr;
      if (name.starts_with(stem)) {
        const size_t dot = name.find('.', stem.size());
        const std::string digits = dot == std::string::npos ? "" : name.substr(stem.size(), dot - stem.size());
        if (!digits.empty() && digits.size() < 6 && std::all_of(digits.begin(), digits.end(), ::isdigit)) {
          const int64_t index = std::stol(digits);
          if (index < spec_.layers && std::to_string(index) == digits) layer = &spec_.layer[index];
        }
      }
      (layer ? layer->passthrough : spec_.passthrough).push_back(name);
      // A tied model may carry its head a second time; that is no surprise.
      if (!known_.contains(name) && !(spec_.tied_embeddings && name == "lm_head.weight")) spec_.unknown.push_back(name);
    }
  }

  DType stored_dtype() const {
    const LinearSpec& first = spec_.layer.front().linears.front();
    return checkpoint_.entry(checkpoint_.has(first.tensor) ? first.tensor : first.module + ".weight_scale").dtype;
  }

  const Checkpoint& checkpoint_;
  ModelSpec& spec_;
  std::set<std::string> known_;    ///< tensors that the forward uses beside the weights of linears
  std::set<std::string> covered_;  ///< tensors that linears are made of
  std::vector<std::string> missing_;
};

}  // namespace

ModelSpec read_model_spec(const Checkpoint& checkpoint) {
  ModelSpec spec = model_spec_from_config(checkpoint.config_text(), (checkpoint.directory() / "config.json").string());
  Matcher(checkpoint, spec).run();
  list_other_linears(spec);
  return spec;
}

}  // namespace shardq
