#pragma once
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "kernels/backend.hpp"

namespace shardq::bench {

/// Ends the program with one line where a check fails: nothing is timed that is wrong.
void require(bool ok, const std::string& what);

/// One GPU, its ceilings measured at the start, and the results so far.
class CudaBench {
 public:
  CudaBench();
  ~CudaBench();
  Backend& gpu() { return *gpu_; }
  cublasHandle_t blas() const { return blas_; }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(gpu_->stream()); }

  /// Normal values times `scale` plus `offset`, in device memory. Made from a pool whose length divides no row.
  Tensor random(DType dtype, Shape shape, float scale = 1.0f, float offset = 0.0f);
  Tensor zeros(DType dtype, Shape shape);
  std::vector<float> download(const Tensor& tensor, int64_t begin, int64_t count);

  /// Median seconds of a call, by device events: host time counts only where the device waits for it.
  double time(const std::function<void()>& call, int repeats = 10);

  /// Prints and keeps a line. `ceiling` in the unit of `work`; `library`: seconds the library takes for the same, or 0.
  void report(const std::string& name, const std::string& shape, double seconds, double work, const char* unit,
              double ceiling, double library = 0, const std::string& library_name = "");
  /// A line of figures without a rate.
  void note(const std::string& name, const std::string& shape, nlohmann::json figures);

  void measure_ceilings();
  void write(const std::string& path) const;

  double copy_rate = 0, bf16_rate = 0, f32_rate = 0;

 private:
  std::unique_ptr<Backend> gpu_;
  cublasHandle_t blas_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::vector<float> pool_;
  nlohmann::json results_ = nlohmann::json::array();
};

/// Ragged counts that sum to `mean * count`, from a fixed seed: between a quarter and about two and a half times the
/// mean.
std::vector<int64_t> ragged_offsets(int64_t count, int64_t mean);

// One function a family; each checks, then times.
void bench_gram(CudaBench& bench);
void bench_gram_accuracy(CudaBench& bench);
void bench_linear(CudaBench& bench);
void bench_factorize(CudaBench& bench);
void bench_loop(CudaBench& bench);
void bench_rounding(CudaBench& bench);
void bench_solve(CudaBench& bench);

}  // namespace shardq::bench
