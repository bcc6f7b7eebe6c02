#pragma once
#include <cstdint>
#include <cstring>

#include "core/error.hpp"
#include "core/view.hpp"

namespace shardq {

/// Widens `count` bf16, f16 or f32 elements to float.
inline void widen(const void* source, DType dtype, int64_t count, float* target) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(target, source, count * sizeof(float));
      return;
    case DType::bf16: {
      const auto* s = static_cast<const BFloat16*>(source);
      for (int64_t i = 0; i < count; ++i) target[i] = to_float(s[i]);
      return;
    }
    case DType::f16: {
      const auto* s = static_cast<const Float16*>(source);
      for (int64_t i = 0; i < count; ++i) target[i] = to_float(s[i]);
      return;
    }
    default:
      fail(ExitCode::internal, "expected a bf16, f16 or f32 array, found {}", torch_name(dtype));
  }
}

/// Rounds `count` floats to bf16, f16 or f32 elements.
inline void narrow(const float* source, int64_t count, DType dtype, void* target) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(target, source, count * sizeof(float));
      return;
    case DType::bf16: {
      auto* t = static_cast<BFloat16*>(target);
      for (int64_t i = 0; i < count; ++i) t[i] = to_bf16(source[i]);
      return;
    }
    case DType::f16: {
      auto* t = static_cast<Float16*>(target);
      for (int64_t i = 0; i < count; ++i) t[i] = to_f16(source[i]);
      return;
    }
    default:
      fail(ExitCode::internal, "expected a bf16, f16 or f32 array, found {}", torch_name(dtype));
  }
}

inline char* row_bytes(const MatrixView& m, int64_t row) {
  return m.bytes() + row * m.stride * size_of(m.dtype);
}

/// Columns [begin, end) of one row as floats.
inline void load_row(const MatrixView& m, int64_t row, int64_t begin, int64_t end, float* target) {
  widen(row_bytes(m, row) + begin * size_of(m.dtype), m.dtype, end - begin, target);
}
inline void load_row(const MatrixView& m, int64_t row, float* target) {
  load_row(m, row, 0, m.cols, target);
}

/// Rounds floats into columns [begin, end) of one row.
inline void store_row(const float* source, const MatrixView& m, int64_t row, int64_t begin, int64_t end) {
  narrow(source, end - begin, m.dtype, row_bytes(m, row) + begin * size_of(m.dtype));
}
inline void store_row(const float* source, const MatrixView& m, int64_t row) {
  store_row(source, m, row, 0, m.cols);
}

/// The dtypes that a forward operation takes; checked before a parallel region, out of which nothing may be thrown.
inline void check_forward_dtype(DType dtype, const char* operation) {
  SHARDQ_CHECK(dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32, ExitCode::internal,
               "{}: expected bf16, f16 or f32, found {}", operation, torch_name(dtype));
}

}  // namespace shardq
