#pragma once
#include <future>

#include "model/weight_source.hpp"

namespace shardq {

/// Gives the weights of layers in order; on a device backend the next layer is read from disk, checked and converted in
/// the background while this one computes.  Requires: backend, source and spec outlive it.
class LayerReader {
 public:
  LayerReader(Backend& backend, const WeightSource& source, const ModelSpec& spec, DType compute, bool check_finite)
      : backend_(backend),
        source_(source),
        spec_(spec),
        compute_(compute),
        check_finite_(check_finite),
        host_(backend) {}
  ~LayerReader();
  LayerReader(const LayerReader&) = delete;
  LayerReader& operator=(const LayerReader&) = delete;
  /// Layer `index` in backend memory. Reading ahead helps where the next call asks for `index` + 1.
  /// Errors: those of WeightSource::load, also for a layer that was read ahead, when it is asked for.
  LayerWeights get(int64_t index);

 private:
  void start(int64_t index);
  Backend& backend_;
  const WeightSource& source_;
  const ModelSpec& spec_;
  DType compute_;
  bool check_finite_;
  HostLayer host_;  ///< the layer being read; free again as soon as it has been uploaded
  std::future<void> pending_;
  int64_t pending_index_ = -1;
};

}  // namespace shardq
