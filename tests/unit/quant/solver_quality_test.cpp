// What the codes are for: small output error. Losses, bounds, and GPTQ against rounding on tokens it has not seen.
#include <gtest/gtest.h>

#include "gptq_reference.hpp"

namespace shardq::testing {
namespace {

/// Mean over tokens and rows of the squared output error.
double output_error(const Problem& p, const Solved& s, const std::vector<float>& x) {
  const int64_t n = p.cols, tokens = static_cast<int64_t>(x.size()) / n;
  double sum = 0;
  std::vector<double> difference(static_cast<size_t>(n));
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t c = 0; c < n; ++c) difference[c] = p.weights[r * n + c] - s.value(0, r, c);
    for (int64_t t = 0; t < tokens; ++t) {
      double y = 0;
      for (int64_t c = 0; c < n; ++c) y += difference[c] * x[t * n + c];
      sum += y * y;
    }
  }
  return sum / static_cast<double>(tokens * p.rows);
}

Solved plain_rounding(const Problem& p, const QuantScheme& scheme) {
  SolveRequest request{.scheme = scheme};
  request.scheme.method = Method::rtn;
  return run_solve(p, request);
}

TEST(Quality, HalvesTheErrorOfRoundingOnHeldOutTokens) {
  const Problem problem = make_problem({.rows = 32, .cols = 128, .tokens = 2048, .correlation = 0.9, .seed = 61});
  const std::vector<float> held_out = correlated_tokens(1024, 128, 0.9, 999);
  for (Observer observer : {Observer::minmax, Observer::mse, Observer::hessian}) {
    const QuantScheme scheme = scheme_of(3, 128, true, ActOrder::none, observer);
    const double gptq = output_error(problem, run_solve(problem, {.scheme = scheme}), held_out);
    const double rtn = output_error(problem, plain_rounding(problem, scheme), held_out);
    EXPECT_LT(gptq, 0.6 * rtn);
    EXPECT_GT(gptq, 0.05 * rtn);  // better than that would mean that the test leaks
  }
}

TEST(Quality, SearchedScalesBeatMinmax) {
  const Problem problem = make_problem({.rows = 64, .cols = 128, .tokens = 1024, .seed = 62});
  const auto error = [&](Observer observer) {
    return output_error(problem, run_solve(problem, {.scheme = scheme_of(2, 32, true, ActOrder::static_, observer)}),
                        problem.x[0]);
  };
  EXPECT_LT(error(Observer::hessian), error(Observer::minmax));
  EXPECT_LT(error(Observer::mse), error(Observer::minmax));
}

TEST(Losses, AreTheQuadraticFormUnderTheDampedHessian) {
  for (ActOrder order : {ActOrder::none, ActOrder::static_}) {
    const int64_t n = 96, rows = 20;
    const Problem problem = make_problem({.rows = rows, .cols = n, .tokens = 300, .seed = 63});
    const Solved solved = run_solve(problem, {.scheme = scheme_of(3, 32, true, order, Observer::hessian)});
    const auto h = [&](int64_t i, int64_t j) {
      return solved.hessian[std::max(i, j) * n + std::min(i, j)] + (i == j ? solved.outcomes[0].damping : 0.0);
    };
    for (int64_t r = 0; r < rows; ++r) {
      double expected = 0;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j)
          expected += (problem.weights[r * n + i] - solved.value(0, r, i)) * h(i, j) *
                      (problem.weights[r * n + j] - solved.value(0, r, j));
      EXPECT_NEAR(solved.losses[r], expected, 1e-4 * expected);
    }
  }
}

TEST(Losses, OfPlainRoundingAreSampledOnEvenlySpacedRows) {
  const int64_t n = 64, rows = 50;
  const Problem problem = make_problem({.count = 2, .rows = rows, .cols = n, .tokens = 300, .seed = 64});
  SolveRequest request{.scheme = scheme_of(4, 32, false, ActOrder::static_, Observer::hessian)};
  request.options.loss_sample_rows = 12;
  const Solved solved = run_solve(problem, request);
  for (int64_t e = 0; e < 2; ++e)
    for (int64_t r = 0; r < rows; ++r) {
      const float loss = solved.rtn_losses[e * rows + r];
      if (r % 4 != 0 || r / 4 >= 12) {
        EXPECT_EQ(loss, -1) << r;
        continue;
      }
      double expected = 0;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) {
          const auto d = [&](int64_t c) {
            const float w = problem.weights[(e * rows + r) * n + c];
            const int code = quantize_code(w, solved.scale(e, r, c), solved.zero(e, r, c), request.scheme.grid);
            return static_cast<double>(w) -
                   dequantize_code(code, solved.scale(e, r, c), solved.zero(e, r, c), DType::bf16);
          };
          const double h = solved.hessian[e * n * n + std::max(i, j) * n + std::min(i, j)] +
                           (i == j ? solved.outcomes[e].damping : 0.0);
          expected += d(i) * h * d(j);
        }
      EXPECT_NEAR(loss, expected, 1e-4 * expected);
      EXPECT_LT(solved.losses[e * rows + r], 1.5 * loss);
    }
}

TEST(Losses, StayBelowTheNoClipBound) {
  // Rows in which compensation pushes a weight off the grid are not bounded and are left out; many rows must remain.
  const int64_t n = 64, rows = 40;
  const Problem problem = make_problem({.rows = rows, .cols = n, .tokens = 300, .correlation = 0.5, .seed = 65});
  const Solved solved = run_solve(problem, {.scheme = scheme_of(8, 32)});
  const ReferenceProblem reference = reference_problem(problem, solved, 0);
  const ReferenceFactor factor = reversed_cholesky(reference.hessian, n);
  const std::vector<double> shifted = shifted_weights(reference, solved, 0);
  int64_t judged = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double bound = 0;
    bool clipped = false;
    for (int64_t j = 0; j < n; ++j) {
      const double scale = reference.scales[r * n + j];
      // Dequantization rounds to bf16: up to 2^-9 of the value comes on top of half a step.
      const double worst = scale / 2 + std::abs(solved.value(0, r, j)) * std::pow(2.0, -9);
      bound += worst * worst * factor.pivots[j] * factor.pivots[j];
      clipped |= std::abs(shifted[r * n + j] / scale + 0.5) > 128;
    }
    if (clipped) continue;
    ++judged;
    EXPECT_LE(solved.losses[r], bound * (1 + 1e-4));
  }
  EXPECT_GT(judged, rows / 4);
}

TEST(Dequantize, GivesTheValueThatTheSolverUsed) {
  const Problem problem = make_problem({.rows = 24, .cols = 64, .tokens = 200, .seed = 66});
  const std::unique_ptr<Backend> backend = make_cpu_backend();
  for (bool symmetric : {true, false}) {
    const Solved s = run_solve(problem, {.scheme = scheme_of(4, 16, symmetric, ActOrder::static_, Observer::hessian)});
    Tensor w(*backend, DType::bf16, {1, 24, 64}, "w");
    backend->dequantize(s.codes.data(), s.scales.data(), s.zeros.empty() ? nullptr : s.zeros.data(), 16, s.scheme.grid,
                        w.stack());
    for (int64_t r = 0; r < 24; ++r)
      for (int64_t c = 0; c < 64; ++c) {
        const float product = static_cast<float>(s.code(0, r, c) - s.zero(0, r, c)) * s.scale(0, r, c);
        EXPECT_EQ(w.as<BFloat16>()[r * 64 + c].bits, to_bf16(product).bits);
      }
  }
}

}  // namespace
}  // namespace shardq::testing
