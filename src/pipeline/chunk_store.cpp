#include "pipeline/chunk_store.hpp"

#include "core/error.hpp"

namespace shardq {

void ChunkStore::add(std::vector<int64_t> starts) {
  places_.emplace_back().chunk.starts = std::move(starts);
}

/// Enqueues the copies; wait_prefetch orders the compute stream after them.
void ChunkStore::bring(Place& place) {
  if (place.here || place.coming) return;
  const auto slots = slots_of(place.chunk);
  for (size_t s = 0; s < slots.size(); ++s) {
    const Away& away = place.away[s];
    if (!away.holds) continue;
    *slots[s] = Tensor(backend_, away.dtype, away.shape, "activations from host memory");
    backend_.prefetch(slots[s]->data(), away.buffer->as<void>(), slots[s]->bytes());
  }
  place.coming = true;
}

void ChunkStore::send(Place& place) {
  if (place.coming) {
    backend_.wait_prefetch();
    place.coming = false;
    place.here = true;
  }
  if (!place.here) return;
  const auto slots = slots_of(place.chunk);
  for (size_t s = 0; s < slots.size(); ++s) {
    Away& away = place.away[s];
    Tensor& tensor = *slots[s];
    if (!place.current) {
      away.holds = static_cast<bool>(tensor);
      if (!away.holds) {
        away.buffer.reset();  // the input of down is large, and gone for most of a layer
        away.capacity = 0;
        continue;
      }
      if (away.capacity < tensor.bytes()) {
        away.buffer.reset();
        away.buffer.emplace(backend_, tensor.bytes());
        away.capacity = tensor.bytes();
      }
      away.dtype = tensor.dtype();
      away.shape = tensor.shape();
      backend_.download(away.buffer->as<void>(), tensor.data(), tensor.bytes());
    }
    tensor = Tensor();
  }
  place.current = true;
  place.here = false;
}

void ChunkStore::visit(int64_t index, const std::function<void(ChunkState&)>& body, bool changed) {
  Place& place = places_[index];
  bring(place);
  if (place.coming) {
    backend_.wait_prefetch();
    place.coming = false;
    place.here = true;
  }
  if (offload_) {
    Place& next = places_[(index + 1) % size()];
    try {
      bring(next);
    } catch (const OutOfMemory&) {  // then it waits for its turn
      for (Tensor* slot : slots_of(next.chunk)) *slot = Tensor();
    }
  }
  const std::optional<Tap> before = place.chunk.at;
  at_work_ = index;
  body(place.chunk);
  at_work_ = -1;
  place.current = place.current && !changed && place.chunk.at == before;
  if (offload_) send(place);
}

bool ChunkStore::make_room() {
  offload_ = true;
  bool sent = false;
  for (int64_t i = 0; i < size(); ++i) {
    if (i == at_work_ || !(places_[i].here || places_[i].coming)) continue;
    sent = true;
    send(places_[i]);
  }
  backend_.synchronize();
  return sent;
}

}  // namespace shardq
