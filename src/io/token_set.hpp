#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/view.hpp"

namespace shardq {

/// Calibration or evaluation token ids: sequences of any length.
class TokenSet {
 public:
  /// .npy (int32/int64 [samples, length]), .safetensors (one rank-2 integer tensor, or `input_ids` with optional
  /// `attention_mask`), .h5 (dataset `input_ids` or the only one; optional `attention_mask`), .jsonl (one array of ids
  /// a line, or an object with `input_ids`[, `attention_mask`]). Masked (pad) tokens are dropped: they must not enter a
  /// Hessian. Errors: Error(input) naming file, sample and position: id >= vocab or negative, empty sample, wrong rank
  /// or dtype, malformed line, no samples.
  TokenSet(const std::filesystem::path& path, int64_t vocab, int64_t max_samples = 0, int64_t max_length = 0);
  TokenSet(std::vector<std::vector<int32_t>> samples) : samples_(std::move(samples)) {}

  int64_t size() const { return static_cast<int64_t>(samples_.size()); }
  std::span<const int32_t> operator[](int64_t i) const { return samples_[i]; }
  int64_t tokens() const;
  int64_t longest() const;
  /// Content hash for the fingerprint.
  uint64_t fingerprint() const;

 private:
  std::vector<std::vector<int32_t>> samples_;
};

/// Sample indices of each rank: every sample exactly once, tokens balanced (longest first to the least loaded rank;
/// equal lengths give contiguous equal shares), each rank's list ascending.
std::vector<std::vector<int64_t>> shard_samples(const TokenSet& tokens, int ranks);

}  // namespace shardq
