#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/view.hpp"
#include "kernels/grid.hpp"
#include "kernels/tensor.hpp"

namespace shardq {

/// Memory of a backend, in bytes.
struct MemoryInfo {
  int64_t in_use = 0, peak = 0, available = 0, total = 0;
};

/// How a router turns logits into expert choices. Source: transformers, modeling_qwen3_moe.py / modeling_mixtral.py.
struct RouterSpec {
  int64_t experts = 0, top_k = 0;
  bool normalize_top_k = true;  ///< divide the chosen probabilities by their sum (norm_topk_prob)
};

/// One block of columns of a stack of weight matrices, for Backend::gptq_block. All views live in backend memory.
struct GptqBlock {
  StackView shifted;        ///< f32 [count, rows, width]: in: W columns plus what finished columns left over; contents are destroyed
  StackView weight;         ///< bf16/f16/f32 [count, rows, cols]: the original weights, columns at POSITIONS (the order of the factor)
  const int32_t* order = nullptr;  ///< [count, cols] position -> original column, which tells its group; null for the identity
  StackView factor;         ///< f32 [count, cols, cols], T^T as factorize() leaves it
  const float* pivots = nullptr;   ///< [count, cols] R[j][j]
  int64_t begin = 0;        ///< first position of the block; its width is shifted.cols
  const float* scales = nullptr;   ///< [count, rows, groups], values of the stored dtype
  const int8_t* zeros = nullptr;   ///< [count, rows, groups], or null when symmetric
  int64_t group_size = 0;   ///< columns a group (== cols for per-channel); group of a position = original column / group_size
  int64_t groups = 0;
  Grid grid;
  int8_t* codes = nullptr;  ///< out [count, rows, cols], at POSITIONS begin..
  StackView residual;       ///< out f32 [count, rows, cols]: D = W - Q, at POSITIONS begin..
  float* losses = nullptr;  ///< in/out [count, rows]: += sum over the block of (p - Q)^2 R_jj^2
};

/// The coarse operations that the pipeline is made of, enqueued on one stream of one device.
///
/// Contract for all: row-major views in this backend's memory; empty extents are allowed and do nothing; shapes are checked
/// and a mismatch is an Error(internal). Unless a comment says otherwise, calls return before the device has finished, and
/// see the effects of earlier calls. Dtypes of activations and weights: bf16, f16 (weights) or f32; accumulation is always in fp32 or better.
/// The CPU implementation is the specification. No operation knows about ranks.
class Backend {
 public:
  virtual ~Backend() = default;
  /// "cpu" or e.g. "cuda:0 NVIDIA H200".
  virtual std::string name() const = 0;
  /// True where pointers can be read by host code.
  virtual bool is_host() const = 0;
  /// The compute stream (cudaStream_t) for a device communicator; null on the CPU.
  virtual void* stream() const { return nullptr; }

  // ---- memory -----------------------------------------------------------------------------------
  /// Throws Error(internal) that names `what`, the bytes wanted and the bytes available.
  virtual void* allocate(int64_t bytes, const char* what) = 0;
  /// Stream-ordered: the memory may be reused only by later operations.
  virtual void release(void* data) noexcept = 0;
  /// Host memory from which transfers run at full speed (page-locked on CUDA).
  virtual void* allocate_host(int64_t bytes) = 0;
  virtual void release_host(void* data) noexcept = 0;
  /// Host to device on the compute stream. `source` may be reused on return.
  virtual void upload(void* target, const void* source, int64_t bytes) = 0;
  /// Device to host; complete on return.
  virtual void download(void* target, const void* source, int64_t bytes) = 0;
  /// Host to device on the copy stream, beside the compute stream; `source` (from allocate_host) must live until wait_prefetch + synchronize.
  /// Thread-safe against compute calls.
  virtual void prefetch(void* target, const void* source, int64_t bytes) = 0;
  /// Makes later compute calls wait for all prefetches enqueued so far.
  virtual void wait_prefetch() = 0;
  virtual void copy(void* target, const void* source, int64_t bytes) = 0;
  virtual void zero(void* target, int64_t bytes) = 0;
  virtual void synchronize() = 0;
  virtual MemoryInfo memory() const = 0;
  /// From now on what comes out for a matrix of a stack, or for a row of the solver's operations, does not depend on how many others are in
  /// the call, so that work may be divided at will.  A backend of which this is true anyway ignores it.
  virtual void set_reproducible(bool) {}

  // ---- linear layers and Hessians ----------------------------------------------------------------
  /// y = x w^T (+ bias) (+ y when `accumulate`).  Shapes: x [tokens, in], w [out, in], bias [out] of w's dtype or null, y [tokens, out].
  /// Where something is added, the product or the sum so far may be rounded to y's dtype once more.
  virtual void linear(MatrixView x, MatrixView w, const void* bias, MatrixView y, bool accumulate) = 0;
  /// For every e: rows [offsets[e], offsets[e+1]) of y = those rows of x times w[e]^T.  offsets: host, count + 1 values.
  virtual void linear_stack(MatrixView x, StackView w, std::span<const int64_t> offsets, MatrixView y) = 0;
  /// h[e] += x_e^T x_e for the rows of expert e, lower triangle (row >= column) only; the rest of h is untouched or garbage.
  /// bf16 inputs: products are exact in fp32, accumulated in fp32.  Shapes: x [rows, n], h f32 [count, n, n].
  virtual void accumulate_gram(MatrixView x, StackView h, std::span<const int64_t> offsets) = 0;
  /// h[e] = own[e] * h[e] + shared[e] * pool, lower triangles; pool may be an empty view.  own, shared: host, one value a matrix.
  virtual void scale_and_blend(StackView h, std::span<const float> own, std::span<const float> shared, MatrixView pool) = 0;
  /// pool += sum over e of h[e] (lower triangle), in the order of e, so that splitting a stack changes nothing.
  virtual void sum_stack(StackView h, MatrixView pool) = 0;
  /// Diagonals to host [count * n]; complete on return.
  virtual void diagonals(StackView h, float* host) = 0;
  /// Lower triangles, row by row, n (n + 1) / 2 values a matrix, to or from one contiguous array in backend memory.
  virtual void pack_lower(StackView h, float* packed) = 0;
  virtual void unpack_lower(const float* packed, StackView h) = 0;
  /// Order-free sums (exact_sum.hpp): adds `count` floats to the integer pairs coarse, fine (all in backend memory); zeroed pairs are an empty sum.
  virtual void add_exact(const float* values, int64_t count, int64_t* coarse, int64_t* fine) = 0;
  /// The sums as floats.
  virtual void read_exact(const int64_t* coarse, const int64_t* fine, int64_t count, float* values) = 0;

  // ---- solver ------------------------------------------------------------------------------------
  /// One reversed Cholesky for each matrix named in `which`: H[order][:, order] + damping I = R R^T, R upper triangular.
  /// Leaves in factor[e], row j: T(k, j) = R(k, j) / R(j, j) for k < j, zero elsewhere (that is T^T, row-major), and pivots[e][j] = R(j, j).
  /// A zero on the diagonal of H (dead column) is replaced by 1, without damping. `h` is kept.
  /// status[i] (host, complete on return): 0, or non-zero where which[i] is not positive definite.
  /// Shapes: h, factor f32 [count, n, n] (lower triangle of h is read); order [count, n] in backend memory or null; damping: host, per entry of which.
  /// Source: numerics.md "One factorisation, no inverse".
  virtual void factorize(StackView h, const int32_t* order, std::span<const int64_t> which, std::span<const float> damping,
                         StackView factor, float* pivots, std::span<int> status) = 0;
  /// Scales (and zeros) from the range of each group.  Shapes: w [count, rows, cols]; scales [count, rows, groups]; zeros same or null when symmetric.
  /// importance (backend memory, [count, cols], or null): with `shrink_steps` > 0, the range is also tried times 1 - 0.025 i for i = 0..shrink_steps,
  /// and the first with the least sum of importance_j * |Q - W|^norm wins (importance 1 where null).  Ties keep the larger range.
  virtual void find_scales(StackView w, const float* importance, int shrink_steps, float norm, const Grid& grid, int64_t group_size,
                           float* scales, int8_t* zeros) = 0;
  /// Columns into another order, or back: target[e][:, j] = source[e][:, order[e][j]], with `back` target[e][:, order[e][j]] = source[e][:, j].
  /// Any dtype of 1, 2 or 4 bytes, the same in both; target must not be source.  order: [count, cols] in backend memory, a permutation each.
  virtual void permute_columns(StackView source, const int32_t* order, bool back, StackView target) = 0;
  /// target[e] = weight[e][:, begin .. begin + target.cols) in f32.
  virtual void load_columns(StackView weight, int64_t begin, StackView target) = 0;
  /// target[e] += residual[e] * factor[e]^T.  Shapes: residual f32 [count, rows, k], factor f32 [count, width, k], target f32 [count, rows, width].
  virtual void block_update(StackView residual, StackView factor, StackView target) = 0;
  /// The sequential part: Babai/OBS over the columns of one block. Inside the block, for each j in order:
  /// p = shifted_j; Q = nearest; D = W - Q; for k > j: shifted_k = fma(D, T(j, k), shifted_k).
  virtual void gptq_block(const GptqBlock& block) = 0;
  /// Round to nearest without compensation. residual (or an empty view) gets D at positions under `order`.
  virtual void round_to_nearest(StackView w, const int32_t* order, const float* scales, const int8_t* zeros, int64_t group_size,
                                const Grid& grid, int8_t* codes, StackView residual) = 0;
  /// losses[e][row] = sum_j ((residual (I + T))_j R_jj)^2 = residual H residual^T.  `work` has residual's shape and is overwritten.
  virtual void quadratic_loss(StackView residual, StackView factor, const float* pivots, StackView work, float* losses) = 0;
  /// w = what a reader reconstructs, in w's dtype.
  virtual void dequantize(const int8_t* codes, const float* scales, const int8_t* zeros, int64_t group_size, const Grid& grid, StackView w) = 0;

  // ---- forward -----------------------------------------------------------------------------------
  /// y = x / rms(x) * weight over the last axis.  eps inside the root; computed in fp32.  y may alias x.
  virtual void rms_norm(MatrixView x, const void* weight, DType weight_dtype, float eps, MatrixView y) = 0;
  /// Rotates pairs (i, i + head_dim/2) of every head in place.  x [tokens, heads * head_dim]; cosine, sine f32 [positions, head_dim/2]; positions [tokens].
  virtual void rope(MatrixView x, int64_t head_dim, const float* cosine, const float* sine, const int32_t* positions) = 0;
  /// Causal softmax attention for packed sequences.  q, out [tokens, heads * head_dim]; k, v [tokens, kv_heads * head_dim];
  /// starts: host, sequences + 1 offsets into tokens. window: 0, or how many latest keys (itself included) a query sees.
  virtual void attention(MatrixView q, MatrixView k, MatrixView v, int64_t head_dim, std::span<const int64_t> starts, float scale,
                         int64_t window, MatrixView out) = 0;
  /// out = silu(gate) * up, computed in fp32, each rounded as stored.
  virtual void silu_mul(MatrixView gate, MatrixView up, MatrixView out) = 0;
  /// x += y.
  virtual void add(MatrixView x, MatrixView y) = 0;
  /// Softmax over experts in fp32, then the top_k (ties: lower index first).  logits [tokens, experts]; ids, weights [tokens, top_k].
  virtual void route(MatrixView logits, const RouterSpec& router, int32_t* ids, float* weights) = 0;
  /// Stable counting sort of slots (token * top_k + i) by expert.  order [slots]: slot at each sorted place; place [slots]: its inverse;
  /// offsets: host, experts + 1, complete on return.
  virtual void sort_by_expert(const int32_t* ids, int64_t slots, int64_t experts, int32_t* order, int32_t* place,
                              std::span<int64_t> offsets) = 0;
  /// target[i] = source[order[i] / divisor].
  virtual void gather_rows(MatrixView source, const int32_t* order, int64_t divisor, MatrixView target) = 0;
  /// target[place[slot]] = source[slot / copies], which is target[i] = source[order[i] / copies]: order and place are inverse permutations of
  /// target's rows, and a backend reads the one that suits it.  target has `copies` times as many rows as source.
  virtual void dispatch_rows(MatrixView source, const int32_t* order, const int32_t* place, int64_t copies, MatrixView target) = 0;
  /// target[t] += sum over i < top_k of weights[t * top_k + i] * source[place[t * top_k + i]], in that order, in fp32.
  virtual void combine_rows(MatrixView source, const int32_t* place, const float* weights, int64_t top_k, MatrixView target) = 0;
  /// Per token: -log softmax(logits)[target] and the index of the largest logit (lowest index on ties).  Outputs are host arrays, complete on return.
  virtual void cross_entropy(MatrixView logits, const int32_t* targets_host, double* losses, int32_t* best) = 0;
};

/// The CPU backend (OpenBLAS, OpenMP).
std::unique_ptr<Backend> make_cpu_backend();
/// The CUDA backend on visible device `index`. Throws Error(internal) when not compiled in, or no device is visible.
std::unique_ptr<Backend> make_cuda_backend(int index);
/// Visible CUDA devices; 0 when CUDA was not compiled in.
int cuda_device_count();

}  // namespace shardq
