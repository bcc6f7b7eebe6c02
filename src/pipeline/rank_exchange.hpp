#pragma once
#include "comm/communicator.hpp"
#include "core/timer.hpp"
#include "model/expert_exchange.hpp"
#include "model/layer_reader.hpp"
#include "pipeline/job.hpp"

namespace shardq {

/// Experts in equal contiguous ranges over the ranks of a job, rows moved by all_to_all. References outlive it.
class RankExchange final : public ExpertExchange {
 public:
  /// host: moves row counts; device: moves rows in backend memory; seconds: gets the phase "exchange".
  RankExchange(Communicator& host, Communicator& device, int64_t experts, PhaseSeconds& seconds);
  Range own() const override { return part(experts_, host_.size(), host_.rank()); }
  OwnedRows dispatch(Backend& backend, MatrixView rows, std::span<const int64_t> offsets) override;
  void combine(Backend& backend, MatrixView results, const std::vector<std::vector<int64_t>>& received,
               std::span<const int64_t> offsets, MatrixView rows) override;

 private:
  /// Where the rows for each rank lie among rows in expert order.
  std::vector<Range> by_owner(std::span<const int64_t> offsets) const;
  Communicator& host_;
  Communicator& device_;
  int64_t experts_;
  PhaseSeconds& seconds_;
};

/// How this job's ranks read layers: each everything, its share, or its own experts.
ReadPlan read_plan(Job& job);

}  // namespace shardq
