#pragma once
#include <cassert>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.hpp"

namespace shardq {

using Shape = std::vector<int64_t>;
inline int64_t element_count(const Shape& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}
std::string to_string(const Shape& shape);

/// A row-major matrix that somebody else owns, in the memory of one backend. `stride` counts elements between rows.
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0, cols = 0, stride = 0;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  char* bytes() const { return static_cast<char*>(data); }
  /// Rows [begin, end).
  MatrixView row_range(int64_t begin, int64_t end) const {
    assert(0 <= begin && begin <= end && end <= rows);
    return {bytes() + begin * stride * size_of(dtype), dtype, end - begin, cols, stride};
  }
  /// Columns [begin, end).
  MatrixView col_range(int64_t begin, int64_t end) const {
    assert(0 <= begin && begin <= end && end <= cols);
    return {bytes() + begin * size_of(dtype), dtype, rows, end - begin, stride};
  }
};

/// A stack of equal row-major matrices (experts). `stride` as in MatrixView; `matrix_stride` counts elements between matrices.
struct StackView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t count = 0, rows = 0, cols = 0, stride = 0, matrix_stride = 0;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  MatrixView operator[](int64_t i) const {
    assert(0 <= i && i < count);
    return {static_cast<char*>(data) + i * matrix_stride * size_of(dtype), dtype, rows, cols, stride};
  }
  StackView range(int64_t begin, int64_t end) const {
    assert(0 <= begin && begin <= end && end <= count);
    StackView part = *this;
    part.data = static_cast<char*>(data) + begin * matrix_stride * size_of(dtype);
    part.count = end - begin;
    return part;
  }
  StackView row_range(int64_t begin, int64_t end) const {
    assert(0 <= begin && begin <= end && end <= rows);
    StackView part = *this;
    part.data = static_cast<char*>(data) + begin * stride * size_of(dtype);
    part.rows = end - begin;
    return part;
  }
  StackView col_range(int64_t begin, int64_t end) const {
    assert(0 <= begin && begin <= end && end <= cols);
    StackView part = *this;
    part.data = static_cast<char*>(data) + begin * size_of(dtype);
    part.cols = end - begin;
    return part;
  }
};

/// One matrix seen as a stack of one.
inline StackView as_stack(const MatrixView& m) { return {m.data, m.dtype, 1, m.rows, m.cols, m.stride, m.rows * m.stride}; }

/// Half-open range of rows, experts or samples.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};
/// Contiguous share of `count` equal items for `rank` of `ranks`: remainders go to the first ranks.
inline Range part(int64_t count, int ranks, int rank) {
  const int64_t base = count / ranks, rest = count % ranks;
  const int64_t begin = rank * base + (rank < rest ? rank : rest);
  return {begin, begin + base + (rank < rest ? 1 : 0)};
}

/// Ranges of items as ranges of `unit` elements each.
inline std::vector<Range> scaled(const std::vector<Range>& ranges, int64_t unit) {
  std::vector<Range> out;
  for (const Range& r : ranges) out.push_back({r.begin * unit, r.end * unit});
  return out;
}

}  // namespace shardq
