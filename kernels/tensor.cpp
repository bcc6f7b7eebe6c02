#include "kernels/tensor.hpp"

#include "core/error.hpp"
#include "kernels/backend.hpp"

namespace shardq {

Tensor::Tensor(Backend& backend, DType dtype, Shape shape, const char* what)
    : backend_(&backend), dtype_(dtype), shape_(std::move(shape)) {
  data_ = backend.allocate(bytes(), what);
}

Tensor::~Tensor() {
  if (data_) backend_->release(data_);
}

MatrixView Tensor::matrix() const {
  if (shape_.empty()) return {data_, dtype_, 1, 1, 1};
  const int64_t cols = shape_.back();
  return {data_, dtype_, cols == 0 ? 0 : size() / cols, cols, cols};
}

StackView Tensor::stack() const {
  if (shape_.size() == 2) return as_stack(matrix());
  SHARDQ_CHECK(shape_.size() == 3, ExitCode::internal, "stack() needs a rank-3 tensor, found shape {}", to_string(shape_));
  return {data_, dtype_, shape_[0], shape_[1], shape_[2], shape_[2], shape_[1] * shape_[2]};
}

}  // namespace shardq
