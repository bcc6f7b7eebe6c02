#include "pipeline/preflight.hpp"

#include <algorithm>
#include <set>

#include "core/build_info.hpp"
#include "core/error.hpp"
#include "io/files.hpp"
#include "io/output_writer.hpp"

namespace shardq {
namespace {

std::string hex(uint64_t value) {
  return fmt::format("{:016x}", value);
}

/// Content of the shards: names, sizes, headers, and samples of the data (64 KiB out of every 16 MiB, and the end),
/// because reading hundreds of gigabytes just to compare them would cost more than the run. Whatever replaces a model
/// file changes nearly every block.
uint64_t model_fingerprint(const Checkpoint& checkpoint) {
  std::string text = checkpoint.config_text();
  for (const auto& shard : checkpoint.shards()) {
    text += shard->path().filename().string();
    for (const auto& [name, entry] : shard->entries()) {
      text += fmt::format("{} {} {} {} {};", name, safetensors_name(entry.dtype), to_string(entry.shape), entry.begin,
                          entry.end);
      const auto bytes = shard->bytes(entry);
      constexpr int64_t kStep = 16 << 20, kSample = 64 << 10;
      const int64_t size = static_cast<int64_t>(bytes.size());
      for (int64_t at = 0; at < size; at += kStep)
        text += hex(checksum(bytes.data() + at, std::min(kSample, size - at)));
      if (size > kSample) text += hex(checksum(bytes.data() + size - kSample, kSample));
    }
  }
  return checksum(text.data(), static_cast<int64_t>(text.size()));
}

}  // namespace

std::string work_directory(const Recipe& recipe) {
  if (!recipe.work.empty()) return recipe.work;
  std::string output = recipe.output;
  while (output.size() > 1 && output.back() == '/') output.pop_back();
  return output + ".work";
}

int64_t default_chunk_tokens(const Recipe& recipe, bool cuda) {
  if (recipe.chunk_tokens > 0) return recipe.chunk_tokens;
  return cuda ? 65536 : 2048;
}

DType compute_dtype(const Recipe& recipe, const ModelSpec& spec) {
  if (recipe.compute == "bf16") return DType::bf16;
  if (recipe.compute == "f32") return DType::f32;
  return spec.dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

void check_scheme(const QuantScheme& scheme, const ModelSpec& spec, const Selection& selection) {
  SHARDQ_CHECK(scheme.group_size == -1 || scheme.group_size >= 1, ExitCode::usage,
               "quantization.group_size: expected -1 (per channel) or a positive number, found {}", scheme.group_size);
  SHARDQ_CHECK(
      scheme.grid.symmetric || (scheme.grid.bits == 4 || scheme.grid.bits == 8 || scheme.grid.bits == 2),
      ExitCode::usage,
      "asymmetric {}-bit weights: readers of pack-quantized take packed zero points of 2, 4 or 8 bits only; choose "
      "quantization.symmetric: true or another num_bits",
      scheme.grid.bits);
  if (scheme.group_size < 0) return;
  std::vector<std::string> bad;
  std::set<std::string> kinds;
  int64_t count = 0;
  for (const LayerSpec& layer : spec.layer)
    for (size_t i = 0; i < layer.linears.size(); ++i) {
      const LinearSpec& linear = layer.linears[i];
      if (!selection.quantized[layer.index][i] || linear.cols % scheme.group_size == 0) continue;
      ++count;
      // One line must hold them all: layers are listed by what they are, with how many there are of each.
      const std::string leaf = linear.module.substr(linear.module.rfind('.') + 1);
      if (kinds.insert(fmt::format("{}/{}", layer.index, leaf)).second)
        bad.push_back(fmt::format("{} ({} inputs)", linear.module, linear.cols));
    }
  SHARDQ_CHECK(bad.empty(), ExitCode::usage, "group_size {} does not divide the inputs of {} linears: {}",
               scheme.group_size, count, fmt::join(bad, ", "));
}

Inputs check_inputs(Recipe& recipe) {
  SHARDQ_CHECK(!recipe.model.empty(), ExitCode::usage, "no model directory given (key model, or --model DIR)");
  Inputs inputs;
  inputs.checkpoint = std::make_unique<Checkpoint>(recipe.model);
  inputs.spec = read_model_spec(*inputs.checkpoint);
  SHARDQ_CHECK(
      !read_quantized_config(inputs.checkpoint->config_text()).quantized, ExitCode::input,
      "{}: expected a full-precision model, found one that is quantized already (quantization_config in config.json)",
      recipe.model);
  inputs.compute = compute_dtype(recipe, inputs.spec);
  recipe.scheme.grid.scale_dtype = inputs.spec.dtype;
  inputs.selection = select_linears(inputs.spec, recipe.targets, recipe.ignore);
  check_scheme(recipe.scheme, inputs.spec, inputs.selection);
  SHARDQ_CHECK(!recipe.tokens.empty() || recipe.scheme.method == Method::rtn, ExitCode::usage,
               "no calibration tokens given (key tokens, or --tokens FILE); only method rtn needs none");
  if (recipe.tokens.empty() || recipe.scheme.method == Method::rtn) {
    inputs.tokens = std::make_unique<TokenSet>(std::vector<std::vector<int32_t>>{});
  } else {
    inputs.tokens = std::make_unique<TokenSet>(recipe.tokens, inputs.spec.vocab, recipe.max_samples, recipe.max_length);
  }
  return inputs;
}

std::map<std::string, std::string> run_fingerprint(const Recipe& recipe, const Inputs& inputs) {
  // The recipe is compared key by key, so that a refusal can say which one changed.
  std::map<std::string, std::string> fingerprint{{"model", hex(model_fingerprint(*inputs.checkpoint))},
                                                 {"tokens", hex(inputs.tokens->fingerprint())},
                                                 {"version", kVersion},
                                                 {"compute", std::string(torch_name(inputs.compute))}};
  std::string section;
  const std::string text = recipe_text(recipe, RecipeText::fingerprint);
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const bool nested = line.starts_with(" ");
    const std::string key = line.substr(line.find_first_not_of(' '), colon - line.find_first_not_of(' '));
    if (!nested) section = key;
    if (colon + 1 < line.size()) fingerprint["recipe." + (nested ? section + "." : "") + key] = line.substr(colon + 2);
  }
  return fingerprint;
}

}  // namespace shardq
