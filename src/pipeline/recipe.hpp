#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.hpp"
#include "quant/scheme.hpp"
#include "quant/solver.hpp"

namespace shardq {

/// How ranks come to the Hessians of experts: the sums of all experts on every rank; each expert's sum on its owner; or
/// expert parallelism, where tokens travel to the owners of their experts and nothing is summed over ranks.
enum class ReducePlan { auto_, all_reduce, reduce_scatter, all_to_all };
/// Weights from the files: whole layers on every rank, or a share a rank and the rest from the others.
enum class ReadMode { auto_, all, share };
/// Activations between the chunks at work: in backend memory, or in page-locked host memory.
enum class Offload { auto_, never, always };
enum class Sequential { sublayer, layer };
enum class ExpertTokens { routed, all };
enum class ResumeMode { auto_, never, require };

/// Everything a run is asked to do. Every member has a key in recipe files and a `--set key=value` twin; recipe.cpp
/// holds the table.
struct Recipe {
  std::string model, tokens, output, work;
  std::string device;   ///< "cpu", "cuda" or "" (cuda where a device is visible)
  std::string compute;  ///< "bf16", "f32" or "" (bf16 for bf16 checkpoints, else f32)
  ResumeMode resume = ResumeMode::auto_;

  QuantScheme scheme;  ///< preset, then overridden key by key
  std::vector<std::string> targets{"Linear"};
  std::vector<std::string> ignore{"lm_head"};
  SolverOptions solver;
  double max_rtn_fraction = 0.5;  ///< more fallbacks than this share of modules: exit code 5

  int64_t max_samples = 0, max_length = 0;  ///< 0: all
  int64_t chunk_tokens = 0;                 ///< tokens that go through a layer at once; 0: chosen by device
  Sequential sequential = Sequential::sublayer;
  ExpertTokens experts = ExpertTokens::routed;
  bool check_finite = true;  ///< scan every weight for NaN and Inf before its layer is solved

  /// Order-free Hessian sums over fixed chunks: the same bits on any number of ranks, for four times the memory of a
  /// Hessian while it is summed. "auto" is on for the CPU and off for CUDA.
  std::string reproducible = "auto";
  ReducePlan reduce = ReducePlan::auto_;  ///< auto: the cheapest by bytes, rates and memory (choose_reduce)
  ReadMode read = ReadMode::auto_;   ///< auto: share on several GPUs, all on the CPU (the page cache shares already)
  int64_t hessian_budget = 0;        ///< bytes of expert Hessians held at once; 0: a quarter of the device's memory
  Offload offload = Offload::auto_;  ///< auto: when the plan says that they do not fit (fit_to_memory)
  double checkpoint_interval = 300;  ///< seconds between stored hidden states
  double tap_seconds = 10;           ///< a tap whose layer's shard is not durable after that goes to a stage
  int64_t keep_last = 1;             ///< stored hidden states kept
  double watchdog_seconds = 600;
};

/// Reads a recipe file (may be empty: flags only) and applies `overrides` (key, value) in order.
/// Errors: Error(usage) with file, line, the unknown key and the nearest known one, or the value and what was expected.
Recipe read_recipe(const std::filesystem::path& file,
                   const std::vector<std::pair<std::string, std::string>>& overrides);

/// complete: every key. published: without paths of this run and how it was carried out (plans, budgets, intervals), so
/// that runs with equal results publish equal text. fingerprint:
/// only the keys that decide what the codes are; a run may be resumed with other values of the rest (device, ranks,
/// intervals, budgets, paths).
enum class RecipeText { complete, published, fingerprint };
/// The resolved recipe as YAML.
std::string recipe_text(const Recipe& recipe, RecipeText kind);

/// Bytes from "8GiB", "512MB", "1000".
int64_t parse_bytes(const std::string& text);

}  // namespace shardq
