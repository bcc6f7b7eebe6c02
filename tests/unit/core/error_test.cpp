#include "core/error.hpp"

#include <gtest/gtest.h>

#include "core/timer.hpp"

namespace shardq {
namespace {

TEST(Error, CarriesItsExitCodeAndMessage) {
  try {
    fail(ExitCode::disk, "expected {} found {}", 3, "x");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::disk);
    EXPECT_STREQ(error.what(), "expected 3 found x");
  }
}

TEST(Error, CheckEvaluatesItsConditionOnceAndItsArgumentsOnlyOnFailure) {
  int conditions = 0, arguments = 0;
  const auto condition = [&](bool result) {
    ++conditions;
    return result;
  };
  const auto argument = [&] { return ++arguments; };
  SHARDQ_CHECK(condition(true), ExitCode::input, "{}", argument());
  EXPECT_EQ(conditions, 1);
  EXPECT_EQ(arguments, 0);
  EXPECT_THROW(SHARDQ_CHECK(condition(false), ExitCode::input, "{}", argument()), Error);
  EXPECT_EQ(conditions, 2);
  EXPECT_EQ(arguments, 1);
}

// Scripts and job files rely on these numbers.
TEST(Error, ExitCodesAreFixed) {
  EXPECT_EQ(static_cast<int>(ExitCode::usage), 2);
  EXPECT_EQ(static_cast<int>(ExitCode::input), 3);
  EXPECT_EQ(static_cast<int>(ExitCode::disk), 4);
  EXPECT_EQ(static_cast<int>(ExitCode::fallbacks), 5);
  EXPECT_EQ(static_cast<int>(ExitCode::internal), 77);
  EXPECT_EQ(static_cast<int>(ExitCode::stopped), 85);
  EXPECT_EQ(static_cast<int>(ExitCode::stalled), 87);
}

TEST(Timer, PhasesAddUpUnderException) {
  PhaseSeconds seconds;
  { PhaseTimer timer(seconds, "a"); }
  try {
    PhaseTimer timer(seconds, "b");
    fail(ExitCode::internal, "x");
  } catch (const Error&) {
  }
  { PhaseTimer timer(seconds, "a"); }
  ASSERT_EQ(seconds.size(), 2u);
  EXPECT_GE(seconds["a"], 0);
  EXPECT_LT(seconds["a"], 5);
  EXPECT_GE(seconds["b"], 0);
}

}  // namespace
}  // namespace shardq
