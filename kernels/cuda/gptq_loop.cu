// The sequential part of the solver: columns of a block one after another, rows in parallel, one launch for the stack.
//
//   for j:  p = shifted_j;  Q = nearest;  D = W - Q;  for k > j: shifted_k = fma(D, T(j, k), shifted_k)
//
// Mapping: one thread a row, so that every lane quantizes a column of its own (a division, a clamp and two roundings
// are as dear as 20 multiply-adds; a warp a row would repeat them 32 times). Columns go in strips of 32 whose p live in
// registers, which takes a fully unrolled strip. D of earlier strips waits in shared memory, one column of it a thread;
// before a strip, its p get all earlier columns in ascending order (left-looking), inside it each finished column
// updates the rest at once. So every p_k receives its fused multiply-adds in ascending j, as on the CPU: equal bits. T
// lies in shared memory as [j][k] by strips, and is read as broadcast 16-byte words.
//
// Under an activation order every column may be of another group: then the scales of a thread's row wait in shared
// memory too, where they fit.
//
// Bytes a row and column: 4 in (shifted), 2 in (weight), 1 + 4 out. Rows are read by single threads in 16-byte words: a
// warp's 32 rows stay in L1 until their lines are used up. No library call does any of this.
#include <algorithm>

#include "kernels/cuda/cuda_state.hpp"
#include "kernels/cuda/quantize.cuh"

namespace shardq {
namespace {

constexpr int kWidth = 128;
constexpr int kStrip = 32;
constexpr int kStrips = kWidth / kStrip;
constexpr int kMaxThreads = 128;
constexpr int kFactorFloats = kStrip * kStrip * (kStrips * (kStrips + 1) / 2);

/// GptqBlock as the kernel sees it.
struct Args {
  const float* shifted;
  int64_t shifted_stride, shifted_matrix_stride;
  const void* weight;
  DType weight_dtype;
  int64_t weight_size, weight_stride, weight_matrix_stride;
  const int32_t* order;
  const float* factor;  // at row `begin`, column `begin`
  int64_t factor_stride, factor_matrix_stride;
  const float* pivots;
  const float* scales;
  const int8_t* zeros;
  int8_t* codes;
  float* residual;  // at column `begin`
  int64_t residual_stride, residual_matrix_stride;
  float* losses;
  int64_t rows, cols, groups;
  int begin, width, group_size;
  CodeRange range;
  bool words_in, words_out, weight_words, factor_words, code_words;  // rows can be accessed in 16-byte words
  bool scale_table;                                                  // all scales of a row are held in shared memory
};

struct Shared {
  alignas(16) float factor[kFactorFloats];  // strip s: T(j, 32 s + k) at [j][k] for j < 32 (s + 1)
  int group[kWidth];
  float pivot_squared[kWidth];
  // Follow: D of all strips but the last, [column][thread]; scales, [group][thread]; zero points likewise, as bytes.
  __device__ float* residual() { return reinterpret_cast<float*>(this + 1); }
  __device__ float* scales() { return residual() + (kWidth - kStrip) * blockDim.x; }
  __device__ int8_t* zeros(int64_t groups) { return reinterpret_cast<int8_t*>(scales() + groups * blockDim.x); }
  /// `groups`: those in the table, or 0.
  __host__ __device__ static int64_t bytes(int threads, int64_t groups, bool zeros) {
    return static_cast<int64_t>(sizeof(Shared)) +
           threads * ((kWidth - kStrip + groups) * static_cast<int64_t>(sizeof(float)) + (zeros ? groups : 0));
  }
};
/// Beyond this the table would cost a resident block.
constexpr int64_t kTableBytes = 20 << 10;

__device__ constexpr int factor_offset(int strip) {
  return kStrip * kStrip * (strip * (strip + 1) / 2);
}

/// Four elements T(k, j .. j + 3) of row k of the block; those outside of it are zero.
__device__ float4 factor_piece(const Args& a, const float* base, int k, int j) {
  float4 t = make_float4(0, 0, 0, 0);
  if (k >= a.width) return t;
  const float* source = base + k * a.factor_stride + j;
  if (a.factor_words && j + 4 <= a.width) return __ldg(reinterpret_cast<const float4*>(source));
  if (j < a.width) t.x = source[0];
  if (j + 1 < a.width) t.y = source[1];
  if (j + 2 < a.width) t.z = source[2];
  if (j + 3 < a.width) t.w = source[3];
  return t;
}

/// Brings T of the block to shared memory, transposed: a lane a row k of T^T, 4 columns j at a time, so that shared
/// memory is written along rows. Several loads are under way at once: a block of one warp has nothing else to wait
/// with.
__device__ void load_factor(const Args& a, int64_t matrix, Shared& shared) {
  constexpr int kPieces = kStrip / 4, kUnits = kPieces * (kStrips * (kStrips + 1) / 2), kAhead = 10;
  static_assert(kUnits % kAhead == 0);
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const float* base = a.factor + matrix * a.factor_matrix_stride;
  /// Strip, first row within T and column of a unit.
  const auto place = [&](int unit, int& strip, int& j) {
    const int block = unit / kPieces;
    strip = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
    j = (unit - kPieces * (strip * (strip + 1) / 2)) * 4;
  };
  for (int first = threadIdx.x / 32; first < kUnits; first += warps * kAhead) {
    float4 held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int unit = first + i * warps;
      int strip, j;
      place(min(unit, kUnits - 1), strip, j);
      held[i] = factor_piece(a, base, strip * kStrip + lane, j);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int unit = first + i * warps;
      if (unit >= kUnits) continue;
      int strip, j;
      place(unit, strip, j);
      float* target = shared.factor + factor_offset(strip) + j * kStrip + lane;
      target[0] = held[i].x;
      target[kStrip] = held[i].y;
      target[2 * kStrip] = held[i].z;
      target[3 * kStrip] = held[i].w;
    }
  }
}

__device__ void load_groups(const Args& a, int64_t matrix, Shared& shared) {
#pragma unroll 4
  for (int j = threadIdx.x; j < a.width; j += blockDim.x) {
    const int64_t position = matrix * a.cols + a.begin + j;
    shared.group[j] = (a.order ? __ldg(a.order + position) : a.begin + j) / a.group_size;
    const float pivot = __ldg(a.pivots + position);
    shared.pivot_squared[j] = pivot * pivot;
  }
}

/// Where a thread's row lies.
struct Row {
  const float* shifted;
  const void* weight;
  const float* scales;
  const int8_t* zeros;
  int8_t* codes;
  float* residual;
  bool active;  // a thread past the last row repeats it and writes nothing
};

/// One strip of one row, in registers: indices are compile-time constants throughout.
template <bool kZero>
struct Strip {
  float p[kStrip], w[kStrip], scale[kStrip], zero[kZero ? kStrip : 1];
  uint32_t codes[kStrip / 4];
};

/// Weights of a strip. The dtype is a branch, not a template: it is the same for all threads, and kernels are dear to
/// compile.
template <class T, bool kFull>
__device__ void load_weights(const Args& a, const Row& row, int first, float (&w)[kStrip]) {
  const T* source = static_cast<const T*>(row.weight) + first;
  constexpr int kWord = kPerAccess<T>;
  if (kFull && a.weight_words) {
#pragma unroll
    for (int q = 0; q < kStrip / kWord; ++q) {
      const auto word = load_pack<kWord>(source + q * kWord);
#pragma unroll
      for (int i = 0; i < kWord; ++i) w[q * kWord + i] = widen(word.values[i]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kStrip; ++j) w[j] = kFull || j < a.width - first ? widen(source[j]) : 0.0f;
  }
}

template <bool kZero, bool kFull>
__device__ void load_strip(const Args& a, const Row& row, Shared& shared, int first, Strip<kZero>& strip) {
  const int valid = a.width - first;
  if (kFull && a.words_in) {
#pragma unroll
    for (int q = 0; q < kStrip / 4; ++q) {
      const float4 four = reinterpret_cast<const float4*>(row.shifted + first)[q];
      strip.p[4 * q] = four.x;
      strip.p[4 * q + 1] = four.y;
      strip.p[4 * q + 2] = four.z;
      strip.p[4 * q + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kStrip; ++j) strip.p[j] = kFull || j < valid ? row.shifted[first + j] : 0.0f;
  }
  if (a.weight_dtype == DType::bf16)
    load_weights<BFloat16, kFull>(a, row, first, strip.w);
  else if (a.weight_dtype == DType::f16)
    load_weights<Float16, kFull>(a, row, first, strip.w);
  else
    load_weights<float, kFull>(a, row, first, strip.w);
  const float* scale_table = shared.scales() + threadIdx.x;
  const int8_t* zero_table = shared.zeros(a.groups) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kStrip; ++j) {
    const int group = kFull || j < valid ? shared.group[first + j] : 0;
    strip.scale[j] = a.scale_table ? scale_table[group * blockDim.x] : row.scales[group];
    if constexpr (kZero)
      strip.zero[j] = static_cast<float>(a.scale_table ? zero_table[group * blockDim.x] : row.zeros[group]);
  }
}

/// A row's scales and zero points to this thread's place in the tables.
template <bool kZero>
__device__ void load_scales(const Args& a, const Row& row, Shared& shared) {
#pragma unroll 8
  for (int g = 0; g < static_cast<int>(a.groups); ++g) {
    shared.scales()[g * blockDim.x + threadIdx.x] = __ldg(row.scales + g);
    if constexpr (kZero) shared.zeros(a.groups)[g * blockDim.x + threadIdx.x] = __ldg(row.zeros + g);
  }
}

/// p += D T over all columns before the strip.
template <bool kZero>
__device__ void update_strip(const float* factor, const float* residual, int first, Strip<kZero>& strip) {
#pragma unroll 2
  for (int j = 0; j < first; ++j) {
    const float d = residual[j * blockDim.x];
    const float4* t = reinterpret_cast<const float4*>(factor + j * kStrip);
#pragma unroll
    for (int q = 0; q < kStrip / 4; ++q) {
      const float4 four = t[q];
      strip.p[4 * q] = __fmaf_rn(d, four.x, strip.p[4 * q]);
      strip.p[4 * q + 1] = __fmaf_rn(d, four.y, strip.p[4 * q + 1]);
      strip.p[4 * q + 2] = __fmaf_rn(d, four.z, strip.p[4 * q + 2]);
      strip.p[4 * q + 3] = __fmaf_rn(d, four.w, strip.p[4 * q + 3]);
    }
  }
}

/// The columns of a strip in sequence. Leaves D in w.
template <DType kScale, bool kZero, bool kFast>
__device__ void quantize_strip(CodeRange range, const float* factor, const float* pivot_squared, int valid,
                               Strip<kZero>& strip, float& loss) {
#pragma unroll
  for (int q = 0; q < kStrip / 4; ++q) strip.codes[q] = 0;
#pragma unroll
  for (int j = 0; j < kStrip; ++j) {
    const float p = strip.p[j], scale = strip.scale[j];
    uint32_t bits;
    const float value = quantized<kScale, kZero, kFast>(p, scale, kFast ? reciprocal(scale) : 0.0f,
                                                        kZero ? strip.zero[kZero ? j : 0] : 0.0f, range, bits);
    strip.codes[j / 4] |= (bits & 0xffu) << (8 * (j % 4));
    const float d = __fsub_rn(strip.w[j], value), error = p - value;
    strip.w[j] = d;
    // Columns past the end of a narrow block have no pivot.
    if (j < valid) loss = __fmaf_rn(error * error, pivot_squared[j], loss);
    const float4* t = reinterpret_cast<const float4*>(factor + j * kStrip);
#pragma unroll
    for (int q = 0; q < kStrip / 4; ++q) {
      if (4 * q + 3 <= j) continue;
      const float4 four = t[q];
      if (4 * q > j) strip.p[4 * q] = __fmaf_rn(d, four.x, strip.p[4 * q]);
      if (4 * q + 1 > j) strip.p[4 * q + 1] = __fmaf_rn(d, four.y, strip.p[4 * q + 1]);
      if (4 * q + 2 > j) strip.p[4 * q + 2] = __fmaf_rn(d, four.z, strip.p[4 * q + 2]);
      strip.p[4 * q + 3] = __fmaf_rn(d, four.w, strip.p[4 * q + 3]);
    }
  }
}

template <bool kZero, bool kFull>
__device__ void store_strip(const Args& a, const Row& row, int first, const Strip<kZero>& strip) {
  if (!row.active) return;
  const int valid = a.width - first;
  if (kFull && a.words_out) {
#pragma unroll
    for (int q = 0; q < kStrip / 4; ++q)
      reinterpret_cast<float4*>(row.residual + first)[q] =
          make_float4(strip.w[4 * q], strip.w[4 * q + 1], strip.w[4 * q + 2], strip.w[4 * q + 3]);
  } else {
#pragma unroll
    for (int j = 0; j < kStrip; ++j)
      if (kFull || j < valid) row.residual[first + j] = strip.w[j];
  }
  if (kFull && a.code_words) {
    uint4* target = reinterpret_cast<uint4*>(row.codes + first);
    target[0] = make_uint4(strip.codes[0], strip.codes[1], strip.codes[2], strip.codes[3]);
    target[1] = make_uint4(strip.codes[4], strip.codes[5], strip.codes[6], strip.codes[7]);
  } else {
#pragma unroll
    for (int j = 0; j < kStrip; ++j)
      if (kFull || j < valid) row.codes[first + j] = static_cast<int8_t>(strip.codes[j / 4] >> (8 * (j % 4)));
  }
}

template <DType kScale, bool kZero, bool kFull>
__device__ void solve_strip(const Args& a, const Row& row, Shared& shared, int index, float& loss) {
  // Narrow strips are rare: they always divide the long way.
  constexpr bool kMayBeFast = kFull && kScale != DType::f32;
  const int first = index * kStrip;
  const float* factor = shared.factor + factor_offset(index);
  float* residual = shared.residual() + threadIdx.x;
  Strip<kZero> strip;
  load_strip<kZero, kFull>(a, row, shared, first, strip);
  update_strip(factor, residual, first, strip);
  const int valid = kFull ? kStrip : a.width - first;
  const float *own_factor = factor + first * kStrip, *pivot_squared = shared.pivot_squared + first;
  bool fast = kMayBeFast;
#pragma unroll
  for (int j = 0; j < kStrip; ++j) fast = fast && divides_fast(strip.scale[j]);
  if (fast)
    quantize_strip<kScale, kZero, kMayBeFast>(a.range, own_factor, pivot_squared, valid, strip, loss);
  else
    quantize_strip<kScale, kZero, false>(a.range, own_factor, pivot_squared, valid, strip, loss);
  if (first + kStrip < a.width) {
#pragma unroll
    for (int j = 0; j < kStrip; ++j) residual[(first + j) * blockDim.x] = strip.w[j];
  }
  store_strip<kZero, kFull>(a, row, first, strip);
}

template <DType kScale, bool kZero>
__global__ void __launch_bounds__(kMaxThreads) gptq_kernel(const __grid_constant__ Args a) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int64_t matrix = blockIdx.y, wanted = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  load_factor(a, matrix, shared);
  load_groups(a, matrix, shared);
  __syncthreads();

  const int64_t r = min(wanted, a.rows - 1), whole = matrix * a.rows + r;
  const Row row{a.shifted + matrix * a.shifted_matrix_stride + r * a.shifted_stride,
                static_cast<const char*>(a.weight) +
                    (matrix * a.weight_matrix_stride + r * a.weight_stride + a.begin) * a.weight_size,
                a.scales + whole * a.groups,
                kZero ? a.zeros + whole * a.groups : nullptr,
                a.codes + whole * a.cols + a.begin,
                a.residual + matrix * a.residual_matrix_stride + r * a.residual_stride,
                wanted < a.rows};
  if (a.scale_table) load_scales<kZero>(a, row, shared);
  float loss = 0.0f;
#pragma unroll 1
  for (int index = 0; index * kStrip < a.width; ++index) {
    if ((index + 1) * kStrip <= a.width)
      solve_strip<kScale, kZero, true>(a, row, shared, index, loss);
    else
      solve_strip<kScale, kZero, false>(a, row, shared, index, loss);
  }
  if (row.active) a.losses[whole] += loss;
}

/// shifted[e][r][k] += D T over `done` finished columns, in ascending order: what a block wider than kWidth needs
/// between its parts. Not on any production path.
__global__ void update_kernel(float* shifted, int64_t stride, int64_t matrix_stride, const Args a, int done) {
  const int k = blockIdx.x * blockDim.x + threadIdx.x;
  if (k >= a.width) return;
  const int64_t e = blockIdx.z;
  for (int64_t r = blockIdx.y; r < a.rows; r += gridDim.y) {
    const float* d = a.residual + e * a.residual_matrix_stride + r * a.residual_stride - done;
    const float* t = a.factor + e * a.factor_matrix_stride + k * a.factor_stride - done;
    float& p = shifted[e * matrix_stride + r * stride + k];
    float sum = p;
    for (int j = 0; j < done; ++j) sum = __fmaf_rn(d[j], t[j], sum);
    p = sum;
  }
}

/// Views of columns [at, at + width) of the block.
Args arguments(const GptqBlock& b, int64_t at, int64_t width) {
  const int64_t begin = b.begin + at;
  Args a{.shifted = b.shifted.as<float>() + at,
         .shifted_stride = b.shifted.stride,
         .shifted_matrix_stride = b.shifted.matrix_stride,
         .weight = b.weight.data,
         .weight_dtype = b.weight.dtype,
         .weight_size = size_of(b.weight.dtype),
         .weight_stride = b.weight.stride,
         .weight_matrix_stride = b.weight.matrix_stride,
         .order = b.order,
         .factor = b.factor.as<float>() + begin * b.factor.stride + begin,
         .factor_stride = b.factor.stride,
         .factor_matrix_stride = b.factor.matrix_stride,
         .pivots = b.pivots,
         .scales = b.scales,
         .zeros = b.zeros,
         .codes = b.codes,
         .residual = b.residual.as<float>() + begin,
         .residual_stride = b.residual.stride,
         .residual_matrix_stride = b.residual.matrix_stride,
         .losses = b.losses,
         .rows = b.weight.rows,
         .cols = b.weight.cols,
         .groups = b.groups,
         .begin = static_cast<int>(begin),
         .width = static_cast<int>(width),
         .group_size = static_cast<int>(b.group_size),
         .range = code_range(b.grid)};
  const auto words = [](const void* data, int64_t stride, int64_t matrix_stride, int64_t size) {
    return whole_words(data) && stride * size % 16 == 0 && matrix_stride * size % 16 == 0;
  };
  a.words_in = words(a.shifted, a.shifted_stride, a.shifted_matrix_stride, 4);
  a.words_out = words(a.residual, a.residual_stride, a.residual_matrix_stride, 4);
  a.factor_words = words(a.factor, a.factor_stride, a.factor_matrix_stride, 4);
  a.weight_words = words(static_cast<const char*>(a.weight) + begin * a.weight_size, a.weight_stride,
                         a.weight_matrix_stride, a.weight_size);
  a.code_words = words(b.codes + begin, b.weight.cols, b.weight.rows * b.weight.cols, 1);
  return a;
}

template <DType kScale, bool kZero>
void launch(const CudaBackend::State& state, Args a, int64_t count) {
  const auto kernel = gptq_kernel<kScale, kZero>;
  // Cards without a big shared memory (99 KiB on 8.6 and 8.9) take narrower blocks.
  const int64_t most =
      std::min<int64_t>(state.shared_memory_per_block, Shared::bytes(kMaxThreads, 0, false) + kTableBytes);
  SHARDQ_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)));
  const auto holds_table = [&](int threads) {
    return a.order && Shared::bytes(threads, a.groups, kZero) - Shared::bytes(threads, 0, false) <= kTableBytes;
  };
  const auto bytes = [&](int threads) {
    return static_cast<size_t>(Shared::bytes(threads, holds_table(threads) ? a.groups : 0, kZero));
  };
  // Few rows: narrow blocks, so that they reach all multiprocessors. Many: wide ones, which share their copy of T.
  int threads = 32;
  for (; threads < kMaxThreads && bytes(2 * threads) <= static_cast<size_t>(most); threads *= 2) {
    int resident = 0;
    SHARDQ_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, bytes(threads)));
    if (ceil_div(a.rows, threads) * count <= int64_t{resident} * state.multiprocessors) break;
  }
  a.scale_table = holds_table(threads);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, threads)), static_cast<unsigned>(count));
  kernel<<<grid, threads, bytes(threads), state.compute>>>(a);
  SHARDQ_LAUNCHED("gptq_block");
}

void launch(const CudaBackend::State& state, const GptqBlock& b, const Args& a) {
  with_scale_type(b.grid.scale_dtype, [&](auto scale) {
    constexpr DType kScale = decltype(scale)::value;
    if (b.zeros)
      launch<kScale, true>(state, a, b.weight.count);
    else
      launch<kScale, false>(state, a, b.weight.count);
  });
}

void check(const GptqBlock& b) {
  const int64_t count = b.weight.count, rows = b.weight.rows, cols = b.weight.cols, width = b.shifted.cols;
  SHARDQ_CHECK(b.shifted.count == count && b.shifted.rows == rows && b.begin >= 0 && b.begin + width <= cols &&
                   b.factor.count == count && b.factor.rows == cols && b.factor.cols == cols &&
                   b.residual.count == count && b.residual.rows == rows && b.residual.cols == cols,
               ExitCode::internal,
               "gptq_block: columns {} + {} of weights [{}, {}, {}], shifted [{}, {}], factor [{}, {}, {}], residual "
               "[{}, {}, {}]",
               b.begin, width, count, rows, cols, b.shifted.count, b.shifted.rows, b.factor.count, b.factor.rows,
               b.factor.cols, b.residual.count, b.residual.rows, b.residual.cols);
  SHARDQ_CHECK(b.shifted.dtype == DType::f32 && b.factor.dtype == DType::f32 && b.residual.dtype == DType::f32,
               ExitCode::internal, "gptq_block: shifted, factor and residual must be F32");
  SHARDQ_CHECK(b.weight.dtype == DType::bf16 || b.weight.dtype == DType::f16 || b.weight.dtype == DType::f32,
               ExitCode::internal, "gptq_block: expected weights in bf16, f16 or f32, found {}",
               safetensors_name(b.weight.dtype));
  SHARDQ_CHECK(b.group_size > 0 && b.groups * b.group_size >= cols, ExitCode::internal,
               "gptq_block: {} groups of {} for {} columns", b.groups, b.group_size, cols);
  SHARDQ_CHECK(b.grid.symmetric || b.zeros, ExitCode::internal, "gptq_block: an asymmetric grid needs zeros");
}

}  // namespace

void CudaBackend::gptq_block(const GptqBlock& b) {
  check(b);
  const int64_t width = b.shifted.cols;
  if (b.weight.count == 0 || b.weight.rows == 0 || width == 0) return;
  state_->use();
  for (int64_t at = 0; at < width; at += kWidth) {
    const Args a = arguments(b, at, std::min<int64_t>(kWidth, width - at));
    if (at > 0) {
      const dim3 grid(1, static_cast<unsigned>(std::min<int64_t>(a.rows, 65535)),
                      static_cast<unsigned>(b.weight.count));
      update_kernel<<<grid, kWidth, 0, state_->compute>>>(const_cast<float*>(a.shifted), a.shifted_stride,
                                                          a.shifted_matrix_stride, a, static_cast<int>(at));
      SHARDQ_LAUNCHED("gptq_block (update)");
    }
    launch(*state_, b, a);
  }
}

}  // namespace shardq
