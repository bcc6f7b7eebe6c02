// Edges of the solve: what cannot be solved, and what the verdicts, errors and codes then are.
#include <gtest/gtest.h>

#include <limits>

#include "core/error.hpp"
#include "gptq_reference.hpp"

namespace shardq::testing {
namespace {

const QuantScheme kScheme = scheme_of(4, 32, true, ActOrder::static_, Observer::hessian);

std::vector<int8_t> codes_of(const Solved& s, int64_t e) {
  const int64_t size = s.rows * s.cols;
  return {s.codes.begin() + e * size, s.codes.begin() + (e + 1) * size};
}

/// Codes of plain rounding under the scales that the solve chose.
std::vector<int8_t> rounded(const Problem& p, const Solved& s, int64_t e) {
  std::vector<int8_t> codes;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.cols; ++c)
      codes.push_back(static_cast<int8_t>(
          quantize_code(p.weights[(e * p.rows + r) * p.cols + c], s.scale(e, r, c), s.zero(e, r, c), s.scheme.grid)));
  return codes;
}

std::string error_of(const std::function<void()>& run, ExitCode code) {
  try {
    run();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

TEST(Verdicts, NamesRoundTrip) {
  for (Verdict v : {Verdict::gptq, Verdict::gptq_damped, Verdict::rtn, Verdict::rtn_few_tokens,
                    Verdict::rtn_not_positive_definite, Verdict::rtn_nonfinite}) {
    EXPECT_EQ(verdict_from_string(to_string(v)), v);
    EXPECT_EQ(is_fallback(v), to_string(v).starts_with("rtn:"));
  }
  EXPECT_EQ(to_string(Verdict::rtn_few_tokens), "rtn:few_tokens");
  EXPECT_THROW(verdict_from_string("gptq "), Error);
}

TEST(DeadColumns, AreRoundedWithoutCompensation) {
  Problem problem = make_problem({.rows = 24, .cols = 64, .tokens = 300, .seed = 41});
  for (int64_t t = 0; t < 300; ++t)
    for (int64_t c : {5, 17, 63}) problem.x[0][t * 64 + c] = 0;
  const Solved solved = run_solve(problem, {.scheme = kScheme});
  EXPECT_EQ(solved.outcomes[0].verdict, Verdict::gptq);
  EXPECT_EQ(solved.outcomes[0].dead_columns, 3);
  const std::vector<int8_t> plain = rounded(problem, solved, 0);
  for (int64_t r = 0; r < 24; ++r)
    for (int64_t c : {5, 17, 63}) EXPECT_EQ(solved.code(0, r, c), plain[r * 64 + c]);
  EXPECT_LT(worst_miss(reference_problem(problem, solved, 0), solved, 0), 1e-3);
}

TEST(DeadColumns, AllDeadIsPlainRounding) {
  const Problem problem = make_problem({.rows = 8, .cols = 32, .tokens = 100, .seed = 42});
  const Solved solved = run_solve(problem, {.scheme = kScheme}, std::vector<float>(32 * 32, 0.0f));
  EXPECT_EQ(solved.outcomes[0].verdict, Verdict::gptq);
  EXPECT_EQ(solved.outcomes[0].dead_columns, 32);
  EXPECT_EQ(solved.codes, rounded(problem, solved, 0));
}

/// Sums whose normalised matrix has one eigenvalue of -`depth` * mean diagonal; every other matrix of the stack is
/// sound.
std::vector<float> indefinite(const Problem& p, int64_t e, float depth) {
  std::vector<float> sums = p.sums();
  const int64_t n = p.cols;
  float* h = sums.data() + e * n * n;
  std::fill(h, h + n * n, 0.0f);
  const float tokens = static_cast<float>(p.tokens[e]);
  for (int64_t i = 0; i < n; ++i) h[i * n + i] = tokens;
  h[n] = tokens * (1 + depth);  // [[1, 1 + d], [1 + d, 1]]: eigenvalue -d
  return sums;
}

TEST(DampingLadder, RaisesDampingOfTheFailingMatrixOnly) {
  const Problem problem = make_problem({.count = 3, .rows = 16, .cols = 32, .tokens = 200, .seed = 43});
  const SolveRequest request{.scheme = kScheme};
  const Solved solved = run_solve(problem, request, indefinite(problem, 1, 0.05f));
  EXPECT_EQ(solved.outcomes[0].verdict, Verdict::gptq);
  EXPECT_EQ(solved.outcomes[1].verdict, Verdict::gptq_damped);
  EXPECT_NEAR(solved.outcomes[1].damping, 0.1, 1e-6);  // 0.01 fails, 0.1 holds
  EXPECT_EQ(solved.outcomes[2].verdict, Verdict::gptq);
  // The neighbours do not notice.
  const Solved sound = run_solve(problem, request);
  for (int64_t e : {0, 2}) EXPECT_EQ(codes_of(solved, e), codes_of(sound, e));
  EXPECT_LT(worst_miss(reference_problem(problem, solved, 1), solved, 1), 1e-3);
}

TEST(DampingLadder, EndsInRounding) {
  const Problem problem = make_problem({.count = 2, .rows = 16, .cols = 32, .tokens = 200, .seed = 44});
  SolveRequest request{.scheme = kScheme};
  const Solved solved = run_solve(problem, request, indefinite(problem, 0, 20.0f));
  EXPECT_EQ(solved.outcomes[0].verdict, Verdict::rtn_not_positive_definite);
  EXPECT_EQ(codes_of(solved, 0), rounded(problem, solved, 0));
  EXPECT_EQ(solved.outcomes[1].verdict, Verdict::gptq);
  request.options.damping_retries = 4;  // 0.01 * 10^4 = 100 > 20
  EXPECT_EQ(run_solve(problem, request, indefinite(problem, 0, 20.0f)).outcomes[0].verdict, Verdict::gptq_damped);
}

TEST(DampingLadder, ClimbsFromZero) {
  const Problem problem = make_problem({.rows = 8, .cols = 32, .tokens = 200, .seed = 45});
  SolveRequest request{.scheme = kScheme};
  request.options.damping_fraction = 0;
  EXPECT_EQ(run_solve(problem, request).outcomes[0].damping, 0);
  EXPECT_EQ(run_solve(problem, request, indefinite(problem, 0, 0.005f)).outcomes[0].verdict, Verdict::gptq_damped);
}

TEST(Nonfinite, IsAnErrorThatNamesTheMatrix) {
  const Problem problem = make_problem({.count = 2, .rows = 8, .cols = 32, .tokens = 200, .seed = 46});
  std::vector<float> sums = problem.sums();
  sums[32 * 32 + 3 * 32 + 3] = std::numeric_limits<float>::quiet_NaN();
  sums[32 * 32 + 9 * 32 + 9] = std::numeric_limits<float>::infinity();
  const std::string message = error_of([&] { run_solve(problem, {.scheme = kScheme}, sums); }, ExitCode::input);
  EXPECT_NE(message.find("matrix.1"), std::string::npos) << message;
  EXPECT_NE(message.find("2 of 32"), std::string::npos) << message;
  EXPECT_NE(message.find("first 3"), std::string::npos) << message;
  EXPECT_NE(message.find("200 tokens"), std::string::npos) << message;
}

TEST(Nonfinite, PolicyRtnRoundsThatMatrixAndKeepsThePoolOut) {
  const Problem problem = make_problem({.count = 2, .rows = 8, .cols = 32, .tokens = 200, .seed = 46});
  std::vector<float> sums = problem.sums();
  for (int64_t i = 3; i < 32; ++i) sums[i * 32 + 3] = std::numeric_limits<float>::quiet_NaN();
  SolveRequest request{.scheme = kScheme};
  request.options.nonfinite_is_error = false;
  request.pool.assign(32 * 32, 0.0f);
  for (size_t i = 0; i < request.pool.size(); ++i) request.pool[i] = sums[i] + sums[32 * 32 + i];
  request.pool_tokens = 400;
  const Solved solved = run_solve(problem, request, sums);
  EXPECT_EQ(solved.outcomes[0].verdict, Verdict::rtn_nonfinite);
  EXPECT_EQ(codes_of(solved, 0), rounded(problem, solved, 0));
  EXPECT_EQ(solved.outcomes[1].verdict, Verdict::gptq);
  EXPECT_EQ(codes_of(solved, 1), codes_of(run_solve(problem, {.scheme = kScheme}), 1));
}

TEST(FewTokens, AreRoundedUnlessThePoolHelps) {
  Problem problem = make_problem({.count = 3, .rows = 8, .cols = 32, .tokens = 200, .seed = 47});
  problem.tokens = {200, 63, 0};  // 2 * cols = 64
  SolveRequest request{.scheme = kScheme};
  const Solved alone = run_solve(problem, request);
  EXPECT_EQ(alone.outcomes[0].verdict, Verdict::gptq);
  EXPECT_EQ(alone.outcomes[1].verdict, Verdict::rtn_few_tokens);
  EXPECT_EQ(alone.outcomes[2].verdict, Verdict::rtn_few_tokens);
  EXPECT_EQ(alone.outcomes[1].tokens, 63);
  for (int64_t e : {1, 2}) {
    EXPECT_EQ(codes_of(alone, e), rounded(problem, alone, e));
    for (int64_t r = 0; r < 8; ++r) EXPECT_EQ(alone.losses[e * 8 + r], 0);
  }
  request.options.min_tokens = 63;
  EXPECT_EQ(run_solve(problem, request).outcomes[1].verdict, Verdict::gptq);
  request.options.min_tokens = 0;
  EXPECT_EQ(run_solve(problem, request).outcomes[2].verdict, Verdict::rtn_few_tokens);

  request = {.scheme = kScheme};
  const std::vector<float> sums = problem.sums();
  request.pool.assign(32 * 32, 0.0f);
  for (int64_t e = 0; e < 3; ++e)
    for (size_t i = 0; i < request.pool.size(); ++i) request.pool[i] += sums[e * 32 * 32 + i];
  request.pool_tokens = 263;
  const Solved pooled = run_solve(problem, request, sums);
  for (const MatrixOutcome& outcome : pooled.outcomes) EXPECT_EQ(outcome.verdict, Verdict::gptq);
}

TEST(Shrinkage, BlendsByTheFormula) {
  const int64_t n = 32;
  Problem problem = make_problem({.count = 2, .rows = 8, .cols = n, .tokens = 150, .seed = 48});
  problem.tokens = {150, 70};
  const std::vector<float> sums = problem.sums();
  SolveRequest request{.scheme = kScheme};
  request.options.kappa_factor = 3;
  request.pool.assign(n * n, 0.0f);
  for (int64_t i = 0; i < n * n; ++i) request.pool[i] = sums[i] + sums[n * n + i];
  request.pool_tokens = 220;
  const Solved solved = run_solve(problem, request, sums);
  const double kappa = 3.0 * n;
  for (int64_t e = 0; e < 2; ++e)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const double pool = request.pool[i * n + j] / 220.0, own = sums[e * n * n + i * n + j];
        const double expected = (own + kappa * pool) / (static_cast<double>(problem.tokens[e]) + kappa);
        const double size = (std::abs(own) + kappa * std::abs(pool)) / (static_cast<double>(problem.tokens[e]) + kappa);
        EXPECT_NEAR(solved.hessian[e * n * n + i * n + j], expected, 4 * std::pow(2.0, -24) * size);
      }
  request.options.kappa_factor = 0;  // off: the pool is not looked at
  EXPECT_EQ(run_solve(problem, request, sums).codes, run_solve(problem, {.scheme = kScheme}, sums).codes);
}

TEST(SharedHessian, EqualsOneHessianEach) {
  Problem problem = make_problem({.count = 3, .rows = 20, .cols = 64, .tokens = 300, .seed = 49});
  problem.x = {problem.x[0], problem.x[0], problem.x[0]};
  SolveRequest request{.scheme = kScheme};
  const Solved apart = run_solve(problem, request);
  request.shared = true;
  const Solved shared = run_solve(problem, request);
  ASSERT_EQ(shared.outcomes.size(), 3u);
  EXPECT_EQ(shared.outcomes[2].tokens, 300);
  EXPECT_EQ(shared.scales, apart.scales);
  EXPECT_LT(differing_share(shared.codes, apart.codes), 1e-3);
  EXPECT_LT(worst_miss(reference_problem(problem, shared, 2, true), shared, 2), 1e-3);
  int64_t sampled = 0;
  for (float loss : shared.rtn_losses) sampled += loss >= 0;
  EXPECT_GT(sampled, 0);
}

TEST(ScaleOverflow, OfHalfPrecisionIsAnError) {
  Problem problem = make_problem({.count = 2, .rows = 8, .cols = 64, .tokens = 200, .seed = 50});
  problem.weights[(8 + 5) * 64 + 40] = 1e6f;
  SolveRequest request{.scheme = kScheme};
  request.scheme.grid.scale_dtype = DType::f16;
  const std::string message = error_of([&] { run_solve(problem, request); }, ExitCode::input);
  EXPECT_NE(message.find("matrix.1 row 5 group 1"), std::string::npos) << message;
  request.scheme.grid.scale_dtype = DType::bf16;
  EXPECT_NO_THROW(run_solve(problem, request));
}

TEST(Groups, MustDivideTheColumns) {
  const Problem problem = make_problem({.rows = 4, .cols = 48, .tokens = 200, .seed = 51});
  const std::string message = error_of([&] { run_solve(problem, {.scheme = kScheme}); }, ExitCode::input);
  EXPECT_NE(message.find("32"), std::string::npos) << message;
  EXPECT_NE(message.find("48"), std::string::npos) << message;
}

TEST(ActOrder, SortsByDiagonalAndBreaksTiesByIndex) {
  const Problem problem = make_problem({.rows = 16, .cols = 32, .tokens = 200, .seed = 52});
  // All channels alike: the order is the identity, so both settings give the same bits.
  std::vector<float> sums(32 * 32, 60.0f);
  for (int64_t i = 0; i < 32; ++i) sums[i * 32 + i] = 200.0f;
  SolveRequest request{.scheme = kScheme};
  const Solved ordered = run_solve(problem, request, sums);
  request.scheme.actorder = ActOrder::none;
  EXPECT_EQ(ordered.codes, run_solve(problem, request, sums).codes);
  // Uneven channels: the first column to be quantized is the strongest one, and it is rounded as it stands.
  const Solved uneven = run_solve(problem, {.scheme = kScheme});
  const ReferenceProblem reference = reference_problem(problem, uneven, 0);
  EXPECT_NE(reference.column[0], 0);
  const std::vector<int8_t> plain = rounded(problem, uneven, 0);
  for (int64_t r = 0; r < 16; ++r)
    EXPECT_EQ(uneven.code(0, r, reference.column[0]), plain[r * 32 + reference.column[0]]);
}

TEST(EmptyStack, GivesEmptyResults) {
  Problem problem;
  problem.cols = 32;
  problem.count = 0;
  const Solved solved = run_solve(problem, {.scheme = kScheme});
  EXPECT_TRUE(solved.codes.empty());
  EXPECT_TRUE(solved.outcomes.empty());
}

}  // namespace
}  // namespace shardq::testing
