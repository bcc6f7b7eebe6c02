#pragma once
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace shardq {

/// The collectives this rank has begun since the last comparison. The schedule depends on the model and the recipe
/// only, never on the data, so it must be the same on every rank; a rank that leaves it would sooner or later wait for
/// a call nobody makes.
class Schedule {
 public:
  /// `name` must be a literal.
  void add(const char* name, int64_t bytes);
  /// Of names and sizes in order.
  uint64_t hash() const;
  /// One line a call: "name bytes".
  std::string text() const;
  void clear();

 private:
  struct Call {
    const char* name;
    int64_t bytes;
  };
  mutable std::mutex mutex_;
  std::vector<Call> calls_;
};

/// This process's schedule, filled by the MPI and NCCL communicators.
Schedule& own_schedule();

/// Where the first text that differs from rank 0's leaves it: "call 12 is broadcast of 8 bytes on rank 0, nothing on
/// rank 3". Empty when all are equal.
std::string first_difference(std::span<const std::string> texts);

}  // namespace shardq
