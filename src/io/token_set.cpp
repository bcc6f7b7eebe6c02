#include "io/token_set.hpp"

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "io/files.hpp"
#include "io/token_readers.hpp"

namespace shardq {
namespace {

RawSamples read_samples(const std::filesystem::path& path, int64_t max_samples) {
  std::error_code ignored;
  SHARDQ_CHECK(std::filesystem::exists(path, ignored), ExitCode::input, "token file {} does not exist", path.string());
  const std::string kind = path.extension().string();
  if (kind == ".npy") return read_npy_tokens(path, max_samples);
  if (kind == ".safetensors") return read_safetensors_tokens(path, max_samples);
  if (kind == ".h5" || kind == ".hdf5") return read_hdf5_tokens(path, max_samples);
  if (kind == ".jsonl") return read_jsonl_tokens(path, max_samples);
  fail(ExitCode::input, "token file {}: expected .npy, .safetensors, .h5, .hdf5 or .jsonl", path.string());
}

}  // namespace

TokenSet::TokenSet(const std::filesystem::path& path, int64_t vocab, int64_t max_samples, int64_t max_length) {
  RawSamples raw = read_samples(path, max_samples);
  SHARDQ_CHECK(!raw.empty(), ExitCode::input, "token file {} holds no samples", path.string());
  const int64_t limit = vocab > 0 ? vocab : int64_t{INT32_MAX} + 1;
  samples_.reserve(raw.size());
  for (size_t s = 0; s < raw.size(); ++s) {
    std::vector<int64_t>& ids = raw[s];
    SHARDQ_CHECK(!ids.empty(), ExitCode::input, "token file {}: sample {} is empty", path.string(), s);
    for (size_t i = 0; i < ids.size(); ++i)
      SHARDQ_CHECK(0 <= ids[i] && ids[i] < limit, ExitCode::input,
                   "token file {}: id {} at position {} of sample {} is outside [0, {})", path.string(), ids[i], i, s,
                   limit);
    const size_t length = max_length > 0 ? std::min(ids.size(), static_cast<size_t>(max_length)) : ids.size();
    samples_.emplace_back(ids.begin(), ids.begin() + static_cast<int64_t>(length));
    std::vector<int64_t>().swap(ids);
  }
}

int64_t TokenSet::tokens() const {
  int64_t count = 0;
  for (const auto& sample : samples_) count += static_cast<int64_t>(sample.size());
  return count;
}

int64_t TokenSet::longest() const {
  size_t length = 0;
  for (const auto& sample : samples_) length = std::max(length, sample.size());
  return static_cast<int64_t>(length);
}

uint64_t TokenSet::fingerprint() const {
  std::vector<uint64_t> sums;
  sums.reserve(samples_.size());
  // checksum covers the length, so that moving a token over a sample's edge shows.
  for (const auto& sample : samples_)
    sums.push_back(checksum(sample.data(), static_cast<int64_t>(sample.size() * sizeof(int32_t))));
  return checksum(sums.data(), static_cast<int64_t>(sums.size() * sizeof(uint64_t)));
}

std::vector<std::vector<int64_t>> shard_samples(const TokenSet& tokens, int ranks) {
  SHARDQ_CHECK(ranks > 0, ExitCode::internal, "samples cannot be shared by {} ranks", ranks);
  std::vector<int64_t> order(static_cast<size_t>(tokens.size()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return tokens[a].size() > tokens[b].size(); });

  std::vector<std::vector<int64_t>> shares(static_cast<size_t>(ranks));
  std::vector<int64_t> load(static_cast<size_t>(ranks), 0);
  for (size_t begin = 0; begin < order.size();) {
    const size_t length = tokens[order[begin]].size();
    size_t end = begin;
    std::vector<int64_t> taken(static_cast<size_t>(ranks), 0);
    for (; end < order.size() && tokens[order[end]].size() == length; ++end) {
      const auto least = std::min_element(load.begin(), load.end()) - load.begin();
      load[least] += static_cast<int64_t>(length);
      ++taken[least];
    }
    // Samples of one length are interchangeable for the balance: hand them out in order, so that a rank's samples stay
    // together.
    for (int rank = 0; rank < ranks; ++rank)
      for (int64_t i = 0; i < taken[rank]; ++i) shares[rank].push_back(order[begin++]);
  }
  for (auto& share : shares) std::sort(share.begin(), share.end());
  return shares;
}

}  // namespace shardq
