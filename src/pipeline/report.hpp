#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "pipeline/tap_solver.hpp"

namespace shardq {

/// What happened to one module (one linear of the checkpoint).
struct ModuleRecord {
  std::string module;
  int64_t layer = 0, expert = -1, rows = 0, cols = 0, tokens = 0, dead_columns = 0;
  Tap tap = Tap::qkv;
  Verdict verdict = Verdict::gptq;
  double loss = 0;            ///< sum over rows of (w - q) H (w - q)^T, H = mean of x x^T
  double loss_over_rtn = -1;  ///< the same over the sampled rows, divided by plain rounding's; -1: not sampled
  double damping = 0;
  double seconds = 0;  ///< of the whole tap: Hessian, reduction, solve, gather
};

/// Records of all finished modules, in module order.
class Report {
 public:
  /// Appends the records of a tap.
  void add(const Job& job, const LayerSpec& layer, Tap tap, const TapResult& result);
  const std::vector<ModuleRecord>& records() const { return records_; }
  /// The records as JSON text and back (kept in stages, so that a resumed run reports the whole run).
  std::string to_json() const;
  void from_json(const std::string& text);
  /// Modules by verdict, as printed and stored.
  std::map<std::string, int64_t> verdicts() const;
  int64_t fallbacks() const;
  /// One JSON object per module and line, then one per phase and rank.
  std::string metrics_lines(const std::vector<PhaseSeconds>& phases_by_rank) const;

 private:
  std::vector<ModuleRecord> records_;
};

/// Outcomes of a tap as JSON text, and back into a result whose tensors and losses come from a stage.
std::string outcomes_to_json(const TapResult& result);
void outcomes_from_json(const std::string& text, TapResult& result);

/// Phase seconds as JSON text and back, to bring them to rank 0.
std::string phases_to_json(const PhaseSeconds& seconds);
PhaseSeconds phases_from_json(const std::string& text);

/// Facts of a finished run for report.json and the summary on the terminal.
struct RunSummary {
  std::string output, work, device;
  std::string reduce, read;  ///< the plans that were followed
  int64_t chunk_tokens = 0;
  bool offload = false;  ///< activations in host memory, planned or because memory ran out (rank 0)
  int ranks = 1;
  int64_t samples = 0, tokens = 0, input_bytes = 0, output_bytes = 0, peak_memory = 0;
  double seconds = 0;
  bool resumed = false;
};
std::string report_json(const RunSummary& summary, const Report& report,
                        const std::vector<PhaseSeconds>& phases_by_rank);
/// report.json, metrics.jsonl and the complete recipe.yaml into the work directory, durably; sets summary.output_bytes
/// from the shards in `partial`.
void write_reports(const Job& job, const Report& report, const std::filesystem::path& partial, RunSummary& summary,
                   const std::vector<PhaseSeconds>& phases_by_rank);
std::string readable_summary(const RunSummary& summary, const Report& report, const PhaseSeconds& phases);

}  // namespace shardq
