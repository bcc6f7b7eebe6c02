// The quantization_config section of config.json in compressed-tensors' spelling, written and read.
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "io/output_writer.hpp"
#include "io/safetensors_header.hpp"

namespace shardq {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "pack-quantized";
// The release of the compressed-tensors library whose field set this is; readers use it for messages only.
constexpr const char* kFormatVersion = "0.18.0";

json parse_config(const std::string& text) {
  json config = json::parse(text, nullptr, false);
  SHARDQ_CHECK(!config.is_discarded() && config.is_object(), ExitCode::input, "config.json is not a valid JSON object");
  return config;
}

json weights_section(const OutputGroup& group) {
  const bool channel = group.group_size < 0;
  return {{"actorder", group.actorder.empty() ? json(nullptr) : json(group.actorder)},
          {"block_structure", nullptr},
          {"dynamic", false},
          {"group_size", channel ? json(nullptr) : json(group.group_size)},
          {"num_bits", group.bits},
          {"observer", group.observer},
          {"observer_kwargs", json::object()},
          {"scale_dtype", nullptr},
          {"strategy", channel ? "channel" : "group"},
          {"symmetric", group.symmetric},
          {"type", "int"},
          {"zp_dtype", group.symmetric ? json(nullptr) : json("torch.int8")}};
}

/// A member, or null where absent.
const json& member(const json& object, const char* key) {
  static const json kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

std::string shown(const json& value) {
  return printable(value.dump(-1, ' ', true, json::error_handler_t::replace));
}

/// Fails unless a member, where present and not null, equals `expected`.
void expect(const json& object, const char* key, const json& expected, const std::string& where) {
  const json& value = member(object, key);
  SHARDQ_CHECK(value.is_null() || value == expected, ExitCode::input, "config.json: {}.{} is {}, only {} is supported",
               where, key, shown(value), expected.dump());
}
void expect_absent(const json& object, const char* key, const std::string& where) {
  const json& value = member(object, key);
  SHARDQ_CHECK(value.is_null() || value.empty(), ExitCode::input, "config.json: {}.{} is {}, which is not supported",
               where, key, shown(value));
}

std::vector<std::string> strings(const json& value, const std::string& where) {
  std::vector<std::string> list;
  if (value.is_null()) return list;
  SHARDQ_CHECK(value.is_array(), ExitCode::input, "config.json: {} must be a list of strings", where);
  for (const json& item : value) {
    SHARDQ_CHECK(item.is_string(), ExitCode::input, "config.json: {} must be a list of strings, found {}", where,
                 shown(item));
    list.push_back(item.get<std::string>());
  }
  return list;
}

int64_t group_size_of(const json& weights, const std::string& where) {
  const json& strategy = member(weights, "strategy");
  const json& size = member(weights, "group_size");
  const bool has_size = size.is_number_integer() && size.get<int64_t>() > 0;
  if (strategy == "channel" || (strategy.is_null() && size == -1)) return -1;
  SHARDQ_CHECK((strategy == "group" || strategy.is_null()) && has_size, ExitCode::input,
               "config.json: {}: strategy {} with group_size {} is not supported, expected group with a positive size, "
               "or channel",
               where, shown(strategy), shown(size));
  return size.get<int64_t>();
}

OutputGroup read_group(const json& group, const std::string& where) {
  SHARDQ_CHECK(group.is_object(), ExitCode::input, "config.json: {} must be an object", where);
  expect(group, "format", kFormat, where);
  expect_absent(group, "input_activations", where);
  expect_absent(group, "output_activations", where);
  const json& weights = member(group, "weights");
  const std::string part = where + ".weights";
  SHARDQ_CHECK(weights.is_object(), ExitCode::input, "config.json: {} must be an object", part);
  expect(weights, "type", "int", part);
  expect(weights, "dynamic", false, part);
  expect_absent(weights, "block_structure", part);

  OutputGroup result;
  result.targets = strings(member(group, "targets"), where + ".targets");
  const json& bits = member(weights, "num_bits");
  SHARDQ_CHECK(bits.is_number_integer() && 1 <= bits.get<int64_t>() && bits.get<int64_t>() <= 8, ExitCode::input,
               "config.json: {}.num_bits is {}, expected 1 to 8", part, shown(bits));
  result.bits = bits.get<int>();
  const json& symmetric = member(weights, "symmetric");
  SHARDQ_CHECK(symmetric.is_null() || symmetric.is_boolean(), ExitCode::input,
               "config.json: {}.symmetric is {}, expected true or false", part, shown(symmetric));
  result.symmetric = symmetric.is_null() || symmetric.get<bool>();
  result.group_size = group_size_of(weights, part);
  // "weight" is the library's other name for static; "group" would need weight_g_idx.
  const json& actorder = member(weights, "actorder");
  SHARDQ_CHECK(actorder.is_null() || actorder == "static" || actorder == "weight", ExitCode::input,
               "config.json: {}.actorder is {}, expected null, \"static\" or \"weight\"", part, shown(actorder));
  result.actorder = actorder.is_null() ? "" : "static";
  const json& observer = member(weights, "observer");
  result.observer = observer.is_string() ? observer.get<std::string>() : "";
  return result;
}

}  // namespace

std::string compressed_tensors_config(const std::string& source_config_text, const std::vector<OutputGroup>& groups,
                                      const std::vector<std::string>& ignore) {
  json config = parse_config(source_config_text);
  json sections = json::object();
  // Readers take groups in the order of the file, which is sorted by name: pad the numbers where they would sort
  // otherwise.
  const size_t digits = std::to_string(groups.empty() ? 0 : groups.size() - 1).size();
  for (size_t i = 0; i < groups.size(); ++i)
    sections[fmt::format("group_{:0{}}", i, digits)] = {{"format", kFormat},
                                                        {"input_activations", nullptr},
                                                        {"output_activations", nullptr},
                                                        {"targets", groups[i].targets},
                                                        {"weights", weights_section(groups[i])}};
  config["quantization_config"] = {{"config_groups", std::move(sections)}, {"format", kFormat},
                                   {"global_compression_ratio", nullptr},  {"ignore", ignore},
                                   {"kv_cache_scheme", nullptr},           {"quant_method", "compressed-tensors"},
                                   {"quantization_status", "compressed"},  {"sparsity_config", json::object()},
                                   {"transform_config", json::object()},   {"version", kFormatVersion}};
  return config.dump(2, ' ', true);  // json objects keep their keys sorted
}

QuantizedConfig read_quantized_config(const std::string& config_text) {
  const json config = parse_config(config_text);
  const json& section =
      member(config, config.contains("quantization_config") ? "quantization_config" : "compression_config");
  QuantizedConfig result;
  if (section.is_null()) return result;
  const std::string where = "quantization_config";
  SHARDQ_CHECK(section.is_object(), ExitCode::input, "config.json: {} must be an object", where);
  SHARDQ_CHECK(member(section, "quant_method") == "compressed-tensors", ExitCode::input,
               "config.json: {}.quant_method is {}, only \"compressed-tensors\" is supported", where,
               shown(member(section, "quant_method")));
  SHARDQ_CHECK(member(section, "format") == kFormat, ExitCode::input,
               "config.json: {}.format is {}, only \"{}\" is supported", where, shown(member(section, "format")),
               kFormat);
  expect(section, "quantization_status", "compressed", where);
  expect_absent(section, "kv_cache_scheme", where);
  expect_absent(section, "sparsity_config", where);
  expect_absent(section, "transform_config", where);
  const json& groups = member(section, "config_groups");
  SHARDQ_CHECK(groups.is_object() && !groups.empty(), ExitCode::input,
               "config.json: {}.config_groups must be an object with a group", where);
  for (const auto& [name, group] : groups.items())
    result.groups.push_back(read_group(group, where + ".config_groups." + printable(name)));
  result.ignore = strings(member(section, "ignore"), where + ".ignore");
  result.quantized = true;
  return result;
}

}  // namespace shardq
