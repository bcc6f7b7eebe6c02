#include "pipeline/tap_stage.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "io/packing.hpp"
#include "pipeline/report.hpp"

namespace shardq {
namespace {

StageArray make_array(std::string name, DType dtype, int64_t cols, const TapResult::Piece& piece, const void* data,
                      int64_t bytes) {
  StageArray array;
  array.name = std::move(name);
  array.dtype = dtype;
  array.shape = {piece.rows.size(), cols};
  array.first_row = piece.rows.begin - piece.wave.begin;
  array.total_rows = piece.wave.size();
  const auto* first = static_cast<const std::byte*>(data);
  array.data.assign(first, first + bytes);
  return array;
}

/// All arrays "<prefix>/0", "<prefix>/1", ... one after the other.
std::vector<std::byte> read_all(const StageStore& store, const std::string& stage, const std::string& prefix,
                                int64_t bytes) {
  std::vector<std::byte> data;
  const auto arrays = store.arrays(stage);
  for (int64_t wave = 0;; ++wave) {
    const auto found = arrays.find(fmt::format("{}/{}", prefix, wave));
    if (found == arrays.end()) break;
    StageArray part = store.read(stage, found->first, 0, found->second);
    data.insert(data.end(), part.data.begin(), part.data.end());
  }
  SHARDQ_CHECK(static_cast<int64_t>(data.size()) == bytes, ExitCode::disk,
               "stage {}: expected {} bytes of {}, found {}", stage, bytes, prefix, data.size());
  return data;
}

template <class T>
std::vector<T> values_of(const std::vector<std::byte>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

int64_t layer_of(const std::string& tap) {
  return std::stoll(tap.substr(5, tap.find('.') - 5));
}

}  // namespace

std::string hidden_stage_name(int64_t layer) {
  return fmt::format("layer{:04}.hidden", layer);
}
std::string TapStages::name(const LayerSpec& layer, Tap tap) {
  return fmt::format("layer{:04}.{}", layer.index, to_string(tap));
}

TapStages::TapStages(Job& job, StageStore& store, LayerOutput& output) : job_(job), store_(store), output_(output) {
  for (const StageInfo& stage : store.stages()) {
    if (stage.name.ends_with(".hidden")) continue;
    try {
      const auto outcomes = nlohmann::json::parse(stage.text);
      for (const auto& [tap, known] : outcomes.items()) {
        stored_[tap] = {stage.name, known.at("digest").get<uint64_t>()};
        last_layer_[stage.name] = std::max(last_layer_[stage.name], layer_of(tap));
      }
    } catch (const nlohmann::json::exception& error) {
      fail(ExitCode::disk, "stage {}: its text cannot be read: {}; start anew with --resume never", stage.name,
           error.what());
    }
  }
}

bool TapStages::has_all(const LayerSpec& layer) const {
  return std::ranges::all_of(kTaps, [&](Tap tap) { return !job_.selection.any(layer, tap) || has(layer, tap); });
}

bool TapStages::needs_shard(const LayerSpec& layer) const {
  return std::ranges::any_of(kTaps, [&](Tap tap) {
    const auto found = stored_.find(name(layer, tap));
    return found != stored_.end() && found->second.digest != 0;
  });
}

TapResult TapStages::load(const LayerSpec& layer, Tap tap) const {
  const std::string key = name(layer, tap);
  const auto& [stage, digest] = stored_.at(key);
  const auto shape = job_.spec.tap_shape(layer, tap);
  const QuantScheme& scheme = job_.recipe.scheme;
  const int64_t rows = shape.count * shape.rows, groups = shape.cols / group_size_for(scheme, shape.cols);
  TapResult result;
  result.codes = Tensor(job_.backend, DType::i8, {shape.count, shape.rows, shape.cols}, "codes");
  result.scales = Tensor(job_.backend, DType::f32, {shape.count, shape.rows, groups}, "scales");
  if (!scheme.grid.symmetric)
    result.zeros = Tensor(job_.backend, DType::i8, {shape.count, shape.rows, groups}, "zero points");
  const auto upload = [&](const void* codes, const void* scales, const void* zeros) {
    job_.backend.upload(result.codes.data(), codes, result.codes.bytes());
    job_.backend.upload(result.scales.data(), scales, result.scales.bytes());
    if (zeros) job_.backend.upload(result.zeros.data(), zeros, result.zeros.bytes());
  };
  if (digest != 0) {
    const HostTap host = output_.read(layer, tap, digest);
    upload(host.codes_at(0), host.scales_at(0), host.symmetric ? nullptr : host.zeros_at(0));
  } else {
    const int64_t words = packed_words(shape.cols, scheme.grid.bits);
    const std::vector<int8_t> codes =
        unpack_rows(values_of<int32_t>(read_all(store_, stage, key + "/codes", rows * words * 4)), rows, shape.cols,
                    scheme.grid.bits);
    const std::vector<std::byte> scales = read_all(store_, stage, key + "/scales", result.scales.bytes());
    std::vector<std::byte> zeros;
    if (result.zeros) zeros = read_all(store_, stage, key + "/zeros", result.zeros.bytes());
    upload(codes.data(), scales.data(), result.zeros ? zeros.data() : nullptr);
  }
  const std::vector<float> pairs = values_of<float>(read_all(store_, stage, key + "/losses", rows * 8));
  for (int64_t row = 0; row < rows; ++row) {
    result.losses.push_back(pairs[2 * row]);
    result.rtn_losses.push_back(pairs[2 * row + 1]);
  }
  outcomes_from_json(nlohmann::json::parse(store_.text(stage)).at(key).at("outcomes").get<std::string>(), result);
  return result;
}

std::vector<StageArray> TapStages::arrays_of(const Waiting& tap, int bits) {
  std::vector<StageArray> arrays;
  for (size_t w = 0; w < tap.pieces.size(); ++w) {
    const TapResult::Piece& piece = tap.pieces[w];
    const int64_t first = piece.rows.begin, rows = piece.rows.size();
    const auto add = [&](const char* kind, DType dtype, int64_t cols, const void* data) {
      arrays.push_back(make_array(fmt::format("{}/{}/{}", tap.name, kind, w), dtype, cols, piece, data,
                                  rows * cols * size_of(dtype)));
    };
    if (tap.host) {
      const HostTap& host = *tap.host;
      const std::vector<int32_t> packed =
          pack_rows(std::span(host.codes_at(first), rows * host.cols), rows, host.cols, bits);
      add("codes", DType::i32, packed_words(host.cols, bits), packed.data());
      add("scales", DType::f32, host.groups, host.scales_at(first));
      if (!host.symmetric) add("zeros", DType::i8, host.groups, host.zeros_at(first));
    }
    std::vector<float> pairs;
    for (int64_t row = 0; row < rows; ++row) {
      pairs.push_back(tap.losses[first + row]);
      pairs.push_back(tap.rtn_losses[first + row]);
    }
    add("losses", DType::f32, 2, pairs.data());
  }
  return arrays;
}

void TapStages::put(const LayerSpec& layer, Tap tap, const TapResult& result, std::shared_ptr<const HostTap> host) {
  waiting_.push_back({.name = name(layer, tap),
                      .outcomes = outcomes_to_json(result),
                      .layer = layer.index,
                      .tap = tap,
                      .host = std::move(host),
                      .pieces = result.pieces,
                      .losses = result.losses,
                      .rtn_losses = result.rtn_losses,
                      .digest = 0,
                      .since = {}});
  const Standing now = look();
  if (is_due(now)) write_due(now);
}

bool TapStages::is_due(const Standing& standing) const {
  return standing.over_limit || (!standing.writing && standing.overdue > 0);
}

void TapStages::write_due(const Standing& standing) {
  if (standing.over_limit) return write(waiting_.size());
  // Those in shards cost nothing, but a tap must not be stored before one that was solved before it.
  auto count = static_cast<size_t>(standing.overdue);
  while (count < waiting_.size() && waiting_[count].digest != 0) ++count;
  write(count);
}

std::vector<int64_t> TapStages::state() {
  output_.poll();
  // Memory bounds how much may wait: a few layers.
  constexpr int64_t kMostWaiting = int64_t{4} << 30;
  int64_t bytes = 0, overdue = 0;
  // Ranks must come to the same conclusions: rank 0's clock counts, and the digests of a shard's owner.
  std::vector<int64_t> known(3);
  for (const Waiting& w : waiting_) {
    if (w.host) bytes += w.host->row_count * w.host->cols;
    if (w.since.seconds() >= job_.recipe.tap_seconds) ++overdue;
    known.push_back(static_cast<int64_t>(output_.digest(w.layer, w.tap)));
  }
  known[0] = store_.writing();
  known[1] = bytes > kMostWaiting;
  known[2] = job_.host.rank() == 0 ? overdue : 0;
  return known;
}

TapStages::Standing TapStages::accept(std::span<const int64_t> sums) {
  for (size_t i = 0; i < waiting_.size(); ++i) {
    waiting_[i].digest = static_cast<uint64_t>(sums[3 + i]);
    if (waiting_[i].digest != 0) waiting_[i].host.reset();
  }
  return {.writing = sums[0] > 0, .over_limit = sums[1] > 0, .overdue = sums[2]};
}

TapStages::Standing TapStages::look() {
  std::vector<int64_t> known = state();
  job_.host.all_reduce_sum(known.data(), static_cast<int64_t>(known.size()));
  return accept(known);
}

void TapStages::flush() {
  look();
  write(waiting_.size());
}

void TapStages::write(size_t count) {
  if (count == 0) return;
  const std::string stage = waiting_.front().name;
  auto taps = std::make_shared<std::vector<Waiting>>();
  const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
  std::move(waiting_.begin(), end, std::back_inserter(*taps));
  waiting_.erase(waiting_.begin(), end);
  nlohmann::ordered_json text = nlohmann::ordered_json::object();
  for (const Waiting& w : *taps) {
    text[w.name] = {{"outcomes", w.outcomes}, {"digest", w.digest}};
    stored_[w.name] = {stage, w.digest};
    last_layer_[stage] = w.layer;
  }
  store_.put(
      stage,
      [taps, bits = job_.recipe.scheme.grid.bits] {
        std::vector<StageArray> arrays;
        for (const Waiting& w : *taps)
          for (StageArray& array : arrays_of(w, bits)) arrays.push_back(std::move(array));
        return arrays;
      },
      text.dump());
}

std::vector<std::string> TapStages::stages_before(int64_t layer) const {
  std::vector<std::string> stages;
  for (const auto& [stage, last] : last_layer_)
    if (last < layer && store_.has(stage)) stages.push_back(stage);
  return stages;
}

StageArray hidden_array(Backend& backend, ChunkStore& chunks, int64_t first_row, int64_t total_rows, int64_t hidden,
                        DType dtype) {
  StageArray array;
  array.name = "hidden";
  array.dtype = dtype;
  array.first_row = first_row;
  array.total_rows = total_rows;
  int64_t rows = 0;
  for (int64_t i = 0; i < chunks.size(); ++i) rows += chunks.starts(i).back();
  array.shape = {rows, hidden};
  array.data.resize(rows * hidden * size_of(dtype));
  std::byte* at = array.data.data();
  for (int64_t i = 0; i < chunks.size(); ++i)
    chunks.visit(i, [&](ChunkState& chunk) {
      backend.download(at, chunk.hidden.data(), chunk.hidden.bytes());
      at += chunk.hidden.bytes();
    });
  return array;
}

void load_hidden(Backend& backend, const StageStore& store, const std::string& stage, int64_t first_row,
                 ChunkStore& chunks) {
  int64_t row = first_row;
  const auto fill = [&](ChunkState& chunk) {
    const int64_t rows = chunk.starts.back();
    const StageArray part = store.read(stage, "hidden", row, row + rows);
    SHARDQ_CHECK(static_cast<int64_t>(part.data.size()) == chunk.hidden.bytes(), ExitCode::disk,
                 "stage {}: expected {} bytes of hidden states for rows {} to {}, found {}", stage,
                 chunk.hidden.bytes(), row, row + rows, part.data.size());
    backend.upload(chunk.hidden.data(), part.data.data(), chunk.hidden.bytes());
    row += rows;
  };
  for (int64_t i = 0; i < chunks.size(); ++i) chunks.visit(i, fill, true);
}

}  // namespace shardq
