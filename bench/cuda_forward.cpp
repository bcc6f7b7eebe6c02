// Forward operations of the CUDA backend at production shapes: each is checked against the CPU backend on sampled rows,
// then timed with device events (median), and set against the ceilings of the same card measured in the same run.
//
//   bench_cuda_forward [JSON_FILE]
//
// Arrays are several times the L2 cache, filled with random numbers. Bytes count every input read once and every output
// written once; attention counts 2 T^2 d operations a head (half of the square, two products).
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "kernels/backend.hpp"

namespace shardq {
namespace {

using nlohmann::json;

constexpr int64_t kTokens = 65536;
constexpr int kRepeats = 20;

void require(bool ok, const std::string& what) {
  SHARDQ_CHECK(ok, ExitCode::internal, "bench_cuda_forward: {}", what);
}

/// Random bf16 or f32 contents on both sides; the host side is what the checks read.
struct Array {
  Tensor device;
  Tensor host_tensor;
  MatrixView host_view() const { return host_tensor.matrix(); }
};

class Bench {
 public:
  Bench() : cpu_(make_cpu_backend()), gpu_(make_cuda_backend(0)) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    pool_.resize((1 << 20) + 7);  // no power of two, so that rows differ
    for (float& value : pool_) value = normal(random);
    require(cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess, "no events");
  }
  Backend& cpu() { return *cpu_; }
  Backend& gpu() { return *gpu_; }

  Array array(DType dtype, int64_t rows, int64_t cols, float scale = 1.0f) {
    Array a;
    a.host_tensor = Tensor(*cpu_, dtype, {rows, cols}, "host array");
    a.device = Tensor(*gpu_, dtype, {rows, cols}, "device array");
    const int64_t count = rows * cols, period = static_cast<int64_t>(pool_.size());
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; ++i) {
      const float value = scale * pool_[i % period];
      if (dtype == DType::f32)
        a.host_tensor.as<float>()[i] = value;
      else
        a.host_tensor.as<BFloat16>()[i] = to_bf16(value);
    }
    gpu_->upload(a.device.data(), a.host_tensor.data(), a.device.bytes());
    return a;
  }
  Tensor output(DType dtype, int64_t rows, int64_t cols) {
    Tensor t(*gpu_, dtype, {rows, cols}, "output");
    require(cudaMemset(t.data(), 0xFF, static_cast<size_t>(t.bytes())) == cudaSuccess, "memset");
    return t;
  }

  /// Compares rows [begin, begin + want.rows) of a device matrix with `want`, a host matrix of the same type.
  void check(const std::string& name, MatrixView got, int64_t begin, MatrixView want, double relative,
             double absolute) {
    const int64_t size = size_of(got.dtype);
    std::vector<char> row(static_cast<size_t>(got.cols * size));
    for (int64_t i = 0; i < want.rows; ++i) {
      gpu_->download(row.data(), got.bytes() + (begin + i) * got.stride * size, got.cols * size);
      for (int64_t j = 0; j < got.cols; ++j) {
        const auto value = [&](const char* data) {
          return got.dtype == DType::f32 ? reinterpret_cast<const float*>(data)[j]
                                         : to_float(reinterpret_cast<const BFloat16*>(data)[j]);
        };
        const double g = value(row.data()), w = value(want.bytes() + i * want.stride * size);
        require(std::abs(g - w) <= relative * std::abs(w) + absolute,
                fmt::format("{}: row {} column {} is {}, the CPU has {}", name, begin + i, j, g, w));
      }
    }
  }

  /// Median seconds of one call.
  double time(const std::function<void()>& call) {
    const auto stream = static_cast<cudaStream_t>(gpu_->stream());
    for (int i = 0; i < 3; ++i) call();
    std::vector<float> times(kRepeats);
    for (float& milliseconds : times) {
      cudaEventRecord(begin_, stream);
      call();
      cudaEventRecord(end_, stream);
      require(cudaEventSynchronize(end_) == cudaSuccess, "a call failed on the device");
      cudaEventElapsedTime(&milliseconds, begin_, end_);
    }
    std::ranges::nth_element(times, times.begin() + kRepeats / 2);
    return times[kRepeats / 2] * 1e-3;
  }
  void report_bytes(const std::string& name, const std::string& shape, double bytes,
                    const std::function<void()>& call) {
    report(name, shape, bytes / time(call), "TB/s", copy_rate_, bytes);
  }
  void report_flops(const std::string& name, const std::string& shape, double flops,
                    const std::function<void()>& call) {
    report(name, shape, flops / time(call), "TFLOP/s", gemm_rate_, flops);
  }
  void measure_ceilings() {
    const int64_t bytes = int64_t{2} << 30;
    Tensor a(*gpu_, DType::u8, {bytes}, "copy source"), b(*gpu_, DType::u8, {bytes}, "copy target");
    gpu_->zero(a.data(), bytes);
    copy_rate_ = 2.0 * static_cast<double>(bytes) / time([&] { gpu_->copy(b.data(), a.data(), bytes); });
    const int n = 8192;
    const Array x = array(DType::bf16, n, n), w = array(DType::bf16, n, n);
    const Tensor y = output(DType::bf16, n, n);
    cublasHandle_t blas = nullptr;
    require(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS, "no cuBLAS");
    cublasSetStream(blas, static_cast<cudaStream_t>(gpu_->stream()));
    const float one = 1, nothing = 0;
    gemm_rate_ = 2.0 * n * n * n / time([&] {
                   require(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, w.device.data(), CUDA_R_16BF, n,
                                        x.device.data(), CUDA_R_16BF, n, &nothing, y.data(), CUDA_R_16BF, n,
                                        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS,
                           "GEMM");
                 });
    cublasDestroy(blas);
    fmt::print("{}: copy {:.2f} TB/s (read + write), bf16 GEMM {:.0f} TFLOP/s\n", gpu_->name(), copy_rate_ / 1e12,
               gemm_rate_ / 1e12);
  }
  void write(const char* path) const {
    const std::time_t now = std::time(nullptr);
    char date[32];
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    std::ofstream(path) << json{{"benchmark", "cuda_forward"},
                                {"device", gpu_->name()},
                                {"date", date},
                                {"copy_bytes_per_second", copy_rate_},
                                {"gemm_flops_per_second", gemm_rate_},
                                {"results", results_}}
                               .dump(1)
                        << '\n';
  }

 private:
  void report(const std::string& name, const std::string& shape, double rate, const char* unit, double ceiling,
              double work) {
    fmt::print("{:<14} {:<44} {:>9.3f} ms {:>8.2f} {:<8} {:>5.1f} %\n", name, shape, work / rate * 1e3, rate / 1e12,
               unit, 100 * rate / ceiling);
    std::fflush(stdout);
    results_.push_back({{"name", name},
                        {"shape", shape},
                        {"ms", work / rate * 1e3},
                        {"rate", rate / 1e12},
                        {"unit", unit},
                        {"percent_of_ceiling", 100 * rate / ceiling}});
  }

  std::unique_ptr<Backend> cpu_, gpu_;
  std::vector<float> pool_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  double copy_rate_ = 1, gemm_rate_ = 1;
  json results_ = json::array();
};

std::string shape_text(const MatrixView& m) {
  return fmt::format("[{}, {}]{}", m.rows, m.cols, m.stride == m.cols ? "" : fmt::format(" of {}", m.stride));
}

/// A host matrix with room for rows of `like`.
Tensor host_rows(Bench& bench, const MatrixView& like, int64_t rows) {
  return Tensor(bench.cpu(), like.dtype, {rows, like.cols}, "expected rows");
}

constexpr int64_t kSample = 16;  // rows checked at the end, where offsets are largest

void bench_rms_norm(Bench& b, int64_t rows, int64_t cols) {
  const Array x = b.array(DType::bf16, rows, cols), weight = b.array(DType::bf16, 1, cols);
  const Tensor y = b.output(DType::bf16, rows, cols);
  const auto call = [&] { b.gpu().rms_norm(x.device.matrix(), weight.device.data(), DType::bf16, 1e-6f, y.matrix()); };
  call();
  const Tensor want = host_rows(b, y.matrix(), kSample);
  b.cpu().rms_norm(x.host_view().row_range(rows - kSample, rows), weight.host_tensor.data(), DType::bf16, 1e-6f,
                   want.matrix());
  b.check("rms_norm", y.matrix(), rows - kSample, want.matrix(), 0.008, 1e-30);
  b.report_bytes("rms_norm", shape_text(y.matrix()), 2.0 * static_cast<double>(y.bytes()), call);
}

void bench_rope(Bench& b, int64_t heads, int64_t row_heads, int64_t head_dim) {
  const Array x = b.array(DType::bf16, kTokens, row_heads * head_dim);
  const Array cosine = b.array(DType::f32, 2048, head_dim / 2), sine = b.array(DType::f32, 2048, head_dim / 2);
  std::vector<int32_t> positions(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) positions[t] = static_cast<int32_t>(t % 2048);
  const Tensor at(b.gpu(), DType::i32, {kTokens}, "positions");
  b.gpu().upload(at.data(), positions.data(), at.bytes());
  const MatrixView view = x.device.matrix().col_range(0, heads * head_dim);
  const auto call = [&] {
    b.gpu().rope(view, head_dim, cosine.device.as<float>(), sine.device.as<float>(), at.as<int32_t>());
  };
  call();
  const MatrixView want = x.host_view().col_range(0, heads * head_dim).row_range(kTokens - kSample, kTokens);
  b.cpu().rope(want, head_dim, cosine.host_tensor.as<float>(), sine.host_tensor.as<float>(),
               positions.data() + kTokens - kSample);
  b.check("rope", view, kTokens - kSample, want, 0, 0);
  // Repeats rotate by random "angles" that are no rotations; values stay finite, which is all that time depends on.
  b.report_bytes("rope", fmt::format("{} x {} of {}", kTokens, heads, head_dim),
                 2.0 * 2 * static_cast<double>(kTokens * heads * head_dim), call);
}

void bench_silu_mul(Bench& b, int64_t rows, int64_t cols) {
  const Array x = b.array(DType::bf16, rows, 2 * cols, 2.0f);
  const Tensor y = b.output(DType::bf16, rows, cols);
  const auto call = [&] {
    b.gpu().silu_mul(x.device.matrix().col_range(0, cols), x.device.matrix().col_range(cols, 2 * cols), y.matrix());
  };
  call();
  const Tensor want = host_rows(b, y.matrix(), kSample);
  const MatrixView sample = x.host_view().row_range(rows - kSample, rows);
  b.cpu().silu_mul(sample.col_range(0, cols), sample.col_range(cols, 2 * cols), want.matrix());
  b.check("silu_mul", y.matrix(), rows - kSample, want.matrix(), 0.017, 1e-30);
  b.report_bytes("silu_mul", shape_text(y.matrix()), 3.0 * static_cast<double>(y.bytes()), call);
}

void bench_add(Bench& b, int64_t rows, int64_t cols) {
  const Array x = b.array(DType::bf16, rows, cols), y = b.array(DType::bf16, rows, cols, 0.01f);
  const auto call = [&] { b.gpu().add(x.device.matrix(), y.device.matrix()); };
  call();
  const MatrixView want = x.host_view().row_range(rows - kSample, rows);
  b.cpu().add(want, y.host_view().row_range(rows - kSample, rows));
  b.check("add", x.device.matrix(), rows - kSample, want, 0, 0);
  b.report_bytes("add", shape_text(x.device.matrix()), 3.0 * static_cast<double>(x.device.bytes()), call);
}

void bench_routing(Bench& b, int64_t experts, int64_t top_k, int64_t hidden) {
  const RouterSpec router{experts, top_k, true};
  const Array logits = b.array(DType::bf16, kTokens, experts, 4.0f);
  const int64_t slots = kTokens * top_k;
  Backend& gpu = b.gpu();
  const Tensor ids(gpu, DType::i32, {slots}, "ids"), order(gpu, DType::i32, {slots}, "order"),
      place(gpu, DType::i32, {slots}, "place");
  const Tensor weights(gpu, DType::f32, {slots}, "weights");
  std::vector<int64_t> offsets(experts + 1), want_offsets(experts + 1);
  const auto route = [&] { gpu.route(logits.device.matrix(), router, ids.as<int32_t>(), weights.as<float>()); };
  const auto sort = [&] {
    gpu.sort_by_expert(ids.as<int32_t>(), slots, experts, order.as<int32_t>(), place.as<int32_t>(), offsets);
  };
  route();
  sort();
  std::vector<int32_t> host_ids(slots), host_order(slots), host_place(slots), want(slots), want_place(slots),
      want_order(slots);
  std::vector<float> host_weights(slots), want_weights(slots);
  b.cpu().route(logits.host_view(), router, want.data(), want_weights.data());
  gpu.download(host_ids.data(), ids.data(), ids.bytes());
  gpu.download(host_weights.data(), weights.data(), weights.bytes());
  int64_t swapped = 0;  // bf16 logits tie rarely; where they do, both sides take the lower index
  for (int64_t i = 0; i < slots; ++i) swapped += host_ids[i] != want[i];
  require(swapped == 0, fmt::format("route: {} of {} choices differ from the CPU's", swapped, slots));
  b.cpu().sort_by_expert(host_ids.data(), slots, experts, want_order.data(), want_place.data(), want_offsets);
  gpu.download(host_order.data(), order.data(), order.bytes());
  gpu.download(host_place.data(), place.data(), place.bytes());
  require(host_order == want_order && host_place == want_place && offsets == want_offsets,
          "sort_by_expert differs from the CPU's");
  b.report_bytes("route", fmt::format("[{}, {}] top {}", kTokens, experts, top_k),
                 static_cast<double>(logits.device.bytes() + ids.bytes() + weights.bytes()), route);
  b.report_bytes("sort_by_expert", fmt::format("{} slots, {} experts", slots, experts),
                 2.0 * static_cast<double>(ids.bytes() + order.bytes()), sort);

  const Array x = b.array(DType::bf16, kTokens, hidden);
  const Tensor gathered = b.output(DType::bf16, slots, hidden);
  const auto gather = [&] {
    gpu.dispatch_rows(x.device.matrix(), order.as<int32_t>(), place.as<int32_t>(), top_k, gathered.matrix());
  };
  gather();
  const Tensor rows = host_rows(b, gathered.matrix(), kSample);
  b.cpu().gather_rows(x.host_view(), host_order.data() + slots - kSample, top_k, rows.matrix());
  b.check("dispatch_rows", gathered.matrix(), slots - kSample, rows.matrix(), 0, 0);
  // Every source row is needed top_k times, far apart: only the first read must come from memory.
  b.report_bytes("dispatch_rows", shape_text(gathered.matrix()),
                 static_cast<double>(gathered.bytes() + x.device.bytes()), gather);

  const auto combine = [&] {
    gpu.combine_rows(gathered.matrix(), place.as<int32_t>(), weights.as<float>(), top_k, x.device.matrix());
  };
  combine();
  const MatrixView target = x.host_view().row_range(kTokens - kSample, kTokens);
  Tensor needed(b.cpu(), DType::bf16, {kSample * top_k, hidden}, "rows of the sample");
  std::vector<int32_t> identity(kSample * top_k);
  for (int64_t i = 0; i < kSample * top_k; ++i) {
    identity[i] = static_cast<int32_t>(i);
    gpu.download(needed.as<char>() + i * hidden * 2,
                 gathered.as<char>() + int64_t{host_place[slots - kSample * top_k + i]} * hidden * 2, hidden * 2);
  }
  b.cpu().combine_rows(needed.matrix(), identity.data(), host_weights.data() + slots - kSample * top_k, top_k, target);
  b.check("combine_rows", x.device.matrix(), kTokens - kSample, target, 0, 0);
  b.report_bytes("combine_rows", shape_text(gathered.matrix()),
                 static_cast<double>(gathered.bytes() + 2 * x.device.bytes()), combine);
}

void bench_cross_entropy(Bench& b, int64_t rows, int64_t vocab) {
  const Array logits = b.array(DType::bf16, rows, vocab, 3.0f);
  std::vector<int32_t> targets(rows), best(rows), want_best(rows);
  for (int64_t t = 0; t < rows; ++t) targets[t] = static_cast<int32_t>(t * 37 % vocab);
  std::vector<double> losses(rows), want(rows);
  const auto call = [&] { b.gpu().cross_entropy(logits.device.matrix(), targets.data(), losses.data(), best.data()); };
  call();
  b.cpu().cross_entropy(logits.host_view(), targets.data(), want.data(), want_best.data());
  require(best == want_best, "cross_entropy: best differs from the CPU's");
  for (int64_t t = 0; t < rows; ++t)
    require(std::abs(losses[t] - want[t]) < 2e-6,
            fmt::format("cross_entropy: row {}: {} and {}", t, losses[t], want[t]));
  b.report_bytes("cross_entropy", shape_text(logits.device.matrix()), static_cast<double>(logits.device.bytes()), call);
}

struct AttentionCase {
  int64_t length, heads, kv_heads, head_dim, window = 0;
};
void bench_attention(Bench& b, const AttentionCase& c, const char* kernel) {
  setenv("SHARDQ_ATTENTION", kernel, 1);
  const int64_t sequences = kTokens / c.length, q_cols = c.heads * c.head_dim, kv_cols = c.kv_heads * c.head_dim;
  const Array qkv = b.array(DType::bf16, kTokens, q_cols + 2 * kv_cols);
  const Tensor out = b.output(DType::bf16, kTokens, q_cols);
  std::vector<int64_t> starts;
  for (int64_t s = 0; s <= sequences; ++s) starts.push_back(s * c.length);
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  const MatrixView all = qkv.device.matrix();
  const auto call = [&] {
    b.gpu().attention(all.col_range(0, q_cols), all.col_range(q_cols, q_cols + kv_cols),
                      all.col_range(q_cols + kv_cols, q_cols + 2 * kv_cols), c.head_dim, starts, scale, c.window,
                      out.matrix());
  };
  call();
  // The last sequence, the last key/value head with its last query head.
  const int64_t begin = kTokens - c.length, d = c.head_dim;
  const MatrixView last = qkv.host_view().row_range(begin, kTokens);
  const Tensor want(b.cpu(), DType::bf16, {c.length, d}, "expected rows");
  const int64_t one[] = {0, c.length};
  b.cpu().attention(last.col_range(q_cols - d, q_cols), last.col_range(q_cols + kv_cols - d, q_cols + kv_cols),
                    last.col_range(q_cols + 2 * kv_cols - d, q_cols + 2 * kv_cols), d, one, scale, c.window,
                    want.matrix());
  b.check("attention", out.matrix().col_range(q_cols - d, q_cols), begin, want.matrix(), 0.008, 0.02);
  const double keys =
      c.window == 0 || c.window > c.length ? 0.5 * static_cast<double>(c.length) : static_cast<double>(c.window);
  b.report_flops(kernel == std::string("portable") ? "attention, mma" : "attention",
                 fmt::format("{} x {}, heads {}/{} of {}{}", sequences, c.length, c.heads, c.kv_heads, d,
                             c.window ? fmt::format(", window {}", c.window) : ""),
                 4.0 * static_cast<double>(kTokens * c.heads * d) * keys, call);
}

}  // namespace
}  // namespace shardq

int main(int argc, char** argv) try {
  using namespace shardq;
  if (cuda_device_count() == 0) {
    fmt::print("no CUDA device is visible: nothing was measured\n");
    return 0;
  }
  Bench bench;
  bench.measure_ceilings();
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{kTokens, 2048},
                                   {kTokens, 4096},
                                   {kTokens, 8192},
                                   {kTokens * 32, 128},
                                   {kTokens * 32, 64}})
    bench_rms_norm(bench, rows, cols);
  bench_rope(bench, 32, 40, 128);
  bench_rope(bench, 4, 40, 128);
  bench_silu_mul(bench, kTokens, 14336);
  bench_silu_mul(bench, kTokens * 8, 768);
  bench_add(bench, kTokens, 4096);
  bench_routing(bench, 128, 8, 2048);
  bench_cross_entropy(bench, 4096, 151936);
  for (const AttentionCase& c : {AttentionCase{2048, 32, 4, 128},
                                 {2048, 32, 8, 128},
                                 {2048, 32, 32, 128},
                                 {256, 32, 8, 128},
                                 {8192, 32, 8, 128},
                                 {2048, 32, 8, 128, 512},
                                 {2048, 32, 8, 64},
                                 {2048, 32, 8, 96},
                                 {2048, 32, 8, 256}})
    for (const char* kernel : {"fastest", "portable"}) bench_attention(bench, c, kernel);
  if (argc > 1) bench.write(argv[1]);
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 1;
}
