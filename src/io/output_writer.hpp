#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.hpp"

namespace shardq {

/// The weights part of one config group, as compressed-tensors spells it. Plain values: io knows no quantization.
struct OutputGroup {
  std::vector<std::string> targets;  ///< e.g. {"Linear"}
  int bits = 4;
  bool symmetric = true;
  int64_t group_size = 128;  ///< -1: channel
  std::string actorder;      ///< "" (null) or "static"
  std::string observer = "minmax";
};

/// config.json of the output: the source's config with `quantization_config` (compressed-tensors, pack-quantized)
/// added, keys sorted, indent 2. ignore: full names of every Linear that stays unquantized, in module order.
std::string compressed_tensors_config(const std::string& source_config_text, const std::vector<OutputGroup>& groups,
                                      const std::vector<std::string>& ignore);

/// A checkpoint being written. Everything goes into `<output>.partial/`; publish() renames it to `<output>` at the very
/// end, so that the final name never holds half a checkpoint. Ranks call write_shard for the shards they own; rank 0
/// calls publish.
class OutputWriter {
 public:
  /// Creates the partial folder (or reuses one, on resume). run: marks the folder as this run's, so that shards of
  /// another are not taken for its own; empty: not looked at (on all ranks but one). Error(usage) when `output` exists
  /// and is not empty, or the folder is another run's.
  explicit OutputWriter(std::filesystem::path output, const std::string& run = {});
  /// Removes the partial folder of an `output`, durably.
  static void discard(const std::filesystem::path& output);
  /// Removes the mark from a published output, durably, if a kill has left it there.
  static void remove_marker(const std::filesystem::path& output);
  const std::filesystem::path& partial() const { return partial_; }
  /// model-0000k-of-0000n.safetensors, k from 1; model.safetensors where there is only one (and then no index, as
  /// transformers writes it).
  static std::string shard_name(int64_t k, int64_t n);
  bool has_shard(int64_t k, int64_t n) const;
  /// Durable; returns bytes written.
  int64_t write_shard(int64_t k, int64_t n, std::vector<OutputTensor> tensors);
  /// Reads all n shards' headers, writes the index, config.json and the copied files, then renames. Leftovers of an
  /// interrupted run with other shards are removed. config.json among files_to_copy is skipped, and a text wins over a
  /// copied file of its name. Errors: Error(disk) if a shard is missing or damaged, Error(usage) if the output
  /// directory was filled meanwhile.
  void publish(int64_t n, const std::string& config_text, const std::vector<std::filesystem::path>& files_to_copy,
               const std::map<std::string, std::string>& texts);
  /// Whether `output` is a published checkpoint: a config.json there, and no partial folder beside it. Lets a run that
  /// died between publishing and noting so see that nothing is left to do.
  static bool is_published(const std::filesystem::path& output);

 private:
  void remove_leftovers(int64_t n) const;

  std::filesystem::path output_, partial_;
};

/// Pieces of compressed-tensors' quantization_config that a reader needs; throws Error(input) for any other
/// quant_method or format.
struct QuantizedConfig {
  bool quantized = false;  ///< false: a plain checkpoint
  std::vector<OutputGroup> groups;
  std::vector<std::string> ignore;
};
QuantizedConfig read_quantized_config(const std::string& config_text);

}  // namespace shardq
