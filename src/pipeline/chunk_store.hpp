#pragma once
#include <array>
#include <functional>
#include <optional>
#include <vector>

#include "core/error.hpp"
#include "core/log.hpp"
#include "model/layer_forward.hpp"
#include "pipeline/host_buffer.hpp"

namespace shardq {

/// The chunks of a rank's tokens: all of them in backend memory, or (offload) in page-locked host memory but for the
/// one at work and the next, which is copied in meanwhile.  Requires: the backend outlives it.
class ChunkStore {
 public:
  explicit ChunkStore(Backend& backend) : backend_(backend) {}
  /// A chunk of sequences at `starts` (offsets, from 0), its hidden states still to come.
  void add(std::vector<int64_t> starts);
  int64_t size() const { return static_cast<int64_t>(places_.size()); }
  const std::vector<int64_t>& starts(int64_t index) const { return places_[index].chunk.starts; }
  /// Whether a chunk's tensors are in backend memory, or on their way there.
  bool resident(int64_t index) const { return places_[index].here || places_[index].coming; }
  /// From the next visit on, chunks that are not at work go to host memory.
  void offload() { offload_ = true; }
  bool offloaded() const { return offload_; }
  /// Runs `body` on a chunk in backend memory. What it changes in a chunk that stays at the same tap (ChunkState::at)
  /// is lost when the chunk goes to host memory, unless `changed`.
  void visit(int64_t index, const std::function<void(ChunkState&)>& body, bool changed = false);
  /// Sends all chunks to host memory but for the one at work: memory has run out. False when there was nothing to send.
  bool make_room();

 private:
  /// A tensor of a chunk while it is away.
  struct Away {
    std::optional<HostBuffer> buffer;
    int64_t capacity = 0;
    DType dtype = DType::f32;
    Shape shape;
    bool holds = false;  ///< the tensor belongs to the chunk's state
  };
  struct Place {
    ChunkState chunk;
    std::array<Away, 3> away;  ///< as slots_of
    bool here = true;
    bool coming = false;   ///< on its way in, on the copy stream
    bool current = false;  ///< host memory holds what the backend's does
  };
  static std::array<Tensor*, 3> slots_of(ChunkState& chunk) { return {&chunk.hidden, &chunk.tap, &chunk.owned.rows}; }
  void bring(Place& place);
  void send(Place& place);

  Backend& backend_;
  std::vector<Place> places_;
  bool offload_ = false;
  int64_t at_work_ = -1;
};

/// Runs `step`, and once more after sending chunks to host memory where memory ran out. `step` must leave things as
/// they were when it throws OutOfMemory, and be no collective.
template <class Step>
auto with_room(ChunkStore& chunks, const Step& step) {
  try {
    return step();
  } catch (const OutOfMemory& error) {
    if (!chunks.make_room()) throw;
    spdlog::warn("{}: activations go to host memory from here on", error.what());
  }
  return step();
}

}  // namespace shardq
