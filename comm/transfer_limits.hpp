#pragma once
#include <cstdint>

namespace shardq {

/// Sizes at which host collectives are cut into several MPI calls. Every rank must hold the same values.
struct TransferLimits {
  int64_t message_bytes = int64_t{1} << 30;  ///< one broadcast or gather call; MPI counts are int, so at most INT_MAX
  int64_t reduce_bytes = int64_t{64} << 20;  ///< staging memory of a reduction round, over all ranks' pieces
  int64_t small_bytes = int64_t{256} << 10;  ///< all ranks' vectors together: below it, one gather and a local sum
};

/// The limits in force; tests lower them to reach the splitting code with small arrays.
TransferLimits& transfer_limits();

}  // namespace shardq
