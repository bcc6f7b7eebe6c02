// The mathematics, in double precision: the inverse-free form that the backends implement gives the codes of GPTQ.
#include <gtest/gtest.h>

#include "gptq_reference.hpp"

namespace shardq::testing {
namespace {

struct FormCase {
  const char* name;
  ProblemShape shape;
  QuantScheme scheme;
};

class ReferenceForms : public ::testing::TestWithParam<FormCase> {
 protected:
  void SetUp() override {
    const Problem problem = make_problem(GetParam().shape);
    SolveRequest request{.scheme = GetParam().scheme};
    request.options.min_tokens = 0;
    reference_ = reference_problem(problem, run_solve(problem, request), 0);
  }
  ReferenceProblem reference_;
};

TEST_P(ReferenceForms, BlockSizesGiveIdenticalCodes) {
  const ReferenceCodes whole = inverse_free(reference_, reference_.cols);
  for (int64_t block : {1, 8, 128}) EXPECT_EQ(inverse_free(reference_, block).codes, whole.codes) << "block " << block;
}

TEST_P(ReferenceForms, EqualsTheThreeStepForm) {
  EXPECT_EQ(inverse_free(reference_, 128).codes, three_step(reference_, 128).codes);
}

TEST_P(ReferenceForms, EqualsTheExplicitObsUpdate) {
  const ReferenceCodes ours = inverse_free(reference_, 128), obs = explicit_obs(reference_);
  EXPECT_EQ(ours.codes, obs.codes);
  for (int64_t r = 0; r < reference_.rows; ++r) EXPECT_NEAR(ours.losses[r], obs.losses[r], 1e-9 * obs.losses[r]);
}

INSTANTIATE_TEST_SUITE_P(
    Layers, ReferenceForms,
    ::testing::Values(
        FormCase{"FullRank", {.rows = 256, .cols = 512, .tokens = 1024, .seed = 3}, scheme_of(4, 128)},
        FormCase{"RankDeficient", {.rows = 64, .cols = 256, .tokens = 100, .seed = 4}, scheme_of(3, 32)},
        FormCase{
            "Ordered", {.rows = 64, .cols = 192, .tokens = 400, .seed = 5}, scheme_of(4, 64, true, ActOrder::static_)},
        FormCase{"Asymmetric", {.rows = 64, .cols = 192, .tokens = 400, .seed = 6}, scheme_of(2, 16, false)}),
    [](const auto& info) { return info.param.name; });

// The comparison above means something only if it can fail: another order, or a factor of another H, gives other codes.
TEST(ReferenceFormsCanFail, OtherHessianOtherCodes) {
  const Problem problem = make_problem({.rows = 32, .cols = 64, .tokens = 256});
  const Solved solved = run_solve(problem, {.scheme = scheme_of(3, 64)});
  const ReferenceProblem right = reference_problem(problem, solved, 0);
  ReferenceProblem wrong = right;
  for (int64_t i = 0; i < 64; ++i) wrong.hessian[i * 64 + i] *= 1.2;
  EXPECT_GT(differing_share(inverse_free(right, 8).codes, inverse_free(wrong, 8).codes), 0.01);
}

}  // namespace
}  // namespace shardq::testing
