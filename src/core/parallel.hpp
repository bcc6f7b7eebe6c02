#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace shardq {

/// body(i) for i in [0, count), by all OpenMP threads where `threads`, in no order.  Errors: what the lowest i that
/// threw has thrown, so that a message does not depend on the threads; later i may be left out then.
template <class Body>
void parallel_for(int64_t count, bool threads, const Body& body) {
  std::exception_ptr failure;
  std::atomic<int64_t> failed = count;
  std::mutex failure_lock;
  // No exception may leave the loop.
#pragma omp parallel for schedule(dynamic) if (threads)
  for (int64_t i = 0; i < count; ++i) {
    if (i > failed) continue;
    try {
      body(i);
    } catch (...) {
      const std::lock_guard guard(failure_lock);
      if (i > failed) continue;
      failed = i;
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace shardq
