#pragma once
#include <span>

#include "model/weight_source.hpp"

namespace shardq {

/// Token embeddings, the hidden states that the first layer gets. On a device the whole table is held there, where it
/// has room, for as long as this object lives: make one, fill every chunk, let it go.  Requires: backend, checkpoint
/// and spec outlive it.
class Embedding {
 public:
  Embedding(Backend& backend, const Checkpoint& checkpoint, const ModelSpec& spec, DType compute);
  /// [ids.size(), hidden] in backend memory.  Errors: Error(input) names the first id outside the vocabulary.
  Tensor operator()(std::span<const int32_t> ids) const;

 private:
  void gather_on_host(std::span<const int32_t> ids, std::byte* target) const;
  Backend& backend_;
  const Checkpoint& checkpoint_;
  const ModelSpec& spec_;
  DType compute_;
  Tensor table_;  ///< [vocab, hidden] on a device; empty on a host, which gathers from the mapped file
};

}  // namespace shardq
