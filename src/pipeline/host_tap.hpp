#pragma once
#include <memory>
#include <utility>

#include "kernels/backend.hpp"
#include "pipeline/tap_solver.hpp"

namespace shardq {

/// Page-locked host memory of a backend.
class HostBuffer {
 public:
  HostBuffer(Backend& backend, int64_t bytes) : backend_(&backend), data_(backend.allocate_host(bytes)) {}
  ~HostBuffer() {
    if (data_) backend_->release_host(data_);
  }
  HostBuffer(HostBuffer&& other) noexcept : backend_(other.backend_), data_(std::exchange(other.data_, nullptr)) {}
  HostBuffer& operator=(HostBuffer&&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Backend* backend_;
  void* data_;
};

/// Host copy of rows [first_row, first_row + row_count) of a solved tap's [count * rows] rows: what the background
/// threads pack and write.
struct HostTap {
  HostBuffer codes, scales,
      zeros;  ///< i8 [row_count, cols], f32 [row_count, groups], i8 the same (unused when symmetric)
  int64_t first_row = 0, row_count = 0, cols = 0, groups = 0;
  bool symmetric = true;

  const int8_t* codes_at(int64_t row) const { return codes.as<int8_t>() + (row - first_row) * cols; }
  const float* scales_at(int64_t row) const { return scales.as<float>() + (row - first_row) * groups; }
  const int8_t* zeros_at(int64_t row) const { return zeros.as<int8_t>() + (row - first_row) * groups; }
};

/// The whole tap, or only the rows from the first to the last that this rank solved.
std::shared_ptr<const HostTap> download_tap(Backend& backend, const TapResult& result, bool whole);

}  // namespace shardq
