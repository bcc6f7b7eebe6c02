#pragma once
#include <functional>
#include <future>
#include <optional>
#include <span>

#include "model/weight_source.hpp"

namespace shardq {

/// How the ranks of a job divide the reading of layers among them. By default every rank reads everything.
struct ReadPlan {
  int rank = 0, ranks = 1;
  bool share = false;        ///< each rank reads its rows of every stack, the others' arrive by `all_gather`
  bool own_experts = false;  ///< gate_up and down of MoE layers hold experts part(experts, ranks, rank) only
  /// In place in backend memory: gives ranges[rank] (in elements of `element_size` bytes), ends with all. A collective:
  /// all ranks make the same calls in the same order.  Requires: set where ranks share.
  std::function<void(void* data, std::span<const Range> ranges, int64_t element_size)> all_gather = {};
};

/// Gives the weights of layers in order; on a device backend the next layer is read from disk, checked and converted in
/// the background while this one computes.  Requires: backend, source and spec outlive it.
class LayerReader {
 public:
  LayerReader(Backend& backend, const WeightSource& source, const ModelSpec& spec, DType compute, bool check_finite,
              ReadPlan plan = {});
  ~LayerReader();
  LayerReader(const LayerReader&) = delete;
  LayerReader& operator=(const LayerReader&) = delete;
  /// Starts reading layer `index` in the background, on a device backend: the caller has other things to prepare.
  void begin(int64_t index);
  /// First half of get: brings this rank's part of layer `index` to backend memory and starts reading the next layer.
  /// Runs no collective, and everything that can fail on one rank alone fails here, so that ranks can agree before they
  /// gather.  Errors: those of WeightSource::load, also for a layer that was read ahead, when it is asked for.
  void prepare(int64_t index);
  /// Second half: the prepared layer, put together from the shares of all ranks. A collective where ranks share.
  /// Errors: Error(internal) when `index` is not the layer prepared last.
  LayerWeights take(int64_t index);
  /// Layer `index` in backend memory: both halves. Reading ahead helps where the next call asks for `index` + 1.
  LayerWeights get(int64_t index);

 private:
  void start(int64_t index);
  LayerWeights read_ahead(int64_t index);
  Backend& backend_;
  const WeightSource& source_;
  const ModelSpec& spec_;
  DType compute_;
  bool check_finite_;
  ReadPlan plan_;
  WeightPart part_;
  HostLayer host_;  ///< the layer being read; free again as soon as it has been uploaded
  std::future<void> pending_;
  int64_t pending_index_ = -1;
  std::optional<LayerWeights> prepared_;
  int64_t prepared_index_ = -1;
};

}  // namespace shardq
