// Sums of x^T x, lower triangle: by our own kernel on Hopper (sm90a/gram_panels.cu), else by cuBLAS.
//
// The cuBLAS way. The lower triangle of a row-major h is the upper one of a column-major matrix. It is covered by
// panels of columns, each a plain GEMM from the panel's first row down: the finer the panels, the less of the upper
// triangle is computed for nothing, and the smaller each GEMM. Products of bf16 (or f16) are exact in fp32. Tensor
// cores cut off the low bits of every partial sum, which makes long sums of positive terms (the diagonal) too small: by
// 2.0e-5 over 5958 tokens in one accumulator (H200, 2026-11-30), in proportion to their number. So at most kChainRows
// tokens go through one accumulator, which keeps the relative error below 1e-5; the rest is added in ordinary fp32.
// Experts' counts are ragged: see planned_gemm.hpp.
#include <algorithm>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/environment_choice.hpp"
#ifdef SHARDQ_WITH_SM90A
#include "kernels/cuda/sm90a/gram_panels.hpp"
#endif

namespace shardq {
namespace {

constexpr int64_t kChainRows = 2560;
constexpr int64_t kPanel = 512;
constexpr int kStreams = 8;

/// Width of panels for matrices of n columns: about kPanel, equal, and a multiple of a tensor-core tile.
int64_t panel_width(int64_t n) {
  if (n <= kPanel) return std::max<int64_t>(n, 1);
  const int64_t panels = ceil_div(n, kPanel);
  return ceil_div(ceil_div(n, panels), 64) * 64;
}

/// h[begin.., begin..end) += x[:, begin..]^T x[:, begin..end) for a panel of columns, on a side stream.
template <class State>
void accumulate_panel(State& state, int stream, MatrixView x, MatrixView h, int64_t begin, int64_t end) {
  const cudaDataType_t type = x.dtype == DType::bf16 ? CUDA_R_16BF : x.dtype == DType::f16 ? CUDA_R_16F : CUDA_R_32F;
  // Equal chains, so that none is a handful of rows.
  const int64_t chains = ceil_div(x.rows, kChainRows), step = ceil_div(ceil_div(x.rows, chains), 8) * 8;
  for (int64_t t = 0; t < x.rows; t += step) {
    const char* data = x.bytes() + (t * x.stride + begin) * size_of(x.dtype);
    // Column-major: c [panel, n - begin] = (panel of x^T) (rest of x), leading dimension h.stride.
    state.planned_gemm(stream, {.transpose_a = false,
                                .transpose_b = true,
                                .m = end - begin,
                                .n = h.rows - begin,
                                .k = std::min(step, x.rows - t),
                                .type = type,
                                .out = CUDA_R_32F,
                                .a = data,
                                .b = data,
                                .c = h.as<float>() + begin * h.stride + begin,
                                .lda = x.stride,
                                .ldb = x.stride,
                                .ldc = h.stride,
                                .beta = 1.0f});
  }
}

#ifdef SHARDQ_WITH_SM90A
template <class State>
void accumulate_on_hopper(State& state, MatrixView x, StackView h, std::span<const int64_t> offsets) {
  const std::vector<uint32_t> panels = gram_panels(h.cols);
  const auto panel_count = static_cast<int64_t>(panels.size());
  const std::vector<GramSegment> segments =
      gram_segments(offsets, panel_count, state.reproducible ? 0 : gram_clusters());
  const DeviceArray<GramSegment> segments_device(state, std::span<GramSegment const>(segments),
                                                 "segments of Gram sums");
  const DeviceArray<uint32_t> panels_device(state, std::span<uint32_t const>(panels), "panels of Gram sums");
  const int64_t flags = h.count * panel_count * 2;
  const DeviceArray<int> turns(state, flags, "turns of Gram sums");
  SHARDQ_CUDA(cudaMemsetAsync(turns.get(), 0, static_cast<size_t>(flags) * sizeof(int), state.compute));
  launch_gram(state.compute, {.x = x,
                              .h = h,
                              .segments = segments_device.get(),
                              .segment_count = static_cast<int64_t>(segments.size()),
                              .panels = panels_device.get(),
                              .panel_count = panel_count,
                              .turns = turns.get()});
}

/// SHARDQ_GRAM=portable keeps to cuBLAS, so that both can be tested and timed on one card.
bool portable_only() {
  return environment_says("SHARDQ_GRAM", "portable");
}
#endif

}  // namespace

void CudaBackend::accumulate_gram(MatrixView x, StackView h, std::span<const int64_t> offsets) {
  SHARDQ_CHECK(h.rows == h.cols && h.dtype == DType::f32, ExitCode::internal,
               "accumulate_gram: expected a stack of square f32 matrices, found [{}, {}, {}] {}", h.count, h.rows,
               h.cols, safetensors_name(h.dtype));
  SHARDQ_CHECK(static_cast<int64_t>(offsets.size()) == h.count + 1 && x.cols == h.cols, ExitCode::internal,
               "accumulate_gram: x has {} columns and h [{}, {}, {}], with {} offsets", x.cols, h.count, h.rows, h.cols,
               offsets.size());
  SHARDQ_CHECK(offsets.front() >= 0 && offsets.back() <= x.rows && std::is_sorted(offsets.begin(), offsets.end()),
               ExitCode::internal, "accumulate_gram: offsets [{}, {}) outside {} rows, or not ascending",
               offsets.front(), offsets.back(), x.rows);
  SHARDQ_CHECK(x.dtype == DType::bf16 || x.dtype == DType::f16 || x.dtype == DType::f32, ExitCode::internal,
               "accumulate_gram: expected bf16, f16 or f32, found {}", safetensors_name(x.dtype));
  if (h.count == 0 || h.cols == 0 || offsets.back() == offsets.front()) return;
  state_->use();
#ifdef SHARDQ_WITH_SM90A
  if (state_->compute_capability == 90 && gram_accepts(x) && !portable_only())
    return accumulate_on_hopper(*state_, x, h, offsets);
#endif
  const int64_t n = h.cols, width = panel_width(n), panels = ceil_div(n, width);
  const int streams = static_cast<int>(std::min<int64_t>(kStreams, h.count > 1 ? h.count : panels));
  state_->fork(streams);
  // A stack is spread by expert, one matrix by panel: sums into one place stay on one stream, in order.
  for (int64_t e = 0; e < h.count; ++e) {
    if (offsets[e + 1] == offsets[e]) continue;
    for (int64_t p = 0; p < panels; ++p)
      accumulate_panel(*state_, static_cast<int>((h.count > 1 ? e : p) % streams),
                       x.row_range(offsets[e], offsets[e + 1]), h[e], p * width, std::min((p + 1) * width, n));
  }
  state_->join(streams);
}

}  // namespace shardq
