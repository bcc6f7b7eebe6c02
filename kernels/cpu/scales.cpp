// Search of scales and zero points: kLanes rows of one group at a time, transposed, so that each row's error is summed
// over its columns in ascending order, whatever the vector width.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/convert.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/lanes.hpp"
#include "kernels/cpu/power.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

using cpu::kLanes;

struct ScaleSearch {
  const float* importance;  // of the group's columns, or null
  int steps;
  float norm;
  const Grid& grid;
};

struct GroupTile {
  std::vector<float> value;  // [columns][kLanes]
  int64_t columns = 0;
  float lowest[kLanes], highest[kLanes];
  float scale[kLanes], zero[kLanes], error[kLanes];
};

void find_ranges(GroupTile& g) {
  std::fill(g.lowest, g.lowest + kLanes, 0.0f);
  std::fill(g.highest, g.highest + kLanes, 0.0f);
  for (int64_t j = 0; j < g.columns; ++j)
#pragma omp simd
    for (int i = 0; i < kLanes; ++i) {
      const float v = g.value[j * kLanes + i];
      g.lowest[i] = v < g.lowest[i] ? v : g.lowest[i];
      g.highest[i] = v > g.highest[i] ? v : g.highest[i];
    }
}

/// error[i] = sum over columns of importance * |Q - W|^norm under the tile's scale and zero.
template <DType kScale>
void measure(const ScaleSearch& search, GroupTile& g) {
  const cpu::CodeRange range = cpu::code_range(search.grid);
  std::fill(g.error, g.error + kLanes, 0.0f);
  for (int64_t j = 0; j < g.columns; ++j) {
    const float importance = search.importance ? search.importance[j] : 1.0f;
    const float* w = &g.value[j * kLanes];
    float difference[kLanes];
#pragma omp simd
    for (int i = 0; i < kLanes; ++i) {
      int32_t code;
      float q;
      cpu::quantize_lane<kScale>(w[i], g.scale[i], g.zero[i], range, code, q);
      difference[i] = std::fabs(q - w[i]);
    }
    if (search.norm == 2.0f) {
#pragma omp simd
      for (int i = 0; i < kLanes; ++i) g.error[i] += importance * (difference[i] * difference[i]);
    } else {
#pragma omp simd
      for (int i = 0; i < kLanes; ++i) g.error[i] += importance * cpu::power_lane(difference[i], search.norm);
    }
  }
}

/// The tile's scale and zero for its ranges times `shrink`.
void set_scales(const ScaleSearch& search, float shrink, GroupTile& g) {
  for (int i = 0; i < kLanes; ++i) {
    const ScaleZero found = scale_of_range(g.lowest[i] * shrink, g.highest[i] * shrink, search.grid);
    g.scale[i] = found.scale;
    g.zero[i] = static_cast<float>(found.zero);
  }
}

/// Best scale and zero of every lane; `zero` as float. Only a smaller error replaces a larger range.
template <DType kScale>
void search_group(const ScaleSearch& search, GroupTile& g) {
  find_ranges(g);
  set_scales(search, 1.0f, g);
  if (search.steps == 0) return;
  float best_scale[kLanes], best_zero[kLanes], best_error[kLanes];
  const auto keep = [&](int i) {
    best_scale[i] = g.scale[i];
    best_zero[i] = g.zero[i];
    best_error[i] = g.error[i];
  };
  measure<kScale>(search, g);
  for (int i = 0; i < kLanes; ++i) keep(i);
  for (int step = 1; step <= search.steps; ++step) {
    set_scales(search, 1.0f - 0.025f * static_cast<float>(step), g);
    measure<kScale>(search, g);
    for (int i = 0; i < kLanes; ++i)
      if (g.error[i] < best_error[i]) keep(i);
  }
  std::copy(best_scale, best_scale + kLanes, g.scale);
  std::copy(best_zero, best_zero + kLanes, g.zero);
}

}  // namespace

void CpuBackend::find_scales(StackView w, const float* importance, int shrink_steps, float norm, const Grid& grid,
                             int64_t group_size, float* scales, int8_t* zeros) {
  SHARDQ_CHECK(group_size > 0 && w.cols % group_size == 0, ExitCode::internal,
               "find_scales: groups of {} do not divide {} columns", group_size, w.cols);
  SHARDQ_CHECK(grid.symmetric || zeros, ExitCode::internal, "find_scales: an asymmetric grid needs zeros");
  const int64_t groups = w.cols / group_size, tiles = (w.rows + kLanes - 1) / kLanes;
#pragma omp parallel if (w.count * w.rows * w.cols > cpu::kWorthThreads)
  {
    GroupTile g;
    g.value.resize(static_cast<size_t>(group_size * kLanes));
    g.columns = group_size;
#pragma omp for collapse(2) schedule(static)
    for (int64_t e = 0; e < w.count; ++e)
      for (int64_t tile = 0; tile < tiles; ++tile)
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t first = tile * kLanes, rows = std::min<int64_t>(kLanes, w.rows - first),
                        begin = group * group_size;
          cpu::with_type(w.dtype, [&]<class T>(T*) {
            for (int lane = 0; lane < kLanes; ++lane) {
              const int64_t row = first + std::min<int64_t>(lane, rows - 1);
              const T* source = w.as<T>() + e * w.matrix_stride + row * w.stride + begin;
              for (int64_t j = 0; j < group_size; ++j) g.value[j * kLanes + lane] = to_float(source[j]);
            }
          });
          const ScaleSearch search{importance ? importance + e * w.cols + begin : nullptr, shrink_steps, norm, grid};
          cpu::with_scale_dtype(grid.scale_dtype, [&]<DType kScale>() { search_group<kScale>(search, g); });
          for (int64_t i = 0; i < rows; ++i) {
            const int64_t index = (e * w.rows + first + i) * groups + group;
            scales[index] = g.scale[i];
            if (zeros) zeros[index] = static_cast<int8_t>(g.zero[i]);
          }
        }
  }
}

}  // namespace shardq
