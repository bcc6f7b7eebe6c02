#include "cuda_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <random>

namespace shardq::bench {

using nlohmann::json;

void require(bool ok, const std::string& what) {
  SHARDQ_CHECK(ok, ExitCode::internal, "bench_cuda_kernels: {}", what);
}

CudaBench::CudaBench() : gpu_(make_cuda_backend(0)) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  pool_.resize((1 << 22) + 9);
  for (float& value : pool_) value = normal(random);
  require(cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess, "no events");
  require(cublasCreate(&blas_) == CUBLAS_STATUS_SUCCESS && cublasSetStream(blas_, stream()) == CUBLAS_STATUS_SUCCESS,
          "no cuBLAS");
}

CudaBench::~CudaBench() {
  cublasDestroy(blas_);
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
}

Tensor CudaBench::random(DType dtype, Shape shape, float scale, float offset) {
  Tensor tensor(*gpu_, dtype, std::move(shape), "random values");
  const int64_t size = size_of(dtype), total = tensor.size();
  const int64_t first = std::min<int64_t>(total, static_cast<int64_t>(pool_.size()));
  std::vector<char> values(static_cast<size_t>(first * size));
  for (int64_t i = 0; i < first; ++i) {
    const float value = scale * pool_[i] + offset;
    if (dtype == DType::f32)
      reinterpret_cast<float*>(values.data())[i] = value;
    else
      reinterpret_cast<BFloat16*>(values.data())[i] = to_bf16(value);
  }
  gpu_->upload(tensor.data(), values.data(), first * size);
  for (int64_t done = first; done < total; done += std::min(first, total - done))
    gpu_->copy(static_cast<char*>(tensor.data()) + done * size, tensor.data(), std::min(first, total - done) * size);
  return tensor;
}

Tensor CudaBench::zeros(DType dtype, Shape shape) {
  Tensor tensor(*gpu_, dtype, std::move(shape), "zeros");
  gpu_->zero(tensor.data(), tensor.bytes());
  return tensor;
}

std::vector<float> CudaBench::download(const Tensor& tensor, int64_t begin, int64_t count) {
  const int64_t size = size_of(tensor.dtype());
  std::vector<char> raw(static_cast<size_t>(count * size));
  gpu_->download(raw.data(), static_cast<const char*>(tensor.data()) + begin * size, count * size);
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    values[i] = tensor.dtype() == DType::f32 ? reinterpret_cast<const float*>(raw.data())[i]
                                             : to_float(reinterpret_cast<const BFloat16*>(raw.data())[i]);
  return values;
}

double CudaBench::time(const std::function<void()>& call, int repeats) {
  for (int i = 0; i < 2; ++i) call();
  gpu_->synchronize();
  std::vector<float> times(static_cast<size_t>(repeats));
  for (float& milliseconds : times) {
    cudaEventRecord(begin_, stream());
    call();
    cudaEventRecord(end_, stream());
    require(cudaEventSynchronize(end_) == cudaSuccess, "a call failed on the device");
    cudaEventElapsedTime(&milliseconds, begin_, end_);
  }
  std::ranges::nth_element(times, times.begin() + repeats / 2);
  return times[repeats / 2] * 1e-3;
}

void CudaBench::report(const std::string& name, const std::string& shape, double seconds, double work, const char* unit,
                       double ceiling, double library, const std::string& library_name) {
  const double rate = work / seconds;
  std::string line = fmt::format("{:<16} {:<44} {:>9.3f} ms {:>8.2f} {:<8} {:>5.1f} %", name, shape, seconds * 1e3,
                                 rate / 1e12, unit, 100 * rate / ceiling);
  json entry{{"name", name},        {"shape", shape}, {"ms", seconds * 1e3},
             {"rate", rate / 1e12}, {"unit", unit},   {"percent_of_ceiling", 100 * rate / ceiling}};
  if (library > 0) {
    line += fmt::format("   {} {:.3f} ms", library_name, library * 1e3);
    entry["library"] = library_name;
    entry["library_ms"] = library * 1e3;
  }
  fmt::print("{}\n", line);
  std::fflush(stdout);
  results_.push_back(std::move(entry));
}

void CudaBench::note(const std::string& name, const std::string& shape, json figures) {
  fmt::print("{:<16} {:<44} {}\n", name, shape, figures.dump());
  std::fflush(stdout);
  results_.push_back({{"name", name}, {"shape", shape}, {"figures", std::move(figures)}});
}

void CudaBench::measure_ceilings() {
  const int64_t bytes = int64_t{2} << 30;
  {
    const Tensor a = zeros(DType::u8, {bytes}), b(*gpu_, DType::u8, {bytes}, "copy target");
    copy_rate = 2.0 * static_cast<double>(bytes) / time([&] { gpu_->copy(b.data(), a.data(), bytes); });
  }
  const int n = 8192;
  const float one = 1, nothing = 0;
  for (const auto& [dtype, type, rate] :
       {std::tuple(DType::bf16, CUDA_R_16BF, &bf16_rate), std::tuple(DType::f32, CUDA_R_32F, &f32_rate)}) {
    const Tensor x = random(dtype, {n, n}), w = random(dtype, {n, n}), y(*gpu_, dtype, {n, n}, "y");
    *rate = 2.0 * n * n * n / time([&, type = type] {
              require(cublasGemmEx(blas_, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, w.data(), type, n, x.data(), type, n,
                                   &nothing, y.data(), type, n, CUBLAS_COMPUTE_32F,
                                   CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS,
                      "GEMM");
            });
  }
  fmt::print("{}: copy {:.2f} TB/s (read + write), GEMM bf16 {:.0f}, fp32 {:.1f} TFLOP/s\n", gpu_->name(),
             copy_rate / 1e12, bf16_rate / 1e12, f32_rate / 1e12);
}

void CudaBench::write(const std::string& path) const {
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  std::ofstream file(path);
  file << json{{"benchmark", "cuda_kernels"},
               {"device", gpu_->name()},
               {"date", date},
               {"copy_bytes_per_second", copy_rate},
               {"bf16_flops_per_second", bf16_rate},
               {"f32_flops_per_second", f32_rate},
               {"results", results_}}
              .dump(1)
       << '\n';
  SHARDQ_CHECK(file.good(), ExitCode::disk, "cannot write {}", path);
}

std::vector<int64_t> ragged_offsets(int64_t count, int64_t mean) {
  std::mt19937 random(3);
  std::lognormal_distribution<double> spread(0.0, 0.5);
  std::vector<double> weight(static_cast<size_t>(count));
  double sum = 0;
  for (double& w : weight) sum += w = std::clamp(spread(random), 0.25, 2.5);
  std::vector<int64_t> offsets{0};
  double running = 0;
  for (double w : weight)
    offsets.push_back(static_cast<int64_t>((running += w) / sum * static_cast<double>(mean * count)));
  offsets.back() = mean * count;
  return offsets;
}

}  // namespace shardq::bench

/// bench_cuda_kernels [--json FILE] [--only NAME]...   NAME: gram, accuracy, linear, factorize, loop, rounding, solve
int main(int argc, char** argv) {
  using namespace shardq::bench;
  std::string path;
  std::vector<std::string> only;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--json") path = argv[i + 1];
    if (flag == "--only") only.push_back(argv[i + 1]);
  }
  const std::pair<const char*, void (*)(CudaBench&)> families[] = {
      {"gram", bench_gram}, {"accuracy", bench_gram_accuracy}, {"linear", bench_linear}, {"factorize", bench_factorize},
      {"loop", bench_loop}, {"rounding", bench_rounding},      {"solve", bench_solve}};
  try {
    CudaBench bench;
    bench.measure_ceilings();
    for (const auto& [name, run] : families)
      if (only.empty() || std::find(only.begin(), only.end(), name) != only.end()) {
        run(bench);
        if (!path.empty()) bench.write(path);
      }
  } catch (const shardq::Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}
