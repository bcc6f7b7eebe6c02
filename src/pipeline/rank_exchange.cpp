#include "pipeline/rank_exchange.hpp"

#include "core/error.hpp"
#include "kernels/backend.hpp"

namespace shardq {
namespace {

std::vector<Range> by_sender(const std::vector<std::vector<int64_t>>& received) {
  std::vector<Range> ranges;
  for (const std::vector<int64_t>& offsets : received) ranges.push_back({offsets.front(), offsets.back()});
  return ranges;
}

void check_rows(MatrixView rows, int64_t expected, const char* what) {
  SHARDQ_CHECK(rows.rows == expected && (rows.stride == rows.cols || rows.rows < 2), ExitCode::internal,
               "expert exchange: expected {} contiguous rows ({}), found {} of stride {} for {} columns", expected,
               what, rows.rows, rows.stride, rows.cols);
}

}  // namespace

RankExchange::RankExchange(Communicator& host, Communicator& device, int64_t experts, PhaseSeconds& seconds)
    : host_(host), device_(device), experts_(experts), seconds_(seconds) {}

std::vector<Range> RankExchange::by_owner(std::span<const int64_t> offsets) const {
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == experts_ + 1, ExitCode::internal,
               "expert exchange: expected {} offsets, found {}", experts_ + 1, offsets.size());
  std::vector<Range> ranges;
  for (int r = 0; r < host_.size(); ++r) {
    const Range experts = part(experts_, host_.size(), r);
    ranges.push_back({offsets[experts.begin], offsets[experts.end]});
  }
  return ranges;
}

OwnedRows RankExchange::dispatch(Backend& backend, MatrixView rows, std::span<const int64_t> offsets) {
  check_rows(rows, offsets.back(), "routed");
  backend.synchronize();  // the waiting for what came before is not the exchange's
  const PhaseTimer timer(seconds_, "exchange");
  const int ranks = host_.size();
  // Everybody's counts by expert: what each rank sends is then known without asking.
  std::vector<int64_t> counts(ranks * experts_, 0);
  for (int64_t e = 0; e < experts_; ++e) counts[host_.rank() * experts_ + e] = offsets[e + 1] - offsets[e];
  std::vector<Range> lines;
  for (int r = 0; r < ranks; ++r) lines.push_back({r * experts_, (r + 1) * experts_});
  host_.all_gather(counts.data(), lines, sizeof(int64_t));

  OwnedRows owned;
  int64_t end = 0;
  for (int r = 0; r < ranks; ++r) {
    std::vector<int64_t>& at = owned.offsets.emplace_back(1, end);
    for (int64_t e = own().begin; e < own().end; ++e) at.push_back(end += counts[r * experts_ + e]);
  }
  owned.rows = Tensor(backend, rows.dtype, {end, rows.cols}, "rows of own experts");
  device_.all_to_all(rows.data, by_owner(offsets), owned.rows.data(), by_sender(owned.offsets),
                     rows.cols * size_of(rows.dtype));
  backend.synchronize();  // deferred collectives go on
  return owned;
}

void RankExchange::combine(Backend& backend, MatrixView results, const std::vector<std::vector<int64_t>>& received,
                           std::span<const int64_t> offsets, MatrixView rows) {
  check_rows(results, received.back().back(), "received");
  check_rows(rows, offsets.back(), "routed");
  backend.synchronize();
  const PhaseTimer timer(seconds_, "exchange");
  device_.join();  // the chunk before has come back while these results were computed
  device_.all_to_all(results.data, by_sender(received), rows.data, by_owner(offsets), rows.cols * size_of(rows.dtype));
  backend.synchronize();
}

ReadPlan read_plan(Job& job) {
  ReadPlan plan;
  plan.rank = job.host.rank();
  plan.ranks = job.host.size();
  plan.share = job.read == ReadMode::share;
  plan.own_experts = job.expert_parallel();
  plan.all_gather = [&device = job.device](void* data, std::span<const Range> ranges, int64_t element_size) {
    device.all_gather(data, ranges, element_size);
  };
  return plan;
}

}  // namespace shardq
