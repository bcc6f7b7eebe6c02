#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>

// How work is spread over threads, and why no result depends on their number.
//
// BLAS sums one element of a product in an order that depends on the shape of the call, on how many threads it uses
// and, at the edges, on where in the matrix the element lies. So matrix products are cut into tiles whose shapes follow
// from the operands alone, and every tile is one BLAS call on one thread: an OpenMP build of OpenBLAS stays on its
// thread when it is called inside an active parallel region. The same input then gives the same bits on any number of
// threads.
namespace shardq::cpu {

/// Elements below which waking other threads costs more than they save (for loops without BLAS calls).
inline constexpr int64_t kWorthThreads = 32768;
/// Multiply-adds below which OpenBLAS multiplies on one thread of its own accord, parallel region or not.
inline constexpr int64_t kAlwaysOneThread = 1 << 16;

/// body(i) for i in [0, count): tasks in parallel, each on one thread. Inside another region: one after the other, on
/// the caller's thread. Exceptions come out of the region.
template <class Body>
void for_each_task(int64_t count, Body&& body) {
  std::exception_ptr error;
  std::mutex guard;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) {
    try {
      body(i);
    } catch (...) {
      const std::lock_guard lock(guard);
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

/// body(e) for experts of the given sizes. Side by side when no thread would idle for long at the end; else one after
/// the other, and the body's own tasks are spread over threads.
template <class Body>
void for_each_matrix(int64_t count, int64_t largest, int64_t total, Body&& body) {
  const int threads = omp_get_max_threads();
  if (threads > 1 && count > 1 && largest * threads * 2 <= total)
    for_each_task(count, body);
  else
    for (int64_t e = 0; e < count; ++e) body(e);
}

/// for_each_matrix for equal ones.
template <class Body>
void for_each_equal(int64_t count, Body&& body) {
  for_each_matrix(count, 1, count, body);
}

/// for_each_matrix for rows [offsets[e], offsets[e + 1]).
template <class Body>
void for_each_expert(std::span<const int64_t> offsets, Body&& body) {
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  int64_t largest = 0;
  for (int64_t e = 0; e < count; ++e) largest = std::max(largest, offsets[e + 1] - offsets[e]);
  for_each_matrix(count, largest, offsets.back() - offsets.front(), body);
}

}  // namespace shardq::cpu
