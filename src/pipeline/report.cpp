#include "pipeline/report.hpp"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/build_info.hpp"
#include "io/files.hpp"
#include "pipeline/preflight.hpp"
#include "pipeline/progress.hpp"

namespace shardq {
using Json = nlohmann::ordered_json;
namespace {

int64_t directory_bytes(const std::filesystem::path& directory) {
  int64_t total = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (entry.is_regular_file() && entry.path().extension() == ".safetensors")
      total += static_cast<int64_t>(entry.file_size());
  return total;
}

Json record_json(const ModuleRecord& r) {
  return Json{{"module", r.module},
              {"layer", r.layer},
              {"tap", to_string(r.tap)},
              {"expert", r.expert},
              {"rows", r.rows},
              {"cols", r.cols},
              {"verdict", to_string(r.verdict)},
              {"tokens", r.tokens},
              {"loss", r.loss},
              {"loss_over_rtn", r.loss_over_rtn < 0 ? Json() : Json(r.loss_over_rtn)},
              {"damping", r.damping},
              {"dead_columns", r.dead_columns},
              {"seconds", r.seconds}};
}

Tap tap_from_string(const std::string& text) {
  for (Tap tap : kTaps)
    if (text == to_string(tap)) return tap;
  fail(ExitCode::disk, "stage text names an unknown tap '{}'", text);
}

ModuleRecord record_from_json(const Json& j) {
  ModuleRecord r;
  r.module = j.at("module").get<std::string>();
  r.layer = j.at("layer");
  r.tap = tap_from_string(j.at("tap"));
  r.expert = j.at("expert");
  r.rows = j.at("rows");
  r.cols = j.at("cols");
  r.verdict = verdict_from_string(j.at("verdict"));
  r.tokens = j.at("tokens");
  r.loss = j.at("loss");
  r.loss_over_rtn = j.at("loss_over_rtn").is_null() ? -1.0 : j.at("loss_over_rtn").get<double>();
  r.damping = j.at("damping");
  r.dead_columns = j.at("dead_columns");
  r.seconds = j.at("seconds");
  return r;
}

}  // namespace

void Report::add(const Job& job, const LayerSpec& layer, Tap tap, const TapResult& result) {
  const int64_t stack_rows = result.codes.shape()[1];
  for (size_t i = 0; i < layer.linears.size(); ++i) {
    const LinearSpec& linear = layer.linears[i];
    if (linear.tap != tap || !job.selection.quantized[layer.index][i]) continue;
    const int64_t matrix = std::max<int64_t>(linear.expert, 0);
    const MatrixOutcome& outcome = result.outcomes[matrix];
    ModuleRecord r;
    r.module = linear.module;
    r.layer = layer.index;
    r.tap = tap;
    r.expert = linear.expert;
    r.rows = linear.rows;
    r.cols = linear.cols;
    r.verdict = outcome.verdict;
    r.tokens = outcome.tokens;
    r.damping = outcome.damping;
    r.dead_columns = outcome.dead_columns;
    r.seconds = result.seconds;
    double sampled = 0, sampled_rtn = 0;
    for (int64_t row = 0; row < linear.rows; ++row) {
      const int64_t at = matrix * stack_rows + linear.row_offset + row;
      r.loss += result.losses[at];
      if (result.rtn_losses[at] >= 0) {
        sampled += result.losses[at];
        sampled_rtn += result.rtn_losses[at];
      }
    }
    if (sampled_rtn > 0) r.loss_over_rtn = sampled / sampled_rtn;
    records_.push_back(std::move(r));
  }
}

std::string Report::to_json() const {
  Json all = Json::array();
  for (const ModuleRecord& r : records_) all.push_back(record_json(r));
  return all.dump();
}

void Report::from_json(const std::string& text) {
  try {
    for (const Json& j : Json::parse(text)) records_.push_back(record_from_json(j));
  } catch (const Json::exception& error) {
    fail(ExitCode::disk, "the records in a stage cannot be read: {}", error.what());
  }
}

std::map<std::string, int64_t> Report::verdicts() const {
  std::map<std::string, int64_t> counts;
  for (const ModuleRecord& r : records_) ++counts[to_string(r.verdict)];
  return counts;
}

int64_t Report::fallbacks() const {
  return std::ranges::count_if(records_, [](const ModuleRecord& r) { return is_fallback(r.verdict); });
}

std::string Report::metrics_lines(const std::vector<PhaseSeconds>& phases_by_rank) const {
  std::string lines;
  for (const ModuleRecord& r : records_) lines += record_json(r).dump() + "\n";
  for (size_t rank = 0; rank < phases_by_rank.size(); ++rank)
    for (const auto& [phase, seconds] : phases_by_rank[rank])
      lines += Json{{"phase", phase}, {"rank", rank}, {"seconds", seconds}}.dump() + "\n";
  return lines;
}

std::string outcomes_to_json(const TapResult& result) {
  Json list = Json::array();
  for (const MatrixOutcome& o : result.outcomes)
    list.push_back({to_string(o.verdict), o.tokens, o.damping, o.dead_columns});
  return Json{{"outcomes", list}, {"seconds", result.seconds}}.dump();
}

void outcomes_from_json(const std::string& text, TapResult& result) {
  try {
    const Json j = Json::parse(text);
    result.outcomes.clear();
    for (const Json& o : j.at("outcomes"))
      result.outcomes.push_back(
          {verdict_from_string(o.at(0)), o.at(1).get<int64_t>(), o.at(2).get<double>(), o.at(3).get<int64_t>()});
    result.seconds = j.at("seconds");
  } catch (const Json::exception& error) {
    fail(ExitCode::disk, "the outcomes in a stage cannot be read: {}", error.what());
  }
}

std::string phases_to_json(const PhaseSeconds& seconds) {
  return Json(seconds).dump();
}
PhaseSeconds phases_from_json(const std::string& text) {
  return Json::parse(text).get<PhaseSeconds>();
}

std::string report_json(const RunSummary& s, const Report& report, const std::vector<PhaseSeconds>& phases_by_rank) {
  Json ranks = Json::array();
  for (const PhaseSeconds& phases : phases_by_rank) ranks.push_back(Json(phases));
  Json modules = Json::array();
  for (const ModuleRecord& r : report.records()) modules.push_back(record_json(r));
  return Json{
      {"shardq", {{"version", kVersion}, {"git", kGitHash}}},
      {"output", s.output},
      {"work", s.work},
      {"device", s.device},
      {"ranks", s.ranks},
      {"plan", {{"reduce", s.reduce}, {"read", s.read}, {"chunk_tokens", s.chunk_tokens}, {"offload", s.offload}}},
      {"samples", s.samples},
      {"tokens", s.tokens},
      {"seconds", s.seconds},
      {"resumed", s.resumed},
      {"input_bytes", s.input_bytes},
      {"output_bytes", s.output_bytes},
      {"peak_memory_bytes", s.peak_memory},
      {"phases", phases_by_rank.empty() ? Json::object() : Json(phases_by_rank[0])},
      {"phases_by_rank", ranks},
      {"verdicts", report.verdicts()},
      {"fallbacks", report.fallbacks()},
      {"modules", modules}}
      .dump(1);
}

std::string readable_summary(const RunSummary& s, const Report& report, const PhaseSeconds& phases) {
  std::string text = fmt::format("quantized {} modules in {} on {} rank{} ({})\n", report.records().size(),
                                 readable_seconds(s.seconds), s.ranks, s.ranks == 1 ? "" : "s", s.device);
  text += "  verdicts    ";
  for (const auto& [verdict, count] : report.verdicts()) text += fmt::format("{} {}  ", count, verdict);
  double sum = 0;
  int64_t sampled = 0;
  const ModuleRecord* worst = nullptr;
  for (const ModuleRecord& r : report.records()) {
    if (r.loss_over_rtn < 0) continue;
    sum += r.loss_over_rtn;
    ++sampled;
    if (!worst || r.loss_over_rtn > worst->loss_over_rtn) worst = &r;
  }
  if (worst)
    text += fmt::format("\n  loss / rtn  mean {:.3f}, worst {:.3f} ({})", sum / static_cast<double>(sampled),
                        worst->loss_over_rtn, worst->module);
  text += fmt::format("\n  size        {} -> {}\n  time        ", readable_bytes(double(s.input_bytes)),
                      readable_bytes(double(s.output_bytes)));
  for (const auto& [phase, seconds] : phases)
    if (seconds >= 0.05) text += fmt::format("{} {}  ", phase, readable_seconds(seconds));
  text += fmt::format("\n  output      {}\n  report      {}/report.json, metrics.jsonl\n", s.output, s.work);
  return text;
}

void write_reports(const Job& job, const Report& report, const std::filesystem::path& partial, RunSummary& summary,
                   const std::vector<PhaseSeconds>& phases) {
  const std::filesystem::path work = work_directory(job.recipe);
  summary.output_bytes = directory_bytes(partial);
  write_text_durably(work / "metrics.jsonl", report.metrics_lines(phases));
  write_text_durably(work / "report.json", report_json(summary, report, phases));
  write_text_durably(work / "recipe.yaml", recipe_text(job.recipe, RecipeText::complete));
}

}  // namespace shardq
