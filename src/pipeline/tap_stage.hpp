#pragma once
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/timer.hpp"
#include "io/stage_store.hpp"
#include "pipeline/layer_output.hpp"

namespace shardq {

/// Solved taps in the stage store. A stage holds one tap or several: a tap waits while the stage before it is still
/// being written, and up to `checkpoint.tap_seconds` for the output shard of its layer to become durable, and goes out
/// with all that wait. Codes that are in a durable shard are not written again: the stage holds their digest.
///
/// Arrays of a stage, for a tap "layer0003.qkv": "<tap>/losses/W", one for every wave W, and unless its codes are in a
/// shard "<tap>/codes/W" (packed as in the output), "<tap>/scales/W", "<tap>/zeros/W". Text: {tap: {outcomes, digest}},
/// digest 0 where the codes are here. The stage has the name of its first tap.
class TapStages {
 public:
  TapStages(Job& job, StageStore& store, LayerOutput& output);
  /// "layer0003.gate_up".
  static std::string name(const LayerSpec& layer, Tap tap);

  bool has(const LayerSpec& layer, Tap tap) const { return stored_.contains(name(layer, tap)); }
  /// Every tap of the layer that is to be quantized.
  bool has_all(const LayerSpec& layer) const;
  /// Whether codes of the layer are read from its output shard.
  bool needs_shard(const LayerSpec& layer) const;
  /// A stored tap, whoever and however many wrote it, with its outcomes.
  TapResult load(const LayerSpec& layer, Tap tap) const;
  /// Takes a solved tap. Collective; host: at least this rank's rows.
  void put(const LayerSpec& layer, Tap tap, const TapResult& result, std::shared_ptr<const HostTap> host);
  /// Starts writing everything that waits (waiting for the stage in flight first). Collective.
  void flush();
  /// What all ranks know of the taps that wait.
  struct Standing {
    bool writing;     ///< some rank's part of the stage in flight
    bool over_limit;  ///< of memory
    int64_t overdue;  ///< so many have waited long enough
  };
  /// This rank's part of a standing; its sum over ranks, as many numbers, goes to accept().
  std::vector<int64_t> state();
  Standing accept(std::span<const int64_t> sums);
  bool is_due(const Standing& standing) const;
  /// Starts writing what is due. Collective.
  void write_due(const Standing& standing);
  /// Stages that hold nothing of `layer` or later.
  std::vector<std::string> stages_before(int64_t layer) const;

 private:
  struct Waiting {
    std::string name, outcomes;
    int64_t layer;
    Tap tap;
    std::shared_ptr<const HostTap> host;  ///< null once the codes are in a durable shard
    std::vector<TapResult::Piece> pieces;
    std::vector<float> losses, rtn_losses;
    uint64_t digest = 0;  ///< of the codes in the shard
    Stopwatch since;
  };
  struct Stored {
    std::string stage;
    uint64_t digest = 0;  ///< not 0: the codes are in the layer's shard
  };
  Standing look();
  void write(size_t count);
  static std::vector<StageArray> arrays_of(const Waiting& tap, int bits);

  Job& job_;
  StageStore& store_;
  LayerOutput& output_;
  std::vector<Waiting> waiting_;               ///< in the order they were solved
  std::map<std::string, Stored> stored_;       ///< by tap
  std::map<std::string, int64_t> last_layer_;  ///< stage -> last layer it holds
};

/// "layer0003.hidden": hidden states that enter layer 3.
std::string hidden_stage_name(int64_t layer);
/// This rank's hidden states as one array of rows in sample order.
StageArray hidden_array(Backend& backend, ChunkStore& chunks, int64_t first_row, int64_t total_rows, int64_t hidden,
                        DType dtype);
/// Fills the chunks' hidden states from a stage.
void load_hidden(Backend& backend, const StageStore& store, const std::string& stage, int64_t first_row,
                 ChunkStore& chunks);

}  // namespace shardq
