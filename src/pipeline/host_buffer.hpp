#pragma once
#include <utility>

#include "kernels/backend.hpp"

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

}  // namespace shardq
