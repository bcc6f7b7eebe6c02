#pragma once
#include "comm/communicator.hpp"
#include "kernels/backend.hpp"
#include "pipeline/recipe.hpp"

namespace shardq {

/// Everything `shardq quantize` does, on every rank. Throws Error on failure (the same on all ranks where that is
/// possible). Returns ok, or fallbacks when more modules than recipe.max_rtn_fraction fell back to rounding (the output
/// is complete even so).
ExitCode run_quantize(const Recipe& recipe, Backend& backend, Communicator& host, Communicator& device);

}  // namespace shardq
