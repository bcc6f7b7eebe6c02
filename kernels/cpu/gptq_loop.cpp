// The sequential part of the solver: columns of a block one after another, rows in parallel.
//
// A tile is kLanes rows, transposed to [width][kLanes], so that one vector instruction serves one column of all its
// rows. Columns go in strips of kStrip. Inside a strip each finished column updates the rest of the strip at once;
// columns to the right of the strip get its kStrip updates together, with the running sum in a register. For every
// column the updates still come in ascending order, one fused multiply-add each: the sum is the same, bit for bit, as
// that of the plain double loop, and of any other split.

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/convert.hpp"
#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/lanes.hpp"
#include "kernels/cpu/work_split.hpp"

namespace shardq {
namespace {

using cpu::kLanes;
constexpr int64_t kStrip = 8;

/// Scales and zeros of one group for the rows of a tile.
struct LaneGrid {
  float scale[kLanes], zero[kLanes];
};

/// One thread's copy of a tile; arrays are [width][kLanes].
struct Tile {
  Tile(int64_t width, int64_t groups)
      : shifted(width * kLanes),
        weight(width * kLanes),
        residual(width * kLanes),
        codes(width * kLanes),
        grids(groups),
        known(groups) {}
  std::vector<float> shifted, weight, residual;
  std::vector<int8_t> codes;
  std::vector<LaneGrid> grids;  // [groups], filled when first needed: with an activation order any group may come next
  std::vector<char> known;      // [groups]
  float loss[kLanes];
};

/// Where a tile lies: matrix, first row, rows in use. Lanes beyond `rows` repeat the last row and are never written
/// back.
struct TilePlace {
  int64_t matrix, row, rows;
  int64_t row_of(int lane) const { return row + std::min<int64_t>(lane, rows - 1); }
};

void load_tile(const GptqBlock& b, const TilePlace& at, Tile& tile) {
  const int64_t width = b.shifted.cols;
  const MatrixView shifted = b.shifted[at.matrix], weight = b.weight[at.matrix];
  cpu::with_type(weight.dtype, [&]<class T>(T*) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float* p = shifted.as<float>() + at.row_of(lane) * shifted.stride;
      const T* w = weight.as<T>() + at.row_of(lane) * weight.stride;
      for (int64_t j = 0; j < width; ++j) tile.shifted[j * kLanes + lane] = p[j];
      for (int64_t j = 0; j < width; ++j) tile.weight[j * kLanes + lane] = to_float(w[b.begin + j]);
    }
  });
  std::fill(tile.known.begin(), tile.known.end(), 0);
  std::fill(tile.loss, tile.loss + kLanes, 0.0f);
}

const LaneGrid& grid_of(const GptqBlock& b, const TilePlace& at, int64_t group, Tile& tile) {
  LaneGrid& grid = tile.grids[group];
  if (tile.known[group]) return grid;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t index = (at.matrix * b.weight.rows + at.row_of(lane)) * b.groups + group;
    grid.scale[lane] = b.scales[index];
    grid.zero[lane] = b.zeros ? static_cast<float>(b.zeros[index]) : 0.0f;
  }
  tile.known[group] = 1;
  return grid;
}

/// Quantizes column j of the tile: code, residual and loss.
template <DType kScale>
void quantize_column(const GptqBlock& b, float pivot, int64_t j, const LaneGrid& grid, Tile& tile) {
  const cpu::CodeRange range = cpu::code_range(b.grid);
  const float weight_of_error = pivot * pivot;
  const float *p = &tile.shifted[j * kLanes], *w = &tile.weight[j * kLanes];
  float *d = &tile.residual[j * kLanes], *loss = tile.loss;
  int8_t* codes = &tile.codes[j * kLanes];
#pragma omp simd
  for (int i = 0; i < kLanes; ++i) {
    float q;
    int32_t code;
    cpu::quantize_lane<kScale>(p[i], grid.scale[i], grid.zero[i], range, code, q);
    codes[i] = static_cast<int8_t>(code);
    d[i] = w[i] - q;
    const float error = p[i] - q;
    loss[i] = std::fma(error * error, weight_of_error, loss[i]);
  }
}

/// shifted_k += D_j T(j, k) for j in [from, to) ascending; `t` points at T(from, k).
void update_column(const float* residual, const float* t, int64_t count, float* shifted) {
  if (count == kStrip) {
    float factor[kStrip];
    for (int64_t s = 0; s < kStrip; ++s) factor[s] = t[s];
#pragma omp simd
    for (int i = 0; i < kLanes; ++i) {
      float sum = shifted[i];
#pragma GCC unroll 8
      for (int64_t s = 0; s < kStrip; ++s) sum = std::fma(residual[s * kLanes + i], factor[s], sum);
      shifted[i] = sum;
    }
    return;
  }
  for (int64_t s = 0; s < count; ++s) {
    const float factor = t[s];
#pragma omp simd
    for (int i = 0; i < kLanes; ++i) shifted[i] = std::fma(residual[s * kLanes + i], factor, shifted[i]);
  }
}

template <DType kScale>
void solve_tile(const GptqBlock& b, const TilePlace& at, Tile& tile) {
  const int64_t width = b.shifted.cols, cols = b.weight.cols;
  const MatrixView factor = b.factor[at.matrix];
  const int32_t* column = b.order ? b.order + at.matrix * cols + b.begin : nullptr;
  const float* pivots = b.pivots + at.matrix * cols + b.begin;
  const auto t_row = [&](int64_t k, int64_t j) {
    return factor.as<float>() + (b.begin + k) * factor.stride + b.begin + j;
  };
  for (int64_t strip = 0; strip < width; strip += kStrip) {
    const int64_t end = std::min(strip + kStrip, width);
    for (int64_t j = strip; j < end; ++j) {
      const int64_t group = (column ? column[j] : b.begin + j) / b.group_size;
      quantize_column<kScale>(b, pivots[j], j, grid_of(b, at, group, tile), tile);
      for (int64_t k = j + 1; k < end; ++k)
        update_column(&tile.residual[j * kLanes], t_row(k, j), 1, &tile.shifted[k * kLanes]);
    }
    for (int64_t k = end; k < width; ++k)
      update_column(&tile.residual[strip * kLanes], t_row(k, strip), end - strip, &tile.shifted[k * kLanes]);
  }
}

void store_tile(const GptqBlock& b, const TilePlace& at, const Tile& tile) {
  const int64_t width = b.shifted.cols, cols = b.weight.cols;
  const MatrixView residual = b.residual[at.matrix];
  for (int64_t i = 0; i < at.rows; ++i) {
    const int64_t row = at.matrix * b.weight.rows + at.row + i;
    float* d = residual.as<float>() + (at.row + i) * residual.stride + b.begin;
    int8_t* codes = b.codes + row * cols + b.begin;
    for (int64_t j = 0; j < width; ++j) d[j] = tile.residual[j * kLanes + i];
    for (int64_t j = 0; j < width; ++j) codes[j] = tile.codes[j * kLanes + i];
    b.losses[row] += tile.loss[i];
  }
}

}  // namespace

void CpuBackend::gptq_block(const GptqBlock& b) {
  const int64_t count = b.weight.count, rows = b.weight.rows, cols = b.weight.cols, width = b.shifted.cols;
  SHARDQ_CHECK(b.shifted.count == count && b.shifted.rows == rows && b.begin >= 0 && b.begin + width <= cols &&
                   b.factor.count == count && b.factor.rows == cols && b.factor.cols == cols &&
                   b.residual.count == count && b.residual.rows == rows && b.residual.cols == cols,
               ExitCode::internal,
               "gptq_block: columns {} + {} of weights [{}, {}, {}], shifted [{}, {}], factor [{}, {}, {}], residual "
               "[{}, {}, {}]",
               b.begin, width, count, rows, cols, b.shifted.count, b.shifted.rows, b.factor.count, b.factor.rows,
               b.factor.cols, b.residual.count, b.residual.rows, b.residual.cols);
  SHARDQ_CHECK(b.group_size > 0 && b.groups * b.group_size >= cols, ExitCode::internal,
               "gptq_block: {} groups of {} for {} columns", b.groups, b.group_size, cols);
  if (count == 0 || rows == 0 || width == 0) return;
  const int64_t tiles = (rows + kLanes - 1) / kLanes;
#pragma omp parallel if (count * rows * width > cpu::kWorthThreads)
  {
    Tile tile(width, b.groups);
#pragma omp for collapse(2) schedule(static)
    for (int64_t e = 0; e < count; ++e)
      for (int64_t i = 0; i < tiles; ++i) {
        const TilePlace at{e, i * kLanes, std::min<int64_t>(kLanes, rows - i * kLanes)};
        load_tile(b, at, tile);
        cpu::with_scale_dtype(b.grid.scale_dtype, [&]<DType kScale>() { solve_tile<kScale>(b, at, tile); });
        store_tile(b, at, tile);
      }
  }
}

void CpuBackend::load_columns(StackView weight, int64_t begin, StackView target) {
  SHARDQ_CHECK(weight.count == target.count && weight.rows == target.rows && begin >= 0 &&
                   begin + target.cols <= weight.cols && target.dtype == DType::f32,
               ExitCode::internal, "load_columns: columns {} + {} of [{}, {}, {}] into [{}, {}, {}]", begin,
               target.cols, weight.count, weight.rows, weight.cols, target.count, target.rows, target.cols);
  cpu::with_type(weight.dtype, [&]<class T>(T*) {
#pragma omp parallel for collapse(2) schedule(static) if (target.count * target.rows * target.cols > cpu::kWorthThreads)
    for (int64_t e = 0; e < weight.count; ++e)
      for (int64_t r = 0; r < weight.rows; ++r)
        cpu::widen(weight.as<T>() + e * weight.matrix_stride + r * weight.stride + begin,
                   target.as<float>() + e * target.matrix_stride + r * target.stride, target.cols);
  });
}

void CpuBackend::permute_columns(StackView source, const int32_t* order, bool back, StackView target) {
  const int64_t size = size_of(source.dtype), cols = source.cols;
  SHARDQ_CHECK(source.count == target.count && source.rows == target.rows && cols == target.cols &&
                   source.dtype == target.dtype && (size == 1 || size == 2 || size == 4),
               ExitCode::internal, "permute_columns: [{}, {}, {}] {} into [{}, {}, {}] {}", source.count, source.rows,
               cols, safetensors_name(source.dtype), target.count, target.rows, target.cols,
               safetensors_name(target.dtype));
  const auto permute = [&]<class Bits>(Bits*) {
#pragma omp parallel for collapse(2) schedule(static) if (source.count * source.rows * cols > cpu::kWorthThreads)
    for (int64_t e = 0; e < source.count; ++e)
      for (int64_t r = 0; r < source.rows; ++r) {
        const Bits* from = source.as<Bits>() + e * source.matrix_stride + r * source.stride;
        Bits* to = target.as<Bits>() + e * target.matrix_stride + r * target.stride;
        const int32_t* column = order + e * cols;
        if (back)
          for (int64_t j = 0; j < cols; ++j) to[column[j]] = from[j];
        else
          for (int64_t j = 0; j < cols; ++j) to[j] = from[column[j]];
      }
  };
  if (size == 1)
    permute(static_cast<uint8_t*>(nullptr));
  else if (size == 2)
    permute(static_cast<uint16_t*>(nullptr));
  else
    permute(static_cast<uint32_t*>(nullptr));
}

}  // namespace shardq
