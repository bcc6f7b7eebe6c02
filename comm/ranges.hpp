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

}  // namespace shardq
