#include "pipeline/inspect.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "io/files.hpp"
#include "io/output_writer.hpp"
#include "pipeline/progress.hpp"

namespace shardq {
namespace {
using Json = nlohmann::ordered_json;

std::string finished_run(const Json& report) {
  std::string text = fmt::format("finished run: {} modules, {}, {} rank(s) on {}\n", report["modules"].size(),
                                 readable_seconds(report["seconds"].get<double>()), report["ranks"].get<int>(),
                                 report["device"].get<std::string>());
  for (const auto& [verdict, count] : report["verdicts"].items())
    text += fmt::format("  {:6} {}\n", count.get<int64_t>(), verdict);
  // Tokens per expert, one line a layer: a router that starves experts shows at once.
  std::map<int64_t, std::vector<int64_t>> experts;
  std::vector<const Json*> losses;
  for (const Json& m : report["modules"]) {
    if (m["expert"].get<int64_t>() >= 0 && m["tap"] == "down") experts[m["layer"]].push_back(m["tokens"]);
    if (!m["loss_over_rtn"].is_null()) losses.push_back(&m);
  }
  for (auto& [layer, tokens] : experts) {
    std::ranges::sort(tokens);
    text += fmt::format("  layer {:3}: tokens per expert: least {}, median {}, most {}\n", layer, tokens.front(),
                        tokens[tokens.size() / 2], tokens.back());
  }
  std::ranges::sort(losses, [](const Json* a, const Json* b) {
    return (*a)["loss_over_rtn"].get<double>() > (*b)["loss_over_rtn"].get<double>();
  });
  text += "  highest loss relative to plain rounding:\n";
  for (size_t i = 0; i < std::min<size_t>(10, losses.size()); ++i)
    text += fmt::format("    {:.3f} {} ({} tokens, {})\n", (*losses[i])["loss_over_rtn"].get<double>(),
                        (*losses[i])["module"].get<std::string>(), (*losses[i])["tokens"].get<int64_t>(),
                        (*losses[i])["verdict"].get<std::string>());
  return text;
}

}  // namespace

std::string inspect(const std::filesystem::path& directory, bool json) {
  SHARDQ_CHECK(std::filesystem::is_directory(directory), ExitCode::input, "{}: no such directory", directory.string());
  try {
    if (std::filesystem::exists(directory / "report.json")) {
      const Json report = Json::parse(read_text(directory / "report.json"));
      return json ? report.dump(1) : finished_run(report);
    }
    if (std::filesystem::exists(directory / "manifest.json")) {
      const Json manifest = Json::parse(read_text(directory / "manifest.json"));
      if (json) return manifest.dump(1);
      std::string text = "unfinished run, stages stored:\n";
      for (const Json& stage : manifest.at("content").at("stages"))
        text += fmt::format("  {}\n", stage.at("name").get<std::string>());
      return text;
    }
    if (std::filesystem::exists(directory / "config.json")) {
      const Json config = Json::parse(read_text(directory / "config.json"));
      const Json quantization = config.contains("quantization_config") ? config["quantization_config"] : Json();
      if (json) return quantization.dump(1);
      const QuantizedConfig parsed = read_quantized_config(config.dump());
      if (!parsed.quantized) return "not quantized";
      std::string text;
      for (const OutputGroup& group : parsed.groups)
        text +=
            fmt::format("{} bits, {}, group size {}, targets {}\n", group.bits,
                        group.symmetric ? "symmetric" : "asymmetric", group.group_size, fmt::join(group.targets, ", "));
      return text + fmt::format("{} modules ignored", parsed.ignore.size());
    }
  } catch (const Json::exception& error) {
    fail(ExitCode::input, "{}: {}", directory.string(), error.what());
  }
  fail(ExitCode::input,
       "{}: expected a work directory (report.json or manifest.json) or a model directory (config.json)",
       directory.string());
}

}  // namespace shardq
