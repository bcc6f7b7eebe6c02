// The solver's operations on the CUDA backend at production shapes, and whole layers with their phases.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>

#include "cuda_bench.hpp"
#include "quant/solver.hpp"

namespace shardq::bench {
namespace {

using nlohmann::json;

/// Normalised Gram matrices of random tokens, `ratio` tokens a column.
Tensor hessians(CudaBench& bench, int64_t count, int64_t n, double ratio) {
  const auto tokens = static_cast<int64_t>(static_cast<double>(n) * ratio);
  const Tensor x = bench.random(DType::bf16, {tokens, n}, 1.0f, 0.1f);
  Tensor h = bench.zeros(DType::f32, {count, n, n});
  for (int64_t e = 0; e < count; ++e)
    bench.gpu().accumulate_gram(x.matrix(), as_stack(h.stack()[e]), std::vector<int64_t>{0, tokens});
  const std::vector<float> scale(static_cast<size_t>(count), 1.0f / static_cast<float>(tokens));
  bench.gpu().scale_and_blend(h.stack(), scale, {}, {});
  return h;
}

Tensor random_order(CudaBench& bench, int64_t count, int64_t n) {
  std::vector<int32_t> order;
  std::mt19937 random(5);
  for (int64_t e = 0; e < count; ++e) {
    std::vector<int32_t> one(static_cast<size_t>(n));
    std::iota(one.begin(), one.end(), 0);
    std::shuffle(one.begin(), one.end(), random);
    order.insert(order.end(), one.begin(), one.end());
  }
  Tensor tensor(bench.gpu(), DType::i32, {count, n}, "order");
  bench.gpu().upload(tensor.data(), order.data(), tensor.bytes());
  return tensor;
}

std::vector<int64_t> all_of(int64_t count) {
  std::vector<int64_t> which(static_cast<size_t>(count));
  std::iota(which.begin(), which.end(), 0);
  return which;
}

void factor_case(CudaBench& bench, int64_t count, int64_t n, bool ordered) {
  const Tensor h = hessians(bench, count, n, 1.25), order = random_order(bench, count, n),
               factor(bench.gpu(), DType::f32, {count, n, n}, "factor"),
               pivots(bench.gpu(), DType::f32, {count, n}, "pivots");
  const std::vector<float> damping(static_cast<size_t>(count), 0.01f);
  std::vector<int> status(static_cast<size_t>(count));
  const auto which = all_of(count);
  const auto run = [&] {
    bench.gpu().factorize(h.stack(), ordered ? order.as<int32_t>() : nullptr, which, damping, factor.stack(),
                          pivots.as<float>(), status);
  };
  run();
  require(std::all_of(status.begin(), status.end(), [](int s) { return s == 0; }),
          "a Hessian was not positive definite");
  // The last row and column of R R^T have one term: R(n-1, n-1)^2 and R(k, n-1) R(n-1, n-1).
  const auto permutation = [&](int64_t i) {
    int32_t at = static_cast<int32_t>(i);
    if (ordered) bench.gpu().download(&at, order.as<int32_t>() + i, sizeof(at));
    return int64_t{at};
  };
  const float pivot = bench.download(pivots, n - 1, 1)[0];
  for (int64_t k : {int64_t{0}, n / 2, n - 1}) {
    const int64_t a = std::max(permutation(n - 1), permutation(k)), b = std::min(permutation(n - 1), permutation(k));
    const double want = bench.download(h, a * n + b, 1)[0] + (a == b ? 0.01 : 0.0);
    const double got =
        k == n - 1 ? double{pivot} * pivot : double{bench.download(factor, (n - 1) * n + k, 1)[0]} * pivot * pivot;
    require(std::abs(got - want) <= 1e-4,
            fmt::format("factor of {}: element ({}, {}) gives {}, expected {}", n, n - 1, k, got, want));
  }
  const double operations = static_cast<double>(count) * static_cast<double>(n) * n * n / 3;
  const double own = bench.time(run, 5);
  setenv("SHARDQ_FACTOR", "library", 1);
  const double library = bench.time(run, 5);
  unsetenv("SHARDQ_FACTOR");
  bench.report("factorize", fmt::format("{} x {}{}", count, n, ordered ? ", ordered" : ""), own, operations, "TFLOP/s",
               bench.f32_rate, library, "cuSOLVER");
}

/// A layer's stack of weights with scales and a factor, and one pass of the column loop over it.
struct LoopShape {
  const char* name;
  int64_t count, rows, cols;
};
constexpr LoopShape kShapes[] = {{"Qwen3-30B-A3B gate/up", 128, 1536, 2048}, {"Qwen3-30B-A3B down", 128, 2048, 768},
                                 {"Llama-3-8B q/k/v", 1, 6144, 4096},        {"Llama-3-8B o", 1, 4096, 4096},
                                 {"Llama-3-8B gate/up", 1, 28672, 4096},     {"Llama-3-8B down", 1, 4096, 14336}};

void loop_case(CudaBench& bench, const LoopShape& s, bool ordered) {
  constexpr int64_t kGroup = 128, kBlock = 128;
  Backend& gpu = bench.gpu();
  const int64_t groups = s.cols / kGroup;
  const Grid grid;
  const Tensor w = bench.random(DType::bf16, {s.count, s.rows, s.cols}, 0.02f),
               factor = bench.random(DType::f32, {s.count, s.cols, s.cols}, 0.01f),
               order = random_order(bench, s.count, s.cols),
               pivots = bench.random(DType::f32, {s.count, s.cols}, 0.1f, 1.0f),
               scales(gpu, DType::f32, {s.count, s.rows, groups}, "scales"),
               codes(gpu, DType::i8, {s.count, s.rows, s.cols}, "codes"),
               residual(gpu, DType::f32, {s.count, s.rows, s.cols}, "residual"),
               shifted(gpu, DType::f32, {s.count, s.rows, kBlock}, "block"),
               losses = bench.zeros(DType::f32, {s.count, s.rows});
  gpu.find_scales(w.stack(), nullptr, 0, 2.0f, grid, kGroup, scales.as<float>(), nullptr);
  const int32_t* by = ordered ? order.as<int32_t>() : nullptr;
  const auto pass = [&](bool load, bool update, bool loop) {
    for (int64_t begin = 0; begin < s.cols; begin += kBlock) {
      const int64_t end = begin + kBlock;
      if (load) gpu.load_columns(w.stack(), begin, shifted.stack());
      if (update && begin > 0)
        gpu.block_update(residual.stack().col_range(0, begin), factor.stack().row_range(begin, end).col_range(0, begin),
                         shifted.stack());
      if (loop)
        gpu.gptq_block({.shifted = shifted.stack(),
                        .weight = w.stack(),
                        .order = by,
                        .factor = factor.stack(),
                        .pivots = pivots.as<float>(),
                        .begin = begin,
                        .scales = scales.as<float>(),
                        .group_size = kGroup,
                        .groups = groups,
                        .grid = grid,
                        .codes = codes.as<int8_t>(),
                        .residual = residual.stack(),
                        .losses = losses.as<float>()});
    }
  };
  pass(true, true, true);
  const double weights = static_cast<double>(s.count) * static_cast<double>(s.rows * s.cols);
  const std::string shape =
      fmt::format("{} {} x [{}, {}]{}", s.name, s.count, s.rows, s.cols, ordered ? ", ordered" : "");
  // Bytes that must move: shifted and weight in, residual and codes out.
  bench.report("gptq_block", shape, bench.time([&] { pass(false, false, true); }, 5), weights * 11, "TB/s",
               bench.copy_rate);
  bench.report("load_columns", shape, bench.time([&] { pass(true, false, false); }, 5), weights * 6, "TB/s",
               bench.copy_rate);
  if (!ordered) {
    const auto updates = [&] { pass(false, true, false); };
    const double work = weights * static_cast<double>(s.cols - kBlock);
    const double own = bench.time(updates, 5);
    setenv("SHARDQ_UPDATE", "library", 1);
    const double library = bench.time(updates, 5);
    unsetenv("SHARDQ_UPDATE");
    bench.report("block_update", shape, own, work, "TFLOP/s", bench.f32_rate, library, "cuBLAS fp32");
  } else {
    const Tensor target(gpu, DType::bf16, {s.count, s.rows, s.cols}, "permuted");
    bench.report("permute_columns", shape,
                 bench.time([&] { gpu.permute_columns(w.stack(), by, false, target.stack()); }, 5), weights * 4, "TB/s",
                 bench.copy_rate);
    StackView back = codes.stack();
    const Tensor other(gpu, DType::i8, {s.count, s.rows, s.cols}, "codes");
    bench.report("permute, codes", shape, bench.time([&] { gpu.permute_columns(back, by, true, other.stack()); }, 5),
                 weights * 2, "TB/s", bench.copy_rate);
  }
  const double all = bench.time([&] { pass(true, true, true); }, 5);
  bench.note("loop and updates", shape, {{"ms", all * 1e3}});
}

/// solve() on random weights and Hessians: seconds by phase.
json solve_case(CudaBench& bench, int64_t count, int64_t rows, int64_t cols, int64_t hessian_count,
                const QuantScheme& scheme) {
  const Tensor w = bench.random(DType::bf16, {count, rows, cols}, 0.02f);
  const int64_t tokens = cols * 2;
  PhaseSeconds seconds;
  double total = 0, loss = 0, rtn = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {  // the first one makes handles and fills the memory pool
    const Tensor h = hessians(bench, hessian_count, cols, 2.0);
    HessianStack hessian{h.stack(), std::vector<int64_t>(static_cast<size_t>(hessian_count), tokens)};
    // solve() expects sums.
    bench.gpu().scale_and_blend(
        h.stack(), std::vector<float>(static_cast<size_t>(hessian_count), static_cast<float>(tokens)), {}, {});
    MatrixNames names(static_cast<size_t>(count), "matrix");
    seconds.clear();
    bench.gpu().synchronize();
    const Stopwatch watch;
    const Quantized result = solve(bench.gpu(), w.stack(), hessian, {}, 0, scheme, {}, names, seconds);
    bench.gpu().synchronize();
    total = watch.seconds();
    loss = rtn = 0;
    for (const MatrixOutcome& outcome : result.outcomes)
      require(outcome.verdict == Verdict::gptq, "a matrix was not solved");
    for (size_t i = 0; i < result.losses.size(); ++i)
      if (result.rtn_losses[i] >= 0) loss += result.losses[i], rtn += result.rtn_losses[i];
  }
  require(loss < rtn, fmt::format("the solve lost {} where rounding loses {}", loss, rtn));
  json phases{{"total_ms", total * 1e3}, {"loss_over_rtn", loss / rtn}};
  for (const auto& [name, value] : seconds) phases[name + "_ms"] = value * 1e3;
  return phases;
}

}  // namespace

void bench_factorize(CudaBench& bench) {
  for (bool ordered : {false, true}) {
    factor_case(bench, 128, 2048, ordered);
    factor_case(bench, 128, 768, ordered);
    factor_case(bench, 16, 2048, ordered);
    factor_case(bench, 16, 4096, ordered);
    factor_case(bench, 1, 4096, ordered);
    factor_case(bench, 1, 14336, ordered);
  }
}

void bench_loop(CudaBench& bench) {
  for (const LoopShape& shape : kShapes)
    for (bool ordered : {false, true}) loop_case(bench, shape, ordered);
}

void bench_rounding(CudaBench& bench) {
  Backend& gpu = bench.gpu();
  const int64_t count = 128, rows = 1536, cols = 2048, group = 128, groups = cols / group;
  const double weights = static_cast<double>(count) * static_cast<double>(rows * cols);
  const Tensor w = bench.random(DType::bf16, {count, rows, cols}, 0.02f),
               out(gpu, DType::bf16, {count, rows, cols}, "out"),
               importance = bench.random(DType::f32, {count, cols}, 0.1f, 1.0f),
               scales(gpu, DType::f32, {count, rows, groups}, "scales"),
               zeros(gpu, DType::i8, {count, rows, groups}, "zeros"),
               codes(gpu, DType::i8, {count, rows, cols}, "codes");
  for (bool symmetric : {true, false}) {
    const Grid grid{.bits = 4, .symmetric = symmetric};
    for (int steps : {0, 20}) {
      const double seconds = bench.time([&] {
        gpu.find_scales(w.stack(), importance.as<float>(), steps, 2.0f, grid, group, scales.as<float>(),
                        symmetric ? nullptr : zeros.as<int8_t>());
      });
      bench.report("find_scales",
                   fmt::format("128 x [1536, 2048], {} steps, {}", steps, symmetric ? "symmetric" : "asymmetric"),
                   seconds, weights * 2, "TB/s", bench.copy_rate);
    }
  }
  const Grid grid;
  gpu.find_scales(w.stack(), nullptr, 0, 2.0f, grid, group, scales.as<float>(), nullptr);
  bench.report("round_to_nearest", "128 x [1536, 2048]", bench.time([&] {
    gpu.round_to_nearest(w.stack(), nullptr, scales.as<float>(), nullptr, group, grid, codes.as<int8_t>(), {});
  }),
               weights * 3, "TB/s", bench.copy_rate);
  const double seconds =
      bench.time([&] { gpu.dequantize(codes.as<int8_t>(), scales.as<float>(), nullptr, group, grid, out.stack()); });
  const auto got = bench.download(out, 12345678, 4096), original = bench.download(w, 12345678, 4096);
  for (size_t i = 0; i < got.size(); ++i)
    require(std::abs(got[i] - original[i]) <= 0.01f, "dequantized weights are not the weights");
  bench.report("dequantize", "128 x [1536, 2048]", seconds, weights * 3, "TB/s", bench.copy_rate);
  const Tensor h = bench.zeros(DType::f32, {64, cols, cols}),
               packed(gpu, DType::f32, {64, cols * (cols + 1) / 2}, "packed"),
               pool = bench.zeros(DType::f32, {cols, cols});
  const double triangles = 64.0 * static_cast<double>(cols * (cols + 1) / 2) * 4;
  bench.report("pack_lower", "64 x 2048", bench.time([&] { gpu.pack_lower(h.stack(), packed.as<float>()); }),
               2 * triangles, "TB/s", bench.copy_rate);
  bench.report("unpack_lower", "64 x 2048", bench.time([&] { gpu.unpack_lower(packed.as<float>(), h.stack()); }),
               2 * triangles, "TB/s", bench.copy_rate);
  bench.report("sum_stack", "64 x 2048", bench.time([&] { gpu.sum_stack(h.stack(), pool.matrix()); }), triangles,
               "TB/s", bench.copy_rate);
  const std::vector<float> own(64, 0.5f);
  bench.report("scale_and_blend", "64 x 2048",
               bench.time([&] { gpu.scale_and_blend(h.stack(), own, own, pool.matrix()); }), 2 * triangles, "TB/s",
               bench.copy_rate);
}

void bench_solve(CudaBench& bench) {
  for (Observer observer : {Observer::minmax, Observer::hessian}) {
    QuantScheme scheme = scheme_preset("W4A16");
    scheme.observer = observer;
    const char* with = observer == Observer::minmax ? "minmax" : "hessian";
    double qwen = 0, llama = 0;
    for (const LoopShape& s : kShapes) {
      const json phases = solve_case(bench, s.count, s.rows, s.cols, s.count, scheme);
      (s.count > 1 ? qwen : llama) += phases["total_ms"].get<double>();
      bench.note("solve", fmt::format("{}, {}", s.name, with), phases);
    }
    bench.note("solve", fmt::format("layers, {}", with), {{"qwen3_experts_ms", qwen}, {"llama_ms", llama}});
  }
}

}  // namespace shardq::bench
