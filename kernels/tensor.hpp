#pragma once
#include <utility>

#include "core/view.hpp"

namespace shardq {

class Backend;

/// Owning, contiguous, row-major array in the memory of one backend. Move-only.
class Tensor {
 public:
  Tensor() = default;
  /// Allocates uninitialised memory. `what` names the buffer in an out-of-memory error.
  Tensor(Backend& backend, DType dtype, Shape shape, const char* what);
  ~Tensor();
  Tensor(Tensor&& other) noexcept { swap(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    Tensor moved(std::move(other));
    swap(moved);
    return *this;
  }

  explicit operator bool() const { return data_ != nullptr; }
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t size() const { return element_count(shape_); }
  int64_t bytes() const { return size() * size_of(dtype_); }
  /// A rank-2 tensor, or any tensor with its leading axes merged.
  MatrixView matrix() const;
  /// A rank-3 tensor [count, rows, cols]; a rank-2 one is a stack of one.
  StackView stack() const;

 private:
  void swap(Tensor& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(dtype_, other.dtype_);
    std::swap(shape_, other.shape_);
  }
  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  DType dtype_ = DType::f32;
  Shape shape_{0};
};

}  // namespace shardq
