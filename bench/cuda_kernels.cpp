// Products of the CUDA backend at production shapes: Gram sums, linear layers, and how accurate long sums are.
// Rates of Gram sums count the full square, 2 * tokens * n^2, as the literature does: beyond the GEMM ceiling means
// that the triangle that nobody needs was not computed.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cuda_bench.hpp"

namespace shardq::bench {
namespace {

const float kOne = 1.0f, kNothing = 0.0f;

/// A few elements of h against sums in double over `rows` rows of x.
void check_gram(CudaBench& bench, const Tensor& x, const Tensor& h, int64_t matrix, int64_t begin, int64_t rows,
                int64_t n) {
  const auto values = bench.download(x, begin * n, rows * n);
  for (int64_t i : {int64_t{0}, n / 3, n - 1})
    for (int64_t j : {int64_t{0}, i / 2, i}) {
      double sum = 0, magnitude = 0;
      for (int64_t t = 0; t < rows; ++t) {
        const double term = static_cast<double>(values[t * n + i]) * values[t * n + j];
        sum += term;
        magnitude += std::abs(term);
      }
      const float got = bench.download(h, (matrix * n + i) * n + j, 1)[0];
      require(std::abs(got - sum) <= 1e-5 * magnitude,
              fmt::format("gram n = {}: h[{}][{}][{}] is {}, expected {}", n, matrix, i, j, got, sum));
    }
}

/// What one full-square cuBLAS product takes, the way peers would do it with bf16 inputs.
double square_gemm_seconds(CudaBench& bench, const Tensor& x, const Tensor& h, const std::vector<int64_t>& offsets,
                           int64_t n) {
  return bench.time(
      [&] {
        for (size_t e = 0; e + 1 < offsets.size(); ++e) {
          const auto* data = x.as<BFloat16>() + offsets[e] * n;
          require(cublasGemmEx(bench.blas(), CUBLAS_OP_N, CUBLAS_OP_T, static_cast<int>(n), static_cast<int>(n),
                               static_cast<int>(offsets[e + 1] - offsets[e]), &kOne, data, CUDA_R_16BF,
                               static_cast<int>(n), data, CUDA_R_16BF, static_cast<int>(n), &kOne,
                               h.as<float>() + static_cast<int64_t>(e) * n * n, CUDA_R_32F, static_cast<int>(n),
                               CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS,
                  "gram by cuBLAS");
        }
      },
      5);
}

void gram_case(CudaBench& bench, int64_t n, const std::vector<int64_t>& offsets, const std::string& shape) {
  const int64_t count = static_cast<int64_t>(offsets.size()) - 1;
  const Tensor x = bench.random(DType::bf16, {offsets.back(), n});
  const Tensor h = bench.zeros(DType::f32, {count, n, n});
  std::vector<int64_t> first = offsets;  // the first rows of each expert only, so that a check is short
  const int64_t checked = std::min<int64_t>(offsets[1], 3000);
  for (size_t e = 1; e < first.size(); ++e) first[e] = checked;
  bench.gpu().accumulate_gram(x.matrix(), h.stack(), first);
  check_gram(bench, x, h, 0, 0, checked, n);
  bench.gpu().zero(h.data(), h.bytes());
  bench.gpu().accumulate_gram(x.matrix(), h.stack(), offsets);
  const int64_t last_rows = offsets[count] - offsets[count - 1];
  if (last_rows * n <= int64_t{1} << 28) check_gram(bench, x, h, count - 1, offsets[count - 1], last_rows, n);
  const double work = 2.0 * static_cast<double>(offsets.back()) * static_cast<double>(n * n);
  const auto run = [&] { bench.gpu().accumulate_gram(x.matrix(), h.stack(), offsets); };
  bench.report("gram", shape, bench.time(run), work, "TFLOP/s", bench.bf16_rate,
               square_gemm_seconds(bench, x, h, offsets, n), "square GEMM");
  setenv("SHARDQ_GRAM", "portable", 1);
  bench.report("gram, cuBLAS", shape, bench.time(run, 5), work, "TFLOP/s", bench.bf16_rate);
  unsetenv("SHARDQ_GRAM");
}

}  // namespace

void bench_gram(CudaBench& bench) {
  for (const auto& [n, tokens] :
       {std::pair<int64_t, int64_t>{768, 131072}, {2048, 131072}, {4096, 131072}, {14336, 32768}})
    gram_case(bench, n, {0, tokens}, fmt::format("{} tokens, n = {}", tokens, n));
  for (const auto& [n, mean] : {std::pair<int64_t, int64_t>{2048, 8192}, {2048, 1024}, {768, 8192}, {768, 1024}})
    gram_case(bench, n, ragged_offsets(128, mean), fmt::format("128 experts, about {} tokens each, n = {}", mean, n));
}

void bench_gram_accuracy(CudaBench& bench) {
  // Against double precision by cuBLAS. The offset makes all products positive on average: the case where lost low bits
  // add up.
  const int64_t n = 256, tokens = 1048576, chunk = 65536;
  const Tensor x = bench.random(DType::bf16, {tokens, n}, 1.0f, 0.5f);
  const Tensor exact = bench.zeros(DType::f64, {n, n});
  const double one = 1.0;
  for (int64_t t = 0; t < tokens; t += chunk) {
    const auto values = bench.download(x, t * n, chunk * n);
    const std::vector<double> wide(values.begin(), values.end());
    const Tensor part(bench.gpu(), DType::f64, {chunk, n}, "rows in double");
    bench.gpu().upload(part.data(), wide.data(), part.bytes());
    require(cublasDgemm(bench.blas(), CUBLAS_OP_N, CUBLAS_OP_T, n, n, chunk, &one, part.as<double>(), n,
                        part.as<double>(), n, &one, exact.as<double>(), n) == CUBLAS_STATUS_SUCCESS,
            "Dgemm");
  }
  std::vector<double> want(static_cast<size_t>(n * n));
  bench.gpu().download(want.data(), exact.data(), exact.bytes());
  for (int64_t rows : {int64_t{4096}, int64_t{16384}, int64_t{131072}, tokens}) {
    const Tensor h = bench.zeros(DType::f32, {n, n});
    for (int64_t t = 0; t < tokens; t += rows)
      bench.gpu().accumulate_gram(x.matrix(), h.stack(), std::vector<int64_t>{t, t + rows});
    const auto got = bench.download(h, 0, n * n);
    double worst = 0, squares = 0, norm = 0, diagonal = 0;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const double error = got[i * n + j] - want[i * n + j];
        worst = std::max(worst, std::abs(error) / std::sqrt(want[i * n + i] * want[j * n + j]));
        squares += error * error;
        norm += want[i * n + j] * want[i * n + j];
        if (i == j) diagonal += error / want[i * n + i] / n;
      }
    bench.note(
        "gram accuracy", fmt::format("{} tokens in calls of {}", tokens, rows),
        {{"relative_frobenius", std::sqrt(squares / norm)}, {"worst_element", worst}, {"mean_diagonal", diagonal}});
    require(std::sqrt(squares / norm) <= 1e-4, "gram sums are off");
  }
}

void bench_linear(CudaBench& bench) {
  struct Case {
    int64_t tokens, out, in;
  };
  for (const auto& [tokens, out, in] :
       {Case{16384, 6144, 4096}, {16384, 28672, 4096}, {16384, 4096, 14336}, {65536, 128, 2048}}) {
    const Tensor x = bench.random(DType::bf16, {tokens, in}), w = bench.random(DType::bf16, {out, in}, 0.02f),
                 y(bench.gpu(), DType::bf16, {tokens, out}, "y");
    const double seconds = bench.time([&] { bench.gpu().linear(x.matrix(), w.matrix(), nullptr, y.matrix(), false); });
    bench.report("linear", fmt::format("[{}, {}] x [{}, {}]^T", tokens, in, out, in), seconds,
                 2.0 * static_cast<double>(tokens) * static_cast<double>(out * in), "TFLOP/s", bench.bf16_rate);
  }
  for (const auto& [mean, out, in] :
       {Case{8192, 1536, 2048}, {8192, 2048, 768}, {1024, 1536, 2048}, {1024, 2048, 768}, {128, 1536, 2048}}) {
    const auto offsets = ragged_offsets(128, mean);
    const Tensor x = bench.random(DType::bf16, {offsets.back(), in}),
                 w = bench.random(DType::bf16, {128, out, in}, 0.02f),
                 y(bench.gpu(), DType::bf16, {offsets.back(), out}, "y");
    bench.gpu().linear_stack(x.matrix(), w.stack(), offsets, y.matrix());
    for (int64_t e : {0, 77, 127}) {  // one row of some experts against double
      const int64_t row = offsets[e + 1] - 1;
      const auto xr = bench.download(x, row * in, in), we = bench.download(w, e * out * in, out * in),
                 yr = bench.download(y, row * out, out);
      for (int64_t o = 0; o < out; ++o) {
        double sum = 0, magnitude = 0;
        for (int64_t i = 0; i < in; ++i) {
          sum += static_cast<double>(xr[i]) * we[o * in + i];
          magnitude += std::abs(static_cast<double>(xr[i]) * we[o * in + i]);
        }
        require(std::abs(yr[o] - sum) <= 0x1p-8 * std::abs(sum) + 1e-5 * magnitude,
                fmt::format("linear_stack: expert {} output {} is {}, expected {}", e, o, yr[o], sum));
      }
    }
    const double seconds = bench.time([&] { bench.gpu().linear_stack(x.matrix(), w.stack(), offsets, y.matrix()); });
    // The library where all experts have equally many tokens: one strided batch.
    const double equal = bench.time([&, out = out, in = in, mean = mean] {
      require(cublasGemmStridedBatchedEx(bench.blas(), CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(out),
                                         static_cast<int>(mean), static_cast<int>(in), &kOne, w.data(), CUDA_R_16BF,
                                         static_cast<int>(in), out * in, x.data(), CUDA_R_16BF, static_cast<int>(in),
                                         mean * in, &kNothing, y.data(), CUDA_R_16BF, static_cast<int>(out), mean * out,
                                         128, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS,
              "strided batch");
    });
    bench.report("linear_stack", fmt::format("128 experts, about {} tokens, [{}, {}]", mean, out, in), seconds,
                 2.0 * static_cast<double>(offsets.back()) * static_cast<double>(out * in), "TFLOP/s", bench.bf16_rate,
                 equal, "equal counts, strided");
  }
}

}  // namespace shardq::bench
