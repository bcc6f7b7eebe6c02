// Round to nearest, and what a reader of the checkpoint reconstructs: one pass over rows each.

#include "core/error.hpp"
#include "kernels/cpu/convert.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/lanes.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

/// Scales and zeros of one row.
struct RowGrid {
  const float* scales;
  const int8_t* zeros;
  int64_t group_size;
  float zero(int64_t group) const { return zeros ? static_cast<float>(zeros[group]) : 0.0f; }
};

RowGrid row_grid(const float* scales, const int8_t* zeros, int64_t group_size, int64_t groups, int64_t row) {
  return {scales + row * groups, zeros ? zeros + row * groups : nullptr, group_size};
}

void check_groups(const char* where, int64_t cols, int64_t group_size, const Grid& grid, const int8_t* zeros) {
  SHARDQ_CHECK(group_size > 0 && cols % group_size == 0, ExitCode::internal,
               "{}: groups of {} do not divide {} columns", where, group_size, cols);
  SHARDQ_CHECK(grid.symmetric || zeros, ExitCode::internal, "{}: an asymmetric grid needs zeros", where);
}

template <DType kScale, class T>
void round_row(const T* w, int64_t cols, const RowGrid& grid, cpu::CodeRange range, int8_t* codes, float* difference) {
  for (int64_t begin = 0, group = 0; begin < cols; begin += grid.group_size, ++group) {
    const float scale = grid.scales[group], zero = grid.zero(group);
#pragma omp simd
    for (int64_t j = begin; j < begin + grid.group_size; ++j) {
      int32_t code;
      float q;
      const float value = to_float(w[j]);
      cpu::quantize_lane<kScale>(value, scale, zero, range, code, q);
      codes[j] = static_cast<int8_t>(code);
      difference[j] = value - q;
    }
  }
}

}  // namespace

void CpuBackend::round_to_nearest(StackView w, const int32_t* order, const float* scales, const int8_t* zeros,
                                  int64_t group_size, const Grid& grid, int8_t* codes, StackView residual) {
  check_groups("round_to_nearest", w.cols, group_size, grid, zeros);
  const bool wanted = residual.data != nullptr;
  SHARDQ_CHECK(!wanted || (residual.count == w.count && residual.rows == w.rows && residual.cols == w.cols),
               ExitCode::internal, "round_to_nearest: residual [{}, {}, {}] for weights [{}, {}, {}]", residual.count,
               residual.rows, residual.cols, w.count, w.rows, w.cols);
  const int64_t groups = w.cols / group_size;
  const cpu::CodeRange range = cpu::code_range(grid);
#pragma omp parallel if (w.count * w.rows * w.cols > cpu::kWorthThreads)
  {
    std::vector<float> difference(static_cast<size_t>(w.cols));
#pragma omp for collapse(2) schedule(static)
    for (int64_t e = 0; e < w.count; ++e)
      for (int64_t r = 0; r < w.rows; ++r) {
        const RowGrid row = row_grid(scales, zeros, group_size, groups, e * w.rows + r);
        cpu::with_type(w.dtype, [&]<class T>(T*) {
          cpu::with_scale_dtype(grid.scale_dtype, [&]<DType kScale>() {
            round_row<kScale>(w.as<T>() + e * w.matrix_stride + r * w.stride, w.cols, row, range,
                              codes + (e * w.rows + r) * w.cols, difference.data());
          });
        });
        if (!wanted) continue;
        float* out = residual.as<float>() + e * residual.matrix_stride + r * residual.stride;
        const int32_t* column = order ? order + e * w.cols : nullptr;
        for (int64_t j = 0; j < w.cols; ++j) out[j] = difference[column ? column[j] : j];
      }
  }
}

void CpuBackend::dequantize(const int8_t* codes, const float* scales, const int8_t* zeros, int64_t group_size,
                            const Grid& grid, StackView w) {
  check_groups("dequantize", w.cols, group_size, grid, zeros);
  const int64_t groups = w.cols / group_size;
#pragma omp parallel if (w.count * w.rows * w.cols > cpu::kWorthThreads)
  {
    std::vector<float> values(static_cast<size_t>(w.cols));
#pragma omp for collapse(2) schedule(static)
    for (int64_t e = 0; e < w.count; ++e)
      for (int64_t r = 0; r < w.rows; ++r) {
        const RowGrid row = row_grid(scales, zeros, group_size, groups, e * w.rows + r);
        const int8_t* code = codes + (e * w.rows + r) * w.cols;
        cpu::with_scale_dtype(grid.scale_dtype, [&]<DType kScale>() {
          for (int64_t begin = 0, group = 0; begin < w.cols; begin += group_size, ++group) {
            const float scale = row.scales[group], zero = row.zero(group);
#pragma omp simd
            for (int64_t j = begin; j < begin + group_size; ++j)
              values[j] = cpu::round_lane<kScale>((static_cast<float>(code[j]) - zero) * scale);
          }
        });
        cpu::with_type(w.dtype, [&]<class T>(T*) {
          cpu::narrow(values.data(), w.as<T>() + e * w.matrix_stride + r * w.stride, w.cols);
        });
      }
  }
}

}  // namespace shardq
