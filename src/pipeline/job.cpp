#include "pipeline/job.hpp"

namespace shardq {
namespace {
int64_t tokens_of(const TokenSet& tokens, const Range& samples) {
  int64_t sum = 0;
  for (int64_t s = samples.begin; s < samples.end; ++s) sum += static_cast<int64_t>(tokens[s].size());
  return sum;
}
}  // namespace

std::vector<Range> make_chunks(const TokenSet& tokens, Range samples, int64_t chunk_tokens) {
  std::vector<Range> chunks;
  int64_t filled = 0;
  for (int64_t s = samples.begin; s < samples.end; ++s) {
    const int64_t length = static_cast<int64_t>(tokens[s].size());
    if (chunks.empty() || filled + length > chunk_tokens) {
      chunks.push_back({s, s});
      filled = 0;
    }
    chunks.back().end = s + 1;
    filled += length;
  }
  return chunks;
}

std::vector<Range> balanced_shares(const TokenSet& tokens, const std::vector<Range>& chunks, int ranks) {
  std::vector<int64_t> weights;
  bool equal = true;
  int64_t total = 0;
  for (const Range& chunk : chunks) {
    weights.push_back(tokens_of(tokens, chunk));
    total += weights.back();
    equal = equal && weights.back() == weights.front();
  }
  const int64_t count = static_cast<int64_t>(chunks.size());
  std::vector<Range> shares;
  int64_t begin = 0, running = 0;
  for (int r = 0; r < ranks; ++r) {
    int64_t end = begin;
    if (equal) {
      end = part(count, ranks, r).end;
    } else {
      // The boundary after rank r is where the running token count comes nearest to (r + 1) / ranks of the total.
      const int64_t goal = total * (r + 1) / ranks;
      while (end < count && (r == ranks - 1 || running + weights[end] / 2 < goal)) running += weights[end++];
    }
    const int64_t first = begin < count ? chunks[begin].begin : tokens.size();
    shares.push_back({first, end > begin ? chunks[end - 1].end : first});
    begin = end;
  }
  return shares;
}

}  // namespace shardq
