#include "model/layer_reader.hpp"

#include "core/error.hpp"

namespace shardq {

LayerReader::LayerReader(Backend& backend, const WeightSource& source, const ModelSpec& spec, DType compute,
                         bool check_finite, ReadPlan plan)
    : backend_(backend),
      source_(source),
      spec_(spec),
      compute_(compute),
      check_finite_(check_finite),
      plan_(std::move(plan)),
      host_(backend) {
  SHARDQ_CHECK(0 <= plan_.rank && plan_.rank < plan_.ranks, ExitCode::internal,
               "reading of layers: rank {} of {} does not exist", plan_.rank, plan_.ranks);
  SHARDQ_CHECK(plan_.ranks == 1 || !plan_.share || plan_.all_gather, ExitCode::internal,
               "reading of layers: {} ranks share it without an all_gather", plan_.ranks);
  if (plan_.own_experts) part_.experts = part(spec.experts, plan_.ranks, plan_.rank);
  if (plan_.share) {
    part_.rank = plan_.rank;
    part_.ranks = plan_.ranks;
  }
}

LayerReader::~LayerReader() {
  if (pending_.valid()) pending_.wait();
}

void LayerReader::start(int64_t index) {
  const LayerSpec& layer = spec_.layer.at(index);
  host_.reserve(source_.layer_bytes(layer, compute_, part_));  // here, so that the reading thread makes no device call
  pending_index_ = index;
  pending_ =
      std::async(std::launch::async, [this, &layer] { source_.read(layer, compute_, check_finite_, host_, part_); });
}

void LayerReader::begin(int64_t index) {
  if (!backend_.is_host() && !pending_.valid()) start(index);
}

LayerWeights LayerReader::read_ahead(int64_t index) {
  if (pending_.valid() && pending_index_ != index) {
    pending_.wait();
    pending_ = {};
  }
  if (!pending_.valid()) start(index);
  pending_.get();
  LayerWeights weights = source_.upload(backend_, spec_.layer.at(index), compute_, host_, part_);
  if (index + 1 < spec_.layers) start(index + 1);
  return weights;
}

void LayerReader::prepare(int64_t index) {
  prepared_.reset();
  // On the CPU backend the cores are busy computing, and the host copy would be one too many.
  prepared_ = backend_.is_host() ? source_.load(backend_, spec_.layer.at(index), compute_, check_finite_, part_)
                                 : read_ahead(index);
  prepared_index_ = index;
}

LayerWeights LayerReader::take(int64_t index) {
  SHARDQ_CHECK(prepared_ && prepared_index_ == index, ExitCode::internal, "layer {} is taken, but prepared is {}",
               index, prepared_ ? std::to_string(prepared_index_) : "none");
  LayerWeights weights = std::move(*prepared_);
  prepared_.reset();
  for (Tap tap : kTaps) {
    if (!part_.shared(spec_.layer.at(index), tap)) continue;
    const MatrixView rows = weights.taps[static_cast<size_t>(tap)].matrix();
    std::vector<Range> shares;
    for (int rank = 0; rank < plan_.ranks; ++rank) shares.push_back(part(rows.rows, plan_.ranks, rank));
    plan_.all_gather(rows.data, shares, rows.cols * size_of(rows.dtype));
  }
  return weights;
}

LayerWeights LayerReader::get(int64_t index) {
  prepare(index);
  return take(index);
}

}  // namespace shardq
