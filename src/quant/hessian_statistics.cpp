#include "quant/hessian_statistics.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.hpp"

namespace shardq {
namespace {

// A Gram matrix obeys |H_ij| <= max(H_ii, H_jj), and a NaN input reaches its own diagonal entry: looking at diagonals
// finds every matrix that is not finite.
int64_t count_nonfinite(const float* diagonal, int64_t n) {
  return std::count_if(diagonal, diagonal + n, [](float v) { return !std::isfinite(v); });
}

void refuse_nonfinite(const std::vector<float>& diagonal, const HessianStatistics& statistics,
                      const HessianStack& hessian, const MatrixNames& names) {
  const int64_t n = hessian.sums.cols;
  const auto bad =
      std::find_if(statistics.nonfinite.begin(), statistics.nonfinite.end(), [](int64_t v) { return v > 0; });
  if (bad == statistics.nonfinite.end()) return;
  const int64_t e = bad - statistics.nonfinite.begin();
  const auto first = std::find_if_not(diagonal.begin() + e * n, diagonal.begin() + (e + 1) * n,
                                      [](float v) { return std::isfinite(v); });
  const int64_t others = std::count_if(bad + 1, statistics.nonfinite.end(), [](int64_t v) { return v > 0; });
  fail(
      ExitCode::input,
      "Hessian of {} is not finite: {} of {} input channels (first {}) are NaN or Inf over {} tokens; {} more matrices "
      "alike; expected finite activations, or nonfinite: rtn",
      names[e], *bad, n, first - (diagonal.begin() + e * n), hessian.tokens[e], others);
}

/// Whether the pool can be used: with `nonfinite: rtn` one bad expert must not spoil all through the pool.
bool usable(Backend& backend, const Shrinkage& shrinkage) {
  if (!shrinkage.pool.data || shrinkage.kappa <= 0 || shrinkage.tokens <= 0) return false;
  std::vector<float> diagonal(static_cast<size_t>(shrinkage.pool.cols));
  backend.diagonals(as_stack(shrinkage.pool), diagonal.data());
  return count_nonfinite(diagonal.data(), shrinkage.pool.cols) == 0;
}

}  // namespace

HessianStatistics normalise(Backend& backend, const HessianStack& hessian, const Shrinkage& shrinkage,
                            const SolverOptions& options, const MatrixNames& names) {
  const int64_t count = hessian.sums.count, n = hessian.sums.cols;
  HessianStatistics statistics;
  std::vector<float>& diagonal = statistics.diagonal;
  diagonal.resize(static_cast<size_t>(count * n));
  backend.diagonals(hessian.sums, diagonal.data());
  for (int64_t e = 0; e < count; ++e) statistics.nonfinite.push_back(count_nonfinite(diagonal.data() + e * n, n));
  if (options.nonfinite_is_error) refuse_nonfinite(diagonal, statistics, hessian, names);

  statistics.shrunk = usable(backend, shrinkage);
  std::vector<float> own, shared;
  for (int64_t tokens : hessian.tokens) {
    const double weight = static_cast<double>(tokens) + (statistics.shrunk ? shrinkage.kappa : 0.0);
    own.push_back(static_cast<float>(weight > 0 ? 1.0 / weight : 1.0));
    shared.push_back(statistics.shrunk
                         ? static_cast<float>(shrinkage.kappa / static_cast<double>(shrinkage.tokens) / weight)
                         : 0.0f);
  }
  backend.scale_and_blend(hessian.sums, own, shared, statistics.shrunk ? shrinkage.pool : MatrixView{});
  backend.diagonals(hessian.sums, diagonal.data());
  for (int64_t e = 0; e < count; ++e) {
    const auto begin = diagonal.begin() + e * n, end = begin + n;
    statistics.mean.push_back(n > 0 ? std::accumulate(begin, end, 0.0) / static_cast<double>(n) : 0.0);
    statistics.dead.push_back(std::count(begin, end, 0.0f));
  }
  return statistics;
}

std::vector<MatrixOutcome> first_verdicts(const HessianStatistics& statistics, const std::vector<int64_t>& tokens,
                                          int64_t cols, const SolverOptions& options) {
  const int64_t enough = options.min_tokens >= 0 ? options.min_tokens : statistics.shrunk ? 0 : 2 * cols;
  std::vector<MatrixOutcome> outcomes(tokens.size());
  for (size_t e = 0; e < tokens.size(); ++e) {
    outcomes[e].tokens = tokens[e];
    outcomes[e].dead_columns = statistics.dead[e];
    // Without a single token and without a pool there is nothing to compensate for, whatever min_tokens says.
    const bool empty = tokens[e] == 0 && !statistics.shrunk;
    if (statistics.nonfinite[e] > 0)
      outcomes[e].verdict = Verdict::rtn_nonfinite;
    else if (empty || tokens[e] < enough)
      outcomes[e].verdict = Verdict::rtn_few_tokens;
  }
  return outcomes;
}

std::vector<int32_t> descending_order(const HessianStatistics& statistics, int64_t cols) {
  std::vector<int32_t> order(statistics.diagonal.size());
  const auto count = static_cast<int64_t>(statistics.mean.size());
#pragma omp parallel for schedule(static) if (count > 1)
  for (int64_t e = 0; e < count; ++e) {
    int32_t* target = order.data() + e * cols;
    std::iota(target, target + cols, 0);
    if (statistics.nonfinite[e] > 0) continue;  // NaN has no place in an order
    // One integer says it all: largest value first, among equals the lowest column. The bits of floats order as
    // integers do once negative ones are turned round.
    const float* diagonal = statistics.diagonal.data() + e * cols;
    std::vector<uint64_t> keys(static_cast<size_t>(cols));
    for (int64_t j = 0; j < cols; ++j) {
      const uint32_t bits = float_bits(diagonal[j] + 0.0f);  // one zero
      const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
      keys[j] = static_cast<uint64_t>(~ascending) << 32 | static_cast<uint64_t>(j);
    }
    std::sort(keys.begin(), keys.end());
    for (int64_t j = 0; j < cols; ++j) target[j] = static_cast<int32_t>(keys[j] & 0xffffffffu);
  }
  return order;
}

}  // namespace shardq
