#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/view.hpp"

namespace shardq::testing {

/// What every rank sends every other in a test of all_to_all: lengths from 0 up, all bytes known to everybody.
struct ExchangePattern {
  int ranks;
  int64_t unit, element_size;

  int64_t length(int from, int to) const {
    return (from + 2 * to) % 5 == 1 ? 0 : unit * (1 + (2 * from + to) % 4) + from;
  }
  std::vector<Range> send(int rank) const {
    std::vector<Range> ranges;
    int64_t end = 0;
    for (int r = 0; r < ranks; ++r) {
      ranges.push_back({end, end + length(rank, r)});
      end = ranges.back().end;
    }
    return ranges;
  }
  std::vector<Range> receive(int rank) const {
    std::vector<Range> ranges;
    int64_t end = 0;
    for (int r = 0; r < ranks; ++r) {
      ranges.push_back({end, end + length(r, rank)});
      end = ranges.back().end;
    }
    return ranges;
  }
  uint8_t byte(int from, int to, int64_t i) const { return static_cast<uint8_t>(from * 89 + to * 31 + i + i / 251); }
  std::vector<uint8_t> sent(int rank) const {
    std::vector<uint8_t> bytes;
    for (int r = 0; r < ranks; ++r)
      for (int64_t i = 0; i < length(rank, r) * element_size; ++i) bytes.push_back(byte(rank, r, i));
    return bytes;
  }
  std::vector<uint8_t> expected(int rank) const {
    std::vector<uint8_t> bytes;
    for (int r = 0; r < ranks; ++r)
      for (int64_t i = 0; i < length(r, rank) * element_size; ++i) bytes.push_back(byte(r, rank, i));
    return bytes;
  }
};

}  // namespace shardq::testing
