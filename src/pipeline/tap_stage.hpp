#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/stage_store.hpp"
#include "pipeline/host_tap.hpp"

namespace shardq {

/// Solved taps in the stage store. A stage holds one tap, or several where taps are solved faster than they can be
/// written: a tap waits while the stage before it is still being written, and goes out with all that wait.
///
/// Arrays of a stage, for a tap "layer0003.qkv": "<tap>/codes/W" (packed as in the output), "<tap>/scales/W",
/// "<tap>/zeros/W", "<tap>/losses/W", one set for every wave W. Text: {tap: outcomes}. The stage has the name of its
/// first tap.
class TapStages {
 public:
  TapStages(Job& job, StageStore& store);
  /// "layer0003.gate_up".
  static std::string name(const LayerSpec& layer, Tap tap);

  bool has(const LayerSpec& layer, Tap tap) const { return stage_of_.contains(name(layer, tap)); }
  /// A stored tap, whoever and however many wrote it, with its outcomes.
  TapResult load(const LayerSpec& layer, Tap tap) const;
  /// Takes a solved tap. Collective; host: at least this rank's rows.
  void put(const LayerSpec& layer, Tap tap, const TapResult& result, std::shared_ptr<const HostTap> host);
  /// Starts writing everything that waits (waiting for the stage in flight first). Collective.
  void flush();
  /// Stages that hold nothing of `layer` or later.
  std::vector<std::string> stages_before(int64_t layer) const;

 private:
  struct Waiting {
    std::string name, outcomes;
    int64_t layer;
    std::shared_ptr<const HostTap> host;
    std::vector<TapResult::Piece> pieces;
    std::vector<float> losses, rtn_losses;
  };
  static std::vector<StageArray> arrays_of(const Waiting& tap, int bits);

  Job& job_;
  StageStore& store_;
  std::vector<Waiting> waiting_;
  std::map<std::string, std::string> stage_of_;  ///< tap -> stage
  std::map<std::string, int64_t> last_layer_;    ///< stage -> last layer it holds
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
