#pragma once
#include <string>

#include "comm/communicator.hpp"
#include "kernels/backend.hpp"

namespace shardq {

/// `shardq eval`.
struct EvalOptions {
  std::string model, tokens, device, compute, against;
  int64_t samples = 0;
};

/// Perplexity over every predicted token of all (or the first N) samples, ranks sharing the samples; with `against`,
/// also the share of positions where both models name the same most likely token. Text or JSON, complete on rank 0.
std::string run_eval(const EvalOptions& options, Backend& backend, Communicator& host, bool json);

}  // namespace shardq
