#include "model/layer_reader.hpp"

namespace shardq {

LayerReader::~LayerReader() {
  if (pending_.valid()) pending_.wait();
}

void LayerReader::start(int64_t index) {
  const LayerSpec& layer = spec_.layer.at(index);
  host_.reserve(source_.layer_bytes(layer, compute_));  // here, so that the reading thread makes no device call
  pending_index_ = index;
  pending_ = std::async(std::launch::async, [this, &layer] { source_.read(layer, compute_, check_finite_, host_); });
}

LayerWeights LayerReader::get(int64_t index) {
  const LayerSpec& layer = spec_.layer.at(index);
  // On the CPU backend the cores are busy computing, and the host copy would be one too many.
  if (backend_.is_host()) return source_.load(backend_, layer, compute_, check_finite_);
  if (pending_.valid() && pending_index_ != index) {
    pending_.wait();
    pending_ = {};
  }
  if (!pending_.valid()) start(index);
  pending_.get();
  LayerWeights weights = source_.upload(backend_, layer, compute_, host_);
  if (index + 1 < spec_.layers) start(index + 1);
  return weights;
}

}  // namespace shardq
