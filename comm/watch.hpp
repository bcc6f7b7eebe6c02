#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.hpp"

namespace shardq {

/// Milliseconds of watched time: advanced by the watchdog thread, at most one second a tick, so that time in which the
/// whole process was suspended does not count against anybody. Stands still without a watchdog.
int64_t watched_milliseconds();

/// One rank as its peers see it; travels between ranks as it is.
struct Pulse {
  int64_t beat = 0;        ///< heartbeats sent so far
  int64_t progress = 0;    ///< report_progress calls and collectives so far
  int64_t collective = 0;  ///< collectives begun so far
  std::array<char, 40> doing{};
};

/// This rank now, `beat` left 0.
Pulse own_pulse();

/// The latest pulse of every rank, with the watched time at which it was news. Filled by a heartbeat, read by the
/// watchdog.
class PulseTable {
 public:
  struct Entry {
    Pulse pulse;
    int64_t heard = 0;  ///< watched milliseconds of the last new beat
    int64_t moved = 0;  ///< watched milliseconds of the last new progress
  };
  explicit PulseTable(int ranks);
  /// Takes whatever is newer in `pulses`; thread-safe.
  void merge(const Pulse* pulses, int first_rank, int count);
  std::vector<Entry> snapshot() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

/// Gives the watchdog the peers to look at (null: none).
void watch_peers(std::shared_ptr<const PulseTable> peers);

/// A collective: numbered, counted as progress, noted in the schedule, and a guarded wait.
class WatchedCollective {
 public:
  /// bytes: how much the collective is about, the same on every rank.
  explicit WatchedCollective(const char* name, int64_t bytes = 0);
  static int64_t count();

 private:
  WatchedWait wait_;
};

}  // namespace shardq
