#include "pipeline/tap_stage.hpp"

#include <cstring>

#include "core/error.hpp"

namespace shardq {
namespace {

StageArray rows_of(Backend& backend, const std::string& name, const Tensor& whole, const TapResult::Piece& piece) {
  const int64_t cols = whole.shape().back(), row_bytes = cols * size_of(whole.dtype());
  StageArray array;
  array.name = name;
  array.dtype = whole.dtype();
  array.shape = {piece.rows.size(), cols};
  array.first_row = piece.rows.begin - piece.wave.begin;
  array.total_rows = piece.wave.size();
  array.data.resize(piece.rows.size() * row_bytes);
  backend.download(array.data.data(), whole.as<char>() + piece.rows.begin * row_bytes,
                   static_cast<int64_t>(array.data.size()));
  return array;
}

/// All arrays "<kind>/0", "<kind>/1", ... one after the other.
std::vector<std::byte> read_all(const StageStore& store, const std::string& stage, const std::string& kind,
                                int64_t bytes) {
  std::vector<std::byte> data;
  const auto arrays = store.arrays(stage);
  for (int64_t wave = 0;; ++wave) {
    const auto found = arrays.find(fmt::format("{}/{}", kind, wave));
    if (found == arrays.end()) break;
    StageArray part = store.read(stage, found->first, 0, found->second);
    data.insert(data.end(), part.data.begin(), part.data.end());
  }
  SHARDQ_CHECK(static_cast<int64_t>(data.size()) == bytes, ExitCode::disk,
               "stage {}: expected {} bytes of {}, found {}", stage, bytes, kind, data.size());
  return data;
}

}  // namespace

std::string tap_stage_name(const LayerSpec& layer, Tap tap) {
  return fmt::format("layer{:04}.{}", layer.index, to_string(tap));
}
std::string hidden_stage_name(int64_t layer) {
  return fmt::format("layer{:04}.hidden", layer);
}

std::vector<StageArray> tap_arrays(Backend& backend, const TapResult& result) {
  std::vector<StageArray> arrays;
  for (size_t w = 0; w < result.pieces.size(); ++w) {
    const TapResult::Piece& piece = result.pieces[w];
    arrays.push_back(rows_of(backend, fmt::format("codes/{}", w), result.codes, piece));
    arrays.push_back(rows_of(backend, fmt::format("scales/{}", w), result.scales, piece));
    if (result.zeros) arrays.push_back(rows_of(backend, fmt::format("zeros/{}", w), result.zeros, piece));
    StageArray losses;
    losses.name = fmt::format("losses/{}", w);
    losses.dtype = DType::f32;
    losses.shape = {piece.rows.size(), 2};
    losses.first_row = piece.rows.begin - piece.wave.begin;
    losses.total_rows = piece.wave.size();
    std::vector<float> pairs;
    for (int64_t row = piece.rows.begin; row < piece.rows.end; ++row) {
      pairs.push_back(result.losses[row]);
      pairs.push_back(result.rtn_losses[row]);
    }
    losses.data.resize(pairs.size() * sizeof(float));
    std::memcpy(losses.data.data(), pairs.data(), losses.data.size());
    arrays.push_back(std::move(losses));
  }
  return arrays;
}

TapResult load_tap(Backend& backend, const StageStore& store, const std::string& stage,
                   const ModelSpec::TapShape& shape, int64_t groups, bool symmetric) {
  TapResult result;
  const int64_t rows = shape.count * shape.rows;
  const auto load = [&](Tensor& target, DType dtype, int64_t cols, const char* kind) {
    target = Tensor(backend, dtype, {shape.count, shape.rows, cols}, kind);
    const std::vector<std::byte> data = read_all(store, stage, kind, target.bytes());
    backend.upload(target.data(), data.data(), target.bytes());
  };
  load(result.codes, DType::i8, shape.cols, "codes");
  load(result.scales, DType::f32, groups, "scales");
  if (!symmetric) load(result.zeros, DType::i8, groups, "zeros");
  std::vector<float> pairs(rows * 2);
  const std::vector<std::byte> data = read_all(store, stage, "losses", rows * 2 * static_cast<int64_t>(sizeof(float)));
  std::memcpy(pairs.data(), data.data(), data.size());
  for (int64_t row = 0; row < rows; ++row) {
    result.losses.push_back(pairs[2 * row]);
    result.rtn_losses.push_back(pairs[2 * row + 1]);
  }
  return result;
}

StageArray hidden_array(Backend& backend, const std::vector<ChunkState>& chunks, int64_t first_row, int64_t total_rows,
                        int64_t hidden, DType dtype) {
  StageArray array;
  array.name = "hidden";
  array.dtype = dtype;
  array.first_row = first_row;
  array.total_rows = total_rows;
  int64_t rows = 0;
  for (const ChunkState& chunk : chunks) rows += chunk.starts.back();
  array.shape = {rows, hidden};
  array.data.resize(rows * hidden * size_of(dtype));
  std::byte* at = array.data.data();
  for (const ChunkState& chunk : chunks) {
    backend.download(at, chunk.hidden.data(), chunk.hidden.bytes());
    at += chunk.hidden.bytes();
  }
  return array;
}

void load_hidden(Backend& backend, const StageStore& store, const std::string& stage, int64_t first_row,
                 std::vector<ChunkState>& chunks) {
  int64_t row = first_row;
  for (ChunkState& chunk : chunks) {
    const int64_t rows = chunk.starts.back();
    const StageArray part = store.read(stage, "hidden", row, row + rows);
    SHARDQ_CHECK(static_cast<int64_t>(part.data.size()) == chunk.hidden.bytes(), ExitCode::disk,
                 "stage {}: expected {} bytes of hidden states for rows {} to {}, found {}", stage,
                 chunk.hidden.bytes(), row, row + rows, part.data.size());
    backend.upload(chunk.hidden.data(), part.data.data(), chunk.hidden.bytes());
    row += rows;
  }
}

}  // namespace shardq
