#include "pipeline/job.hpp"

namespace shardq {

std::vector<Range> balanced_shares(const TokenSet& tokens, int ranks) {
  const int64_t count = tokens.size();
  bool equal = true;
  for (int64_t i = 1; i < count; ++i) equal = equal && tokens[i].size() == tokens[0].size();
  std::vector<Range> shares;
  if (equal) {
    for (int r = 0; r < ranks; ++r) shares.push_back(part(count, ranks, r));
    return shares;
  }
  // The boundary after rank r is where the running token count comes nearest to (r + 1) / ranks of the total.
  const int64_t total = tokens.tokens();
  int64_t begin = 0, running = 0;
  for (int r = 0; r < ranks; ++r) {
    int64_t end = begin;
    const int64_t goal = total * (r + 1) / ranks;
    while (end < count && (r == ranks - 1 || running + static_cast<int64_t>(tokens[end].size()) / 2 < goal))
      running += static_cast<int64_t>(tokens[end++].size());
    shares.push_back({begin, end});
    begin = end;
  }
  return shares;
}

}  // namespace shardq
