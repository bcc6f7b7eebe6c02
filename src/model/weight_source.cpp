#include "model/weight_source.hpp"

#include <algorithm>
#include <cstring>

#include "core/error.hpp"

namespace shardq {

namespace {

/// Offsets are multiples of this, so that any element type is aligned.
constexpr int64_t kAlignment = 256;
int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

Range WeightPart::experts_of(const ModelSpec& spec, const LayerSpec& layer) const {
  if (!layer.moe) return {};
  const Range all{0, spec.experts}, held = experts.value_or(all);
  SHARDQ_CHECK(0 <= held.begin && held.begin <= held.end && held.end <= all.end, ExitCode::internal,
               "{}: experts [{}, {}) asked for, there are {}", layer.prefix, held.begin, held.end, all.end);
  return held;
}

bool WeightPart::shared(const LayerSpec& layer, Tap tap) const {
  return ranks > 1 && !(experts && layer.routed(tap));
}

WeightSource::WeightSource(const Checkpoint& checkpoint, const ModelSpec& spec)
    : checkpoint_(checkpoint), spec_(spec), reader_(checkpoint) {}

void WeightSource::Piece::place(std::byte* memory, DType compute, std::vector<ReadItem>& all) const {
  if (zeroed) std::memset(memory, 0, elements.size() * size_of(compute));
  for (const Item& item : items) {
    all.push_back(item.what);
    all.back().target = memory + (item.place - elements.begin) * size_of(compute);
  }
}

WeightSource::Piece WeightSource::stack_piece(const LayerSpec& layer, Tap tap, const WeightPart& part) const {
  ModelSpec::TapShape shape = spec_.tap_shape(layer, tap);
  Range experts{0, 1};
  if (layer.routed(tap)) {
    experts = part.experts_of(spec_, layer);
    shape.count = experts.size();
  }
  Range rows{0, shape.count * shape.rows};  // of the stack as one matrix
  if (part.shared(layer, tap)) rows = shardq::part(rows.end, part.ranks, part.rank);
  Piece piece{{shape.count, shape.rows, shape.cols},
              [tap](LayerWeights& w) -> Tensor& { return w.taps[static_cast<size_t>(tap)]; },
              {rows.begin * shape.cols, rows.end * shape.cols}};
  for (const LinearSpec& linear : layer.linears) {
    const int64_t matrix = std::max<int64_t>(linear.expert, 0);
    if (linear.tap != tap || matrix < experts.begin || matrix >= experts.end) continue;
    const int64_t first = (matrix - experts.begin) * shape.rows + linear.row_offset;
    const Range mine{std::max(rows.begin, first), std::min(rows.end, first + linear.rows)};
    if (mine.size() <= 0) continue;
    piece.items.push_back({{&linear, nullptr, {mine.begin - first, mine.end - first}}, mine.begin * shape.cols});
  }
  return piece;
}

WeightSource::Piece WeightSource::bias_piece(const LayerSpec& layer, Tap tap) const {
  const int64_t rows = spec_.tap_shape(layer, tap).rows;
  Piece piece{{rows}, [tap](LayerWeights& w) -> Tensor& { return w.biases[static_cast<size_t>(tap)]; }, {0, rows}};
  piece.zeroed = true;  // linears without a bias beside some that have one
  for (const LinearSpec& linear : layer.linears)
    if (linear.tap == tap && !linear.bias.empty())
      piece.items.push_back({{nullptr, &linear.bias, {0, linear.rows}}, linear.row_offset});
  return piece;
}

WeightSource::Piece WeightSource::plain_piece(const std::string& name, Tensor LayerWeights::*slot) const {
  const Shape& shape = checkpoint_.entry(name).shape;
  const Range all{0, element_count(shape)};
  return {shape, [slot](LayerWeights& w) -> Tensor& { return w.*slot; }, all, {{{nullptr, &name, all}, 0}}};
}

std::vector<WeightSource::Piece> WeightSource::pieces(const LayerSpec& layer, const WeightPart& part) const {
  std::vector<Piece> result;
  for (Tap tap : kTaps) {
    result.push_back(stack_piece(layer, tap, part));
    Piece bias = bias_piece(layer, tap);
    if (!bias.items.empty()) result.push_back(std::move(bias));
  }
  const auto add_plain = [&](const std::string& name, Tensor LayerWeights::*slot) {
    if (!name.empty()) result.push_back(plain_piece(name, slot));
  };
  add_plain(layer.input_norm, &LayerWeights::input_norm);
  add_plain(layer.post_attention_norm, &LayerWeights::post_attention_norm);
  add_plain(layer.q_norm, &LayerWeights::q_norm);
  add_plain(layer.k_norm, &LayerWeights::k_norm);
  add_plain(layer.router, &LayerWeights::router);
  return result;
}

int64_t WeightSource::layer_bytes(const LayerSpec& layer, DType compute, const WeightPart& part) const {
  int64_t bytes = 0;
  for (const Piece& piece : pieces(layer, part)) bytes += aligned(piece.elements.size() * size_of(compute));
  return bytes;
}

void WeightSource::read(const LayerSpec& layer, DType compute, bool check_finite, HostLayer& host,
                        const WeightPart& part) const {
  std::byte* at = host.reserve(layer_bytes(layer, compute, part));
  std::vector<ReadItem> items;
  for (const Piece& piece : pieces(layer, part)) {
    piece.place(at, compute, items);
    at += aligned(piece.elements.size() * size_of(compute));
  }
  reader_.read(items, compute, check_finite);
}

LayerWeights WeightSource::upload(Backend& backend, const LayerSpec& layer, DType compute, const HostLayer& host,
                                  const WeightPart& part) const {
  LayerWeights weights;
  weights.experts = part.experts_of(spec_, layer);
  const std::byte* at = host.data();
  const std::string what = layer.prefix + "weights";
  for (const Piece& piece : pieces(layer, part)) {
    const int64_t size = size_of(compute), bytes = piece.elements.size() * size;
    Tensor& tensor = piece.slot(weights);
    tensor = Tensor(backend, compute, piece.shape, what.c_str());
    backend.upload(tensor.as<std::byte>() + piece.elements.begin * size, at, bytes);
    at += aligned(bytes);
  }
  return weights;
}

LayerWeights WeightSource::load(Backend& backend, const LayerSpec& layer, DType compute, bool check_finite,
                                const WeightPart& part) const {
  if (!backend.is_host()) {
    HostLayer host(backend);
    read(layer, compute, check_finite, host, part);
    return upload(backend, layer, compute, host, part);
  }
  LayerWeights weights;
  weights.experts = part.experts_of(spec_, layer);
  const std::string what = layer.prefix + "weights";
  std::vector<ReadItem> items;
  const std::vector<Piece> all = pieces(layer, part);
  for (const Piece& piece : all) {
    Tensor& tensor = piece.slot(weights);
    tensor = Tensor(backend, compute, piece.shape, what.c_str());
    piece.place(tensor.as<std::byte>() + piece.elements.begin * size_of(compute), compute, items);
  }
  reader_.read(items, compute, check_finite);
  return weights;
}

Tensor WeightSource::load_tensor(Backend& backend, const std::string& name, DType compute, bool check_finite) const {
  Tensor tensor(backend, compute, checkpoint_.entry(name).shape, name.c_str());
  HostLayer host(backend);
  std::byte* target = backend.is_host() ? tensor.as<std::byte>() : host.reserve(tensor.bytes());
  reader_.read({{nullptr, &name, {0, tensor.size()}, target}}, compute, check_finite);
  if (!backend.is_host()) backend.upload(tensor.data(), host.data(), tensor.bytes());
  return tensor;
}

HostLayer::~HostLayer() {
  if (data_) backend_.release_host(data_);
}

std::byte* HostLayer::reserve(int64_t bytes) {
  if (bytes <= capacity_) return data_;
  if (data_) backend_.release_host(data_);
  data_ = nullptr;
  capacity_ = 0;
  data_ = static_cast<std::byte*>(backend_.allocate_host(bytes));
  capacity_ = bytes;
  return data_;
}

}  // namespace shardq
