#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>

// How a stack of matrices is spread over threads. An OpenMP build of OpenBLAS runs on one thread when called inside a
// parallel region and on all threads outside: with enough matrices of like size the first is faster, else the second.
namespace shardq::cpu {

/// Elements below which waking other threads costs more than they save.
inline constexpr int64_t kWorthThreads = 32768;

/// body(i, thread) for i in [0, count): matrices in parallel, each on one thread. Exceptions come out of the region.
template <class Body>
void in_parallel(int64_t count, int threads, Body&& body) {
  std::exception_ptr error;
  std::mutex guard;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    try {
      body(i, omp_get_thread_num());
    } catch (...) {
      const std::lock_guard lock(guard);
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

/// body(e) for equal matrices: side by side when no thread would idle for long at the end.
template <class Body>
void for_each_equal(int64_t count, int threads, Body&& body) {
  const bool even = count >= 4 * threads || (count >= threads && count % threads == 0);
  if (threads > 1 && count > 1 && even)
    in_parallel(count, threads, [&](int64_t e, int) { body(e); });
  else
    for (int64_t e = 0; e < count; ++e) body(e);
}

/// body(e, thread) for ragged experts: side by side when the largest is at most one thread's fair share.
template <class Body>
void for_each_expert(std::span<const int64_t> offsets, int threads, Body&& body) {
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  int64_t largest = 0;
  for (int64_t e = 0; e < count; ++e) largest = std::max(largest, offsets[e + 1] - offsets[e]);
  const int64_t total = offsets.back() - offsets.front();
  if (threads > 1 && count > 1 && largest * threads * 2 <= total)
    in_parallel(count, threads, body);
  else
    for (int64_t e = 0; e < count; ++e) body(e, 0);
}

}  // namespace shardq::cpu
