#pragma once
#include <spdlog/spdlog.h>

#include <string>

namespace shardq {

/// Sets the pattern and, for ranks other than 0, the level (warnings only), so that a job's output is one voice.
/// Every rank writes to stderr; stdout is for results.
void start_log(int rank, int ranks);

}  // namespace shardq
