// Matrix products of the CPU backend against plain OpenBLAS on the same shapes, and where the solve of a layer spends
// its time. Ours and the library's runs alternate, so that a busy machine slows both alike; ratios are of medians.
//
//   bench_cpu_kernels [--json FILE] [--seconds PER_CASE] [--clock wall|cpu]
//
// `--clock cpu` counts processor time: with OMP_NUM_THREADS=1 it compares on a machine that others use as well.
#include <cblas.h>
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/timer.hpp"
#include "kernels/backend.hpp"
#include "quant/solver.hpp"

namespace shardq {
namespace {

using nlohmann::json;

struct Settings {
  std::string json_path;
  double seconds = 2;
  bool cpu_clock = false;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double time_of(bool cpu_clock, const std::function<void()>& run) {
  const Stopwatch watch;
  const std::clock_t begin = std::clock();
  run();
  return cpu_clock ? static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC : watch.seconds();
}

struct Pair {
  double ours, plain;
};
Pair alternate(const Settings& settings, const std::function<void()>& ours, const std::function<void()>& plain) {
  ours(), plain();
  std::vector<double> a, b;
  const Stopwatch watch;
  while (a.size() < 5 || watch.seconds() < settings.seconds) {
    a.push_back(time_of(settings.cpu_clock, ours));
    b.push_back(time_of(settings.cpu_clock, plain));
  }
  return {median(a), median(b)};
}

/// bf16 tokens or weights and the same values as float.
struct Values {
  Tensor narrow;
  std::vector<float> wide;
};
Values random_values(Backend& backend, int64_t rows, int64_t cols, unsigned seed) {
  Values v{Tensor(backend, DType::bf16, {rows, cols}, "values"), std::vector<float>(static_cast<size_t>(rows * cols))};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < v.wide.size(); ++i) {
    v.narrow.as<BFloat16>()[i] = to_bf16(normal(random));
    v.wide[i] = to_float(v.narrow.as<BFloat16>()[i]);
  }
  return v;
}

void report(json& out, const std::string& name, const std::string& shape, double flops, Pair time) {
  fmt::print("{:<14} {:<26} {:>9.2f} ms {:>9.1f} GFLOP/s   OpenBLAS {:>9.1f} GFLOP/s   {:>5.1f} %\n", name, shape,
             1e3 * time.ours, flops / time.ours / 1e9, flops / time.plain / 1e9, 100 * time.plain / time.ours);
  out.push_back({{"name", name},
                 {"shape", shape},
                 {"ms", 1e3 * time.ours},
                 {"gflops", flops / time.ours / 1e9},
                 {"openblas_gflops", flops / time.plain / 1e9},
                 {"ratio", time.plain / time.ours}});
}

void check_close(const float* a, const float* b, int64_t n, double tolerance, const char* what) {
  for (int64_t i = 0; i < n; ++i)
    SHARDQ_CHECK(std::abs(a[i] - b[i]) <= tolerance, ExitCode::internal, "{}: element {} is {}, expected {}", what, i,
                 a[i], b[i]);
}

void bench_linear(Backend& backend, const Settings& settings, int64_t tokens, int64_t n, DType out_dtype, json& out) {
  const Values x = random_values(backend, tokens, n, 1), w = random_values(backend, n, n, 2);
  Tensor y(backend, out_dtype, {tokens, n}, "y");
  std::vector<float> plain_y(static_cast<size_t>(tokens * n));
  const int m = static_cast<int>(tokens), k = static_cast<int>(n);
  const auto ours = [&] { backend.linear(x.narrow.matrix(), w.narrow.matrix(), nullptr, y.matrix(), false); };
  const auto plain = [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, k, k, 1, x.wide.data(), k, w.wide.data(), k, 0,
                plain_y.data(), k);
  };
  ours(), plain();
  if (out_dtype == DType::f32)
    check_close(y.as<float>(), plain_y.data(), tokens * n, 1e-5 * static_cast<double>(n), "linear");
  report(out, out_dtype == DType::f32 ? "linear->f32" : "linear->bf16", fmt::format("{} x {} x {}", tokens, n, n),
         2.0 * tokens * n * n, alternate(settings, ours, plain));
}

void bench_gram(Backend& backend, const Settings& settings, int64_t tokens, int64_t n, json& out) {
  const Values x = random_values(backend, tokens, n, 3);
  Tensor h(backend, DType::f32, {1, n, n}, "h");
  backend.zero(h.data(), h.bytes());
  std::vector<float> plain_h(static_cast<size_t>(n * n));
  const std::vector<int64_t> offsets{0, tokens};
  const auto ours = [&] { backend.accumulate_gram(x.narrow.matrix(), h.stack(), offsets); };
  const auto plain = [&] {
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, static_cast<int>(n), static_cast<int>(tokens), 1, x.wide.data(),
                static_cast<int>(n), 1, plain_h.data(), static_cast<int>(n));
  };
  ours(), plain();
  for (int64_t i = 0; i < n; ++i)
    check_close(h.as<float>() + i * n, plain_h.data() + i * n, i + 1, 1e-5 * static_cast<double>(tokens), "gram");
  report(out, "gram", fmt::format("{} x {}", tokens, n), static_cast<double>(tokens) * n * (n + 1),
         alternate(settings, ours, plain));
}

void bench_expert_gram(Backend& backend, const Settings& settings, int64_t experts, int64_t tokens, int64_t n,
                       json& out) {
  const Values x = random_values(backend, tokens, n, 4);
  Tensor h(backend, DType::f32, {experts, n, n}, "h"), plain_h(backend, DType::f32, {experts, n, n}, "plain h");
  backend.zero(h.data(), h.bytes());
  backend.zero(plain_h.data(), plain_h.bytes());
  std::vector<int64_t> offsets{0};  // ragged: between a half and one and a half times the mean
  for (int64_t e = 1; e <= experts; ++e)
    offsets.push_back(e == experts ? tokens : tokens * e / experts + (e % 2 ? 1 : -1) * tokens / experts / 4);
  const auto ours = [&] { backend.accumulate_gram(x.narrow.matrix(), h.stack(), offsets); };
  const auto plain = [&] {
    for (int64_t e = 0; e < experts; ++e)
      cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, static_cast<int>(n),
                  static_cast<int>(offsets[e + 1] - offsets[e]), 1, x.wide.data() + offsets[e] * n, static_cast<int>(n),
                  1, plain_h.as<float>() + e * n * n, static_cast<int>(n));
  };
  report(out, "gram experts", fmt::format("{} x {} x {}", experts, tokens / experts, n),
         static_cast<double>(tokens) * n * (n + 1), alternate(settings, ours, plain));
}

/// Time of a solve by phase. "factor" and "update" are BLAS; "loop" is the sequential part.
void bench_solve(Backend& backend, const Settings& settings, int64_t n, json& out) {
  const Values w = random_values(backend, n, n, 5), x = random_values(backend, 2 * n, n, 6);
  Tensor sums(backend, DType::f32, {1, n, n}, "sums");
  QuantScheme scheme = scheme_preset("W4A16");
  std::map<std::string, std::vector<double>> laps;
  const Stopwatch watch;
  for (int run = 0; run < 3 || watch.seconds() < 2 * settings.seconds; ++run) {
    backend.zero(sums.data(), sums.bytes());
    backend.accumulate_gram(x.narrow.matrix(), sums.stack(), std::vector<int64_t>{0, 2 * n});
    PhaseSeconds seconds;
    const Stopwatch whole;
    solve(backend, w.narrow.stack(), {sums.stack(), {2 * n}}, {}, 0, scheme, {}, {"layer"}, seconds);
    if (run == 0) continue;
    laps["total"].push_back(whole.seconds());
    for (const auto& [phase, value] : seconds) laps[phase].push_back(value);
  }
  json entry{{"name", "solve"}, {"shape", fmt::format("{} x {}", n, n)}};
  fmt::print("solve          {} x {}, W4A16, act-order, hessian observer:", n, n);
  for (const auto& [phase, values] : laps) {
    fmt::print("  {} {:.1f} ms", phase, 1e3 * median(values));
    entry[phase + "_ms"] = 1e3 * median(values);
  }
  const double blas = median(laps["factor"]) + median(laps["update"]);
  fmt::print("\n               BLAS (factor + update) / loop = {:.2f}\n", blas / median(laps["loop"]));
  entry["blas_over_loop"] = blas / median(laps["loop"]);
  out.push_back(entry);
}

int run(const Settings& settings) {
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  fmt::print("{} threads, {}, {}\n", omp_get_max_threads(), openblas_get_config(), openblas_get_corename());
  json out = json::array();
  for (int64_t n : {512, 1024, 2048}) bench_linear(*backend, settings, 2048, n, DType::f32, out);
  for (int64_t n : {512, 1024, 2048}) bench_linear(*backend, settings, 2048, n, DType::bf16, out);
  for (int64_t n : {512, 1024, 2048}) bench_gram(*backend, settings, 4096, n, out);
  bench_expert_gram(*backend, settings, 32, 16384, 256, out);
  bench_expert_gram(*backend, settings, 32, 16384, 768, out);
  for (int64_t n : {512, 2048}) bench_solve(*backend, settings, n, out);
  if (!settings.json_path.empty())
    std::ofstream(settings.json_path) << json{{"threads", omp_get_max_threads()},
                                              {"clock", settings.cpu_clock ? "cpu (solve: wall)" : "wall"},
                                              {"openblas", openblas_get_config()},
                                              {"core", openblas_get_corename()},
                                              {"results", out}}
                                             .dump(1)
                                      << "\n";
  return 0;
}

}  // namespace
}  // namespace shardq

int main(int argc, char** argv) {
  shardq::Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--json" && !value.empty())
      settings.json_path = value;
    else if (flag == "--seconds" && !value.empty())
      settings.seconds = std::atof(value.c_str());
    else if (flag == "--clock" && (value == "wall" || value == "cpu"))
      settings.cpu_clock = value == "cpu";
    else {
      fmt::print(stderr, "{} {}: expected --json FILE, --seconds PER_CASE, --clock wall|cpu\n", flag, value);
      return 2;
    }
  }
  return shardq::run(settings);
}
