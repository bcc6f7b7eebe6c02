#pragma once
#include <cstdint>
#include <span>

#include "core/error.hpp"
#include "core/view.hpp"

namespace shardq {

/// Checks that `ranges` is one range a rank, ascending and without gaps from 0; returns the element count they cover.
inline int64_t check_ranges(std::span<const Range> ranges, int ranks, const char* operation) {
  SHARDQ_CHECK(static_cast<int>(ranges.size()) == ranks, ExitCode::internal,
               "{}: expected {} ranges, one a rank, found {}", operation, ranks, ranges.size());
  int64_t end = 0;
  for (const Range& range : ranges) {
    SHARDQ_CHECK(range.begin == end && range.end >= range.begin, ExitCode::internal,
                 "{}: expected a range that begins at {}, found [{}, {})", operation, end, range.begin, range.end);
    end = range.end;
  }
  return end;
}

/// Checks the two sides of an all-to-all: each as check_ranges, and what a rank sends itself is what it receives.
inline void check_exchange(std::span<const Range> send, std::span<const Range> receive, int ranks, int rank) {
  check_ranges(send, ranks, "all_to_all, send");
  check_ranges(receive, ranks, "all_to_all, receive");
  SHARDQ_CHECK(send[rank].size() == receive[rank].size(), ExitCode::internal,
               "all_to_all: rank {} sends itself {} elements and expects {}", rank, send[rank].size(),
               receive[rank].size());
}

}  // namespace shardq
