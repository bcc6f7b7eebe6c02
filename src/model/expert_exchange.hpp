#pragma once
#include <span>
#include <vector>

#include "kernels/tensor.hpp"

namespace shardq {

/// Rows of one chunk of tokens of every rank, at the owner of the experts they are routed to.
struct OwnedRows {
  Tensor rows;  ///< [received, cols]: by sending rank, within a rank by own expert
  /// One a sending rank: where in `rows` its rows of each own expert begin, own experts + 1 values.
  std::vector<std::vector<int64_t>> offsets;
};

/// Expert parallelism: experts belong to ranks; rows travel to the owner of their expert and back. Every call is a
/// collective that all ranks make for the same chunk, also for a chunk without tokens. Source: Lepikhin et al.,
/// "GShard" (2020), 3.2 "all-to-all dispatch and combine".
class ExpertExchange {
 public:
  virtual ~ExpertExchange() = default;
  /// The experts of this rank.
  virtual Range own() const = 0;
  /// Where collectives are deferred (Communicator::defer), results are there after join(), and memory must stay.
  /// Sends `rows` [routed, cols] (contiguous, in expert order; offsets: host, experts + 1 values) to the owners.
  virtual OwnedRows dispatch(Backend& backend, MatrixView rows, std::span<const int64_t> offsets) = 0;
  /// The way back: `results` [received, cols] in the order of OwnedRows::rows arrive as `rows` in the order dispatched.
  /// offsets, received: of that dispatch.
  virtual void combine(Backend& backend, MatrixView results, const std::vector<std::vector<int64_t>>& received,
                       std::span<const int64_t> offsets, MatrixView rows) = 0;
};

}  // namespace shardq
