#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.hpp"

namespace shardq {

/// A Hugging Face model directory: config.json text and the tensors of model.safetensors or of the shards named by
/// model.safetensors.index.json. Opens (and validates the headers of) all shards at once; data is read through the map
/// on demand. Errors: Error(input) for a missing directory, config or shard, a truncated shard, an index naming a
/// tensor that its shard lacks, a name in two shards.
class Checkpoint {
 public:
  explicit Checkpoint(std::filesystem::path directory);

  const std::filesystem::path& directory() const { return directory_; }
  const std::string& config_text() const { return config_text_; }
  bool has(const std::string& name) const { return where_.contains(name); }
  /// Error(input) naming the directory and tensor when absent.
  const TensorEntry& entry(const std::string& name) const;
  std::span<const std::byte> bytes(const std::string& name) const;
  /// Reads target.size() bytes of the tensor from byte `offset` of it, without the map (see SafetensorsFile::read).
  void read(const std::string& name, int64_t offset, std::span<std::byte> target) const;
  /// All names, sorted.
  std::vector<std::string> names() const;
  int64_t total_bytes() const;
  /// Every regular file of the directory's top level that holds no weights in any format (config, tokenizer, *.py,
  /// ...), to be copied to the output.
  std::vector<std::filesystem::path> other_files() const;
  const std::vector<std::shared_ptr<SafetensorsFile>>& shards() const { return shards_; }

 private:
  void open_shards(const std::set<std::string>& shard_names);
  void check_index(const std::map<std::string, std::string>& index) const;
  const std::pair<SafetensorsFile*, const TensorEntry*>& place(const std::string& name) const;

  std::filesystem::path directory_;
  std::string config_text_;
  std::vector<std::shared_ptr<SafetensorsFile>> shards_;
  std::map<std::string, std::pair<SafetensorsFile*, const TensorEntry*>> where_;
};

/// First NaN or infinity of a floating tensor (bf16, f16, f32), as a flat index; -1 when all are finite.
/// OpenMP-parallel.
int64_t first_nonfinite(std::span<const std::byte> bytes, DType dtype);

/// Converts between bf16, f16 and f32 elements (round to nearest even). OpenMP-parallel.
void convert_elements(const void* source, DType from, void* target, DType to, int64_t count);

}  // namespace shardq
