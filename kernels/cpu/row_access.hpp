#pragma once
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/convert.hpp"

// Rows of activations of any floating dtype, seen as floats.
namespace shardq::cpu {

/// `count` elements of a floating dtype as floats.
inline void load(const void* source, DType dtype, int64_t count, float* target) {
  with_type(dtype, [&](auto* type) {
    widen(static_cast<const std::remove_pointer_t<decltype(type)>*>(source), target, count);
  });
}

inline char* row_bytes(const MatrixView& m, int64_t row) {
  return m.bytes() + row * m.stride * size_of(m.dtype);
}

/// Columns [begin, end) of one row as floats.
inline void load_row(const MatrixView& m, int64_t row, int64_t begin, int64_t end, float* target) {
  load(row_bytes(m, row) + begin * size_of(m.dtype), m.dtype, end - begin, target);
}
inline void load_row(const MatrixView& m, int64_t row, float* target) {
  load_row(m, row, 0, m.cols, target);
}

/// Rounds floats into columns [begin, end) of one row.
inline void store_row(const float* source, const MatrixView& m, int64_t row, int64_t begin, int64_t end) {
  void* target = row_bytes(m, row) + begin * size_of(m.dtype);
  with_type(m.dtype, [&](auto* type) { narrow(source, static_cast<decltype(type)>(target), end - begin); });
}
inline void store_row(const float* source, const MatrixView& m, int64_t row) {
  store_row(source, m, row, 0, m.cols);
}

/// The dtypes that a forward operation takes; checked before a parallel region, out of which nothing may be thrown.
inline void check_forward_dtype(DType dtype, const char* operation) {
  SHARDQ_CHECK(dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32, ExitCode::internal,
               "{}: expected bf16, f16 or f32, found {}", operation, torch_name(dtype));
}

}  // namespace shardq::cpu
