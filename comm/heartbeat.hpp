#pragma once
#include <memory>

namespace shardq {

class PulseTable;

/// Carries every rank's Pulse to every other rank, beside the work: a thread of its own and an MPI communicator of its
/// own, so that a rank that computes for minutes is still known to be alive, and a stopped or lost one is known to be
/// silent.
///
/// Each half second a rank sends all it knows to one other: the rank 1 place up, 1 down, 2 up, 2 down, 4 up, ... and
/// round again. News reaches all of N ranks within about 2 log2(N) half seconds, with one message of 64 N bytes a rank.
/// Both directions, so that the living stay connected around a whole node that is gone. A peer that takes no messages
/// gets no further one until the first is gone, so nothing piles up.
class Heartbeat {
 public:
  /// Collective over MPI_COMM_WORLD.  Requires: MPI_THREAD_MULTIPLE.
  Heartbeat();
  ~Heartbeat();
  std::shared_ptr<const PulseTable> table() const;
  /// Collective: no message is under way afterwards and the thread has ended. Without it the thread lives until the
  /// process ends.
  void finish();

 private:
  struct State;
  State* state_;  // leaked unless finish() was called: the thread may not be joined while a peer is gone
};

}  // namespace shardq
