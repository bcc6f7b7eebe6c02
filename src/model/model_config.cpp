#include "model/model_config.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.hpp"

namespace shardq {

namespace {

using Json = nlohmann::json;

/// Typed access to one object of config.json; every complaint names the file and the key.
class ConfigReader {
 public:
  ConfigReader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  /// Present, be it null.
  bool mentions(const char* key) const { return object_.contains(key); }
  const Json& at(const char* key) const { return object_[key]; }
  const std::string& where() const { return where_; }

  int64_t integer(const char* key) const {
    SHARDQ_CHECK(has(key), ExitCode::input, "{}: key \"{}\" is missing", where_, key);
    SHARDQ_CHECK(object_[key].is_number_integer(), ExitCode::input, "{}: key \"{}\": expected an integer, found {}",
                 where_, key, object_[key].dump());
    return object_[key].get<int64_t>();
  }
  int64_t integer(const char* key, int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
  int64_t positive(const char* key) const {
    const int64_t value = integer(key);
    SHARDQ_CHECK(value > 0, ExitCode::input, "{}: key \"{}\": expected a positive number, found {}", where_, key,
                 value);
    return value;
  }
  double number(const char* key, double otherwise) const {
    if (!has(key)) return otherwise;
    SHARDQ_CHECK(object_[key].is_number(), ExitCode::input, "{}: key \"{}\": expected a number, found {}", where_, key,
                 object_[key].dump());
    return object_[key].get<double>();
  }
  bool boolean(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    SHARDQ_CHECK(object_[key].is_boolean(), ExitCode::input, "{}: key \"{}\": expected true or false, found {}", where_,
                 key, object_[key].dump());
    return object_[key].get<bool>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    if (!has(key)) return otherwise;
    SHARDQ_CHECK(object_[key].is_string(), ExitCode::input, "{}: key \"{}\": expected a string, found {}", where_, key,
                 object_[key].dump());
    return object_[key].get<std::string>();
  }

 private:
  const Json& object_;
  std::string where_;
};

struct Architecture {
  const char* model_type;
  const char* name;
  double rms_norm_eps, rope_theta;  ///< defaults of the transformers configuration class
};
constexpr Architecture kArchitectures[] = {
    {"llama", "LlamaForCausalLM", 1e-6, 1e4},     {"mistral", "MistralForCausalLM", 1e-6, 1e4},
    {"qwen2", "Qwen2ForCausalLM", 1e-6, 1e4},     {"qwen3", "Qwen3ForCausalLM", 1e-6, 1e4},
    {"mixtral", "MixtralForCausalLM", 1e-5, 1e6}, {"qwen3_moe", "Qwen3MoeForCausalLM", 1e-6, 1e4},
};

const Architecture& find_architecture(const ConfigReader& config) {
  const std::string type = config.text("model_type", "");
  std::string known;
  for (const Architecture& a : kArchitectures) {
    if (type == a.model_type) return a;
    known += std::string(known.empty() ? "" : ", ") + a.model_type;
  }
  fail(ExitCode::input, "{}: key \"model_type\": \"{}\" is not supported (known: {})", config.where(), type, known);
}

RopeSpec::Type rope_type(const ConfigReader& rope, const std::string& key) {
  const std::string name = rope.text("rope_type", rope.text("type", "default"));
  if (name == "default") return RopeSpec::Type::default_;
  if (name == "linear") return RopeSpec::Type::linear;
  if (name == "dynamic") return RopeSpec::Type::dynamic;
  if (name == "llama3") return RopeSpec::Type::llama3;
  if (name == "yarn") return RopeSpec::Type::yarn;
  fail(ExitCode::input,
       "{}: key \"{}\": rope type \"{}\" is not supported (known: default, linear, dynamic, llama3, yarn)",
       rope.where(), key, name);
}

RopeSpec read_rope(const ConfigReader& config, int64_t max_position, double default_theta) {
  // transformers 5 writes "rope_parameters"; before that "rope_scaling" (often null) stood beside a top-level
  // "rope_theta".
  const char* key = config.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const Json parameters = config.has(key) ? config.at(key) : Json::object();
  SHARDQ_CHECK(parameters.is_object(), ExitCode::input, "{}: key \"{}\": expected an object, found {}", config.where(),
               key, parameters.dump());
  for (const auto& [name, value] : parameters.items())
    SHARDQ_CHECK(!value.is_object(), ExitCode::input,
                 "{}: key \"{}.{}\": rope parameters for each layer type are not supported", config.where(), key, name);
  const ConfigReader rope(parameters, config.where());
  RopeSpec spec;
  spec.type = rope_type(rope, key);
  spec.theta = rope.number("rope_theta", config.number("rope_theta", default_theta));
  SHARDQ_CHECK(spec.theta > 1, ExitCode::input, "{}: key \"rope_theta\": expected a number above 1, found {}",
               config.where(), spec.theta);
  const double partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0));
  SHARDQ_CHECK(partial == 1.0, ExitCode::input, "{}: key \"partial_rotary_factor\": {} is not supported, only 1",
               config.where(), partial);
  if (spec.type == RopeSpec::Type::default_) return spec;

  spec.original_max_position = config.integer("original_max_position_embeddings",
                                              rope.integer("original_max_position_embeddings", max_position));
  // The dynamic type measures growth against the model's own limit, whatever else stands there.
  if (spec.type == RopeSpec::Type::dynamic) spec.original_max_position = max_position;
  SHARDQ_CHECK(spec.original_max_position > 0, ExitCode::input,
               "{}: key \"{}.original_max_position_embeddings\": expected a positive number, found {}", config.where(),
               key, spec.original_max_position);
  const bool factor_derived = spec.type == RopeSpec::Type::yarn && !rope.has("factor");
  SHARDQ_CHECK(factor_derived || rope.has("factor"), ExitCode::input, "{}: key \"{}.factor\" is missing",
               config.where(), key);
  spec.factor =
      factor_derived ? static_cast<double>(max_position) / spec.original_max_position : rope.number("factor", 1);
  SHARDQ_CHECK(spec.factor > 0, ExitCode::input, "{}: key \"{}.factor\": expected a positive number, found {}",
               config.where(), key, spec.factor);
  if (spec.type == RopeSpec::Type::llama3) {
    for (const char* needed : {"low_freq_factor", "high_freq_factor"})
      SHARDQ_CHECK(rope.has(needed), ExitCode::input, "{}: key \"{}.{}\" is missing", config.where(), key, needed);
    spec.low_freq_factor = rope.number("low_freq_factor", 1);
    spec.high_freq_factor = rope.number("high_freq_factor", 4);
    SHARDQ_CHECK(0 < spec.low_freq_factor && spec.low_freq_factor < spec.high_freq_factor, ExitCode::input,
                 "{}: key \"{}.high_freq_factor\": expected more than low_freq_factor {} (itself positive), found {}",
                 config.where(), key, spec.low_freq_factor, spec.high_freq_factor);
  }
  if (spec.type == RopeSpec::Type::yarn) {
    spec.attention_factor = rope.number("attention_factor", 0);
    spec.mscale = rope.number("mscale", 0);
    spec.mscale_all_dim = rope.number("mscale_all_dim", 0);
    spec.beta_fast = rope.number("beta_fast", 32);
    spec.beta_slow = rope.number("beta_slow", 1);
    spec.truncate = rope.boolean("truncate", true);
    SHARDQ_CHECK(spec.beta_slow > 0 && spec.beta_fast > 0, ExitCode::input,
                 "{}: key \"{}.beta_fast\"/\"beta_slow\": expected positive numbers, found {}/{}", config.where(), key,
                 spec.beta_fast, spec.beta_slow);
  }
  return spec;
}

/// Each family has its own rule for which layers slide; they are followed to the letter, or the forward would differ.
std::vector<int64_t> read_windows(const ConfigReader& config, const ModelSpec& spec) {
  std::vector<int64_t> windows(spec.layers, 0);
  if (spec.model_type == "llama") return windows;
  if (spec.model_type == "mistral" || spec.model_type == "mixtral") {
    // null means none; an absent key means 4096 to Mistral's configuration class and none to Mixtral's.
    const int64_t otherwise = spec.model_type == "mistral" && !config.mentions("sliding_window") ? 4096 : 0;
    windows.assign(spec.layers, config.integer("sliding_window", otherwise));
  } else if (config.boolean("use_sliding_window", false)) {
    const int64_t window = config.integer("sliding_window", 4096);
    const int64_t full_layers = spec.model_type == "qwen3_moe" ? 0 : config.integer("max_window_layers", 28);
    for (int64_t i = 0; i < spec.layers; ++i) windows[i] = i >= full_layers ? window : 0;
    if (spec.model_type != "qwen3_moe" && config.has("layer_types")) {
      const Json& types = config.at("layer_types");
      SHARDQ_CHECK(types.is_array() && static_cast<int64_t>(types.size()) == spec.layers, ExitCode::input,
                   "{}: key \"layer_types\": expected a list of {} entries, found {}", config.where(), spec.layers,
                   types.dump());
      for (int64_t i = 0; i < spec.layers; ++i) {
        const bool sliding = types[i] == "sliding_attention";
        SHARDQ_CHECK(sliding || types[i] == "full_attention", ExitCode::input,
                     "{}: key \"layer_types\": entry {} is {}, known are \"full_attention\" and \"sliding_attention\"",
                     config.where(), i, types[i].dump());
        windows[i] = sliding ? window : 0;
      }
    }
  }
  for (int64_t window : windows)
    SHARDQ_CHECK(window >= 0, ExitCode::input, "{}: key \"sliding_window\": expected a positive number, found {}",
                 config.where(), window);
  return windows;
}

std::vector<bool> read_moe_layers(const ConfigReader& config, const ModelSpec& spec) {
  std::vector<bool> moe(spec.layers, spec.experts > 0);
  if (spec.model_type != "qwen3_moe") return moe;
  const int64_t step = config.integer("decoder_sparse_step", 1);
  SHARDQ_CHECK(step > 0, ExitCode::input, "{}: key \"decoder_sparse_step\": expected a positive number, found {}",
               config.where(), step);
  for (int64_t i = 0; i < spec.layers; ++i) moe[i] = spec.experts > 0 && (i + 1) % step == 0;
  if (!config.has("mlp_only_layers")) return moe;
  const Json& dense = config.at("mlp_only_layers");
  SHARDQ_CHECK(dense.is_array(), ExitCode::input, "{}: key \"mlp_only_layers\": expected a list, found {}",
               config.where(), dense.dump());
  for (const Json& entry : dense) {
    SHARDQ_CHECK(entry.is_number_integer(), ExitCode::input, "{}: key \"mlp_only_layers\": expected integers, found {}",
                 config.where(), entry.dump());
    const int64_t index = entry.get<int64_t>();
    if (0 <= index && index < spec.layers) moe[index] = false;
  }
  return moe;
}

void read_experts(const ConfigReader& config, ModelSpec& spec) {
  if (spec.model_type == "mixtral") {
    spec.experts = config.positive(config.has("num_local_experts") ? "num_local_experts" : "num_experts");
    spec.moe_intermediate = spec.intermediate;
    spec.top_k = config.integer("num_experts_per_tok", 2);
    spec.normalize_top_k = true;
  } else if (spec.model_type == "qwen3_moe") {
    spec.experts = config.integer(config.has("num_experts") ? "num_experts" : "num_local_experts");
    if (spec.experts == 0) return;
    spec.moe_intermediate = config.positive("moe_intermediate_size");
    spec.top_k = config.positive("num_experts_per_tok");
    spec.normalize_top_k = config.boolean("norm_topk_prob", false);
  } else {
    return;
  }
  SHARDQ_CHECK(spec.experts > 0 && spec.experts <= 65536, ExitCode::input,
               "{}: key \"num_experts\": expected 1 to 65536, found {}", config.where(), spec.experts);
  SHARDQ_CHECK(0 < spec.top_k && spec.top_k <= spec.experts, ExitCode::input,
               "{}: key \"num_experts_per_tok\": expected 1 to {} (the experts), found {}", config.where(),
               spec.experts, spec.top_k);
}

void read_attention(const ConfigReader& config, ModelSpec& spec) {
  spec.heads = config.positive("num_attention_heads");
  spec.kv_heads = config.integer("num_key_value_heads", spec.heads);
  SHARDQ_CHECK(spec.kv_heads > 0 && spec.heads % spec.kv_heads == 0, ExitCode::input,
               "{}: key \"num_key_value_heads\": expected a divisor of num_attention_heads {}, found {}",
               config.where(), spec.heads, spec.kv_heads);
  if (config.has("head_dim")) {
    spec.head_dim = config.positive("head_dim");
  } else {
    // Qwen3's configuration class has its own default; the others divide.
    SHARDQ_CHECK(spec.model_type == "qwen3" || spec.hidden % spec.heads == 0, ExitCode::input,
                 "{}: key \"hidden_size\": {} is no multiple of num_attention_heads {}, and \"head_dim\" is absent",
                 config.where(), spec.hidden, spec.heads);
    spec.head_dim = spec.model_type == "qwen3" ? 128 : spec.hidden / spec.heads;
  }
  SHARDQ_CHECK(spec.head_dim % 2 == 0, ExitCode::input, "{}: key \"head_dim\": expected an even number, found {}",
               config.where(), spec.head_dim);
}

}  // namespace

ModelConfig parse_model_config(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  SHARDQ_CHECK(json.is_object(), ExitCode::input, "{}: expected a JSON object", where);
  const ConfigReader config(json, where);
  const Architecture& architecture = find_architecture(config);
  ModelConfig result;
  ModelSpec& spec = result.spec;
  spec.model_type = architecture.model_type;
  spec.architecture = architecture.name;
  if (config.has("architectures")) {
    const Json& names = config.at("architectures");
    SHARDQ_CHECK(names.is_array() && names.size() == 1 && names[0] == architecture.name, ExitCode::input,
                 "{}: key \"architectures\": expected [\"{}\"] for model_type \"{}\", found {}", where,
                 architecture.name, spec.model_type, names.dump());
  }
  const std::string activation = config.text("hidden_act", "silu");
  SHARDQ_CHECK(activation == "silu" || activation == "swish", ExitCode::input,
               "{}: key \"hidden_act\": activation \"{}\" is not supported (known: silu)", where, activation);
  const std::string dtype = config.text("dtype", config.text("torch_dtype", "float32"));
  const auto parsed = dtype_from_torch(dtype);
  SHARDQ_CHECK(parsed && (*parsed == DType::bf16 || *parsed == DType::f16 || *parsed == DType::f32), ExitCode::input,
               "{}: key \"{}\": \"{}\" is not supported (known: bfloat16, float16, float32)", where,
               config.has("dtype") ? "dtype" : "torch_dtype", dtype);
  spec.dtype = *parsed;
  spec.vocab = config.positive("vocab_size");
  spec.hidden = config.positive("hidden_size");
  spec.layers = config.positive("num_hidden_layers");
  SHARDQ_CHECK(spec.layers <= 10000, ExitCode::input, "{}: key \"num_hidden_layers\": expected at most 10000, found {}",
               where, spec.layers);
  spec.intermediate = config.positive("intermediate_size");
  spec.max_position = config.integer("max_position_embeddings", 2048);
  SHARDQ_CHECK(spec.max_position > 0, ExitCode::input,
               "{}: key \"max_position_embeddings\": expected a positive number, found {}", where, spec.max_position);
  spec.rms_norm_eps = config.number("rms_norm_eps", architecture.rms_norm_eps);
  spec.tied_embeddings = config.boolean("tie_word_embeddings", false);
  read_attention(config, spec);
  read_experts(config, spec);
  spec.rope = read_rope(config, spec.max_position, architecture.rope_theta);
  result.windows = read_windows(config, spec);
  result.moe = read_moe_layers(config, spec);
  const bool attention_bias = config.boolean("attention_bias", false);
  const bool honours_attention_bias =
      spec.model_type == "llama" || spec.model_type == "qwen3" || spec.model_type == "qwen3_moe";
  result.qkv_bias = spec.model_type == "qwen2" || (honours_attention_bias && attention_bias);
  result.o_bias = honours_attention_bias && attention_bias;
  result.mlp_bias = spec.model_type == "llama" && config.boolean("mlp_bias", false);
  result.qk_norm = spec.model_type == "qwen3" || spec.model_type == "qwen3_moe";
  return result;
}

}  // namespace shardq
