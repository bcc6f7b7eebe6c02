#include "unit/io/io_testing.hpp"

namespace shardq::io_testing {
namespace {

// The helper that all bad-input tests rest on must itself be able to fail.
TEST(ErrorMismatch, AcceptsOnlyTheRightErrorInOneLine) {
  const auto good = [] { fail(ExitCode::input, "file x: expected 1 found 2"); };
  EXPECT_EQ(error_mismatch(ExitCode::input, {"file x", "found 2"}, good), "");
  EXPECT_NE(error_mismatch(ExitCode::disk, {}, good), "");
  EXPECT_NE(error_mismatch(ExitCode::input, {"file y"}, good), "");
  EXPECT_NE(error_mismatch(ExitCode::input, {}, [] {}), "");
  EXPECT_NE(error_mismatch(ExitCode::input, {}, [] { throw std::runtime_error("other"); }), "");
  EXPECT_NE(error_mismatch(ExitCode::input, {}, [] { fail(ExitCode::input, "two\nlines"); }), "");
  EXPECT_NE(error_mismatch(ExitCode::input, {}, [] { fail(ExitCode::input, "{}", std::string(5000, 'x')); }), "");
}

}  // namespace
}  // namespace shardq::io_testing
