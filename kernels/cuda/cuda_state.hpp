#pragma once
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_backend.hpp"
#include "kernels/cuda/cuda_check.hpp"
#include "kernels/cuda/planned_gemm.hpp"

namespace shardq {

/// What a CudaBackend owns on its device. Member functions of CudaBackend reach it as *state_.
///
/// All compute is ordered by `compute`; operations that spread over side streams fork from it and join it again.
struct CudaBackend::State {
  /// A stream with library handles of its own (made at first use), for independent pieces of one operation.
  struct Side {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
    cublasHandle_t blas = nullptr;
    void* blas_workspace = nullptr;
    cusolverDnHandle_t solver = nullptr;
  };
  static constexpr int kSides = 16;
  static constexpr int64_t kRingBytes = 64 << 20;

  explicit State(int device);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// Makes this backend's device current in the calling thread.
  void use() const;
  /// Stream-ordered allocation on the compute stream. Throws Error(internal) that names `what`, wanted and free bytes.
  void* allocate(int64_t bytes, const char* what);
  void release(void* data) noexcept;
  /// Host to device on the compute stream through the pinned ring; `source` may be reused on return.
  void upload(void* target, const void* source, int64_t bytes);
  /// Device to host through pinned memory; complete on return.
  void download(void* target, const void* source, int64_t bytes);
  /// Side streams [0, count) start where the compute stream is now; join() makes the compute stream wait for them.
  void fork(int count);
  void join(int count);
  Side& side(int index);
  cublasHandle_t side_blas(int index);
  cusolverDnHandle_t side_solver(int index);
  int64_t free_bytes() const;  ///< what allocate() can still hand out

  int device = 0;
  std::string name;
  int compute_capability = 0;  ///< 90 for 9.0
  int multiprocessors = 0;
  int64_t shared_memory_per_block = 0;  ///< opt-in limit
  cudaMemPool_t pool = nullptr;
  cudaStream_t compute = nullptr, copy = nullptr;
  cublasHandle_t blas = nullptr;
  cublasLtHandle_t blas_lt = nullptr;
  void* blas_workspace = nullptr;
  int64_t blas_workspace_bytes = 0;
  bool reproducible = false;  ///< Backend::set_reproducible
  PlannedGemm planned;        ///< for ragged shapes
  static constexpr int64_t kSideWorkspaceBytes = int64_t{16} << 20;
  /// A ragged product on a side stream, or on the compute stream (index -1).
  void planned_gemm(int index, const GemmCall& call);

 private:
  friend class CudaBackend;
  /// A stretch of the pinned ring, free again once `consumed` has happened.
  struct Segment {
    int64_t begin = 0, bytes = 0;
    cudaEvent_t consumed = nullptr;
  };
  /// `bytes` of the ring at its head, waiting for old segments where they are in the way; ring_used() then marks them
  /// as in use by what was just enqueued on the compute stream. Both under upload_mutex_.
  char* ring_space(int64_t bytes);
  void ring_used(int64_t bytes);

  std::array<Side, kSides> sides_;
  cudaEvent_t fork_event_ = nullptr, prefetch_event_ = nullptr, compute_event_ = nullptr;
  char* ring_ = nullptr;
  int64_t ring_head_ = 0;
  std::deque<Segment> segments_;
  std::vector<cudaEvent_t> free_events_;
  std::mutex upload_mutex_, host_mutex_, prefetch_mutex_;
  std::multimap<int64_t, void*> free_host_;  // bytes -> block, kept because page-locking costs about a second a few GB
  std::map<void*, int64_t> host_blocks_;     // every block from allocate_host and its bytes
};

/// A short-lived device array, stream-ordered on the compute stream: freed when it leaves scope, reused by later
/// operations only.
template <class T>
class DeviceArray {
 public:
  DeviceArray(CudaBackend::State& state, int64_t count, const char* what)
      : state_(&state), data_(count > 0 ? static_cast<T*>(state.allocate(count * sizeof(T), what)) : nullptr) {}
  /// A device copy of host values (offsets, pointers, coefficients).
  DeviceArray(CudaBackend::State& state, std::span<T const> values, const char* what)
      : DeviceArray(state, static_cast<int64_t>(values.size()), what) {
    if (data_) state.upload(data_, values.data(), static_cast<int64_t>(values.size_bytes()));
  }
  ~DeviceArray() {
    if (data_) state_->release(data_);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }

 private:
  CudaBackend::State* state_;
  T* data_;
};

/// Blocks of `size` that cover `extent`.
template <class A, class B>
constexpr A ceil_div(A extent, B size) {
  return (extent + size - 1) / size;
}

}  // namespace shardq
