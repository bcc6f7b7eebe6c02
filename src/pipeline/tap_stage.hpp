#pragma once
#include <optional>
#include <string>
#include <vector>

#include "io/stage_store.hpp"
#include "model/layer_forward.hpp"
#include "pipeline/tap_solver.hpp"

namespace shardq {

/// Stage names: "layer0003.gate_up" (codes of a tap), "layer0003.hidden" (hidden states that enter layer 3).
std::string tap_stage_name(const LayerSpec& layer, Tap tap);
std::string hidden_stage_name(int64_t layer);

/// This rank's part of a solved tap as arrays of a stage: codes, scales, zeros and losses, one set a wave.
std::vector<StageArray> tap_arrays(Backend& backend, const TapResult& result);
/// A tap back from its stage, whoever and however many wrote it.
TapResult load_tap(Backend& backend, const StageStore& store, const std::string& stage,
                   const ModelSpec::TapShape& shape, int64_t groups, bool symmetric);

/// This rank's hidden states as one array of rows in sample order.
StageArray hidden_array(Backend& backend, const std::vector<ChunkState>& chunks, int64_t first_row, int64_t total_rows,
                        int64_t hidden, DType dtype);
/// Fills the chunks' hidden states from a stage.
void load_hidden(Backend& backend, const StageStore& store, const std::string& stage, int64_t first_row,
                 std::vector<ChunkState>& chunks);

}  // namespace shardq
