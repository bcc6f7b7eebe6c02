#include "core/fault_point.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "core/timer.hpp"

namespace shardq {
namespace {

class FaultPoint : public testing::Test {
 protected:
  void TearDown() override { arm_faults("", 0); }
};

TEST_F(FaultPoint, OffByDefault) {
  EXPECT_FALSE(fault_point_detail::armed);
  EXPECT_NO_THROW(fault_point("anything"));
}

TEST_F(FaultPoint, ThrowsOnTheCountedVisitOnly) {
  arm_faults("throw@tap_done#3=4", 0);
  fault_point("tap_done");
  fault_point("other");
  fault_point("tap_done");
  try {
    fault_point("tap_done");
    FAIL() << "third visit did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::disk);
    EXPECT_STREQ(error.what(), "fault injected at tap_done");
  }
  EXPECT_NO_THROW(fault_point("tap_done"));
}

TEST_F(FaultPoint, StarMeansEveryVisitAndTheCodeDefaultsToInternal) {
  arm_faults("throw@x#*", 0);
  for (int visit = 0; visit < 3; ++visit) {
    try {
      fault_point("x");
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::internal);
    }
  }
}

TEST_F(FaultPoint, RankSelects) {
  arm_faults("throw@x,rank=1", 0);
  EXPECT_FALSE(fault_point_detail::armed);
  arm_faults("throw@x,rank=1", 1);
  EXPECT_THROW(fault_point("x"), Error);
}

TEST_F(FaultPoint, SeveralFaultsAtOnce) {
  arm_faults("throw@a;throw@b#2;", 0);
  EXPECT_THROW(fault_point("a"), Error);
  EXPECT_NO_THROW(fault_point("b"));
  EXPECT_THROW(fault_point("b"), Error);
}

TEST_F(FaultPoint, Sleeps) {
  arm_faults("sleep@x=0.05", 0);
  Stopwatch watch;
  fault_point("x");
  EXPECT_GE(watch.seconds(), 0.05);
  watch.reset();
  fault_point("x");
  EXPECT_LT(watch.seconds(), 0.05);
}

TEST_F(FaultPoint, KillsAndStops) {
  for (auto [specification, killed] : {std::pair{"kill@x#2", true}, {"stop@x", false}}) {
    const pid_t child = fork();
    if (child == 0) {
      arm_faults(specification, 0);
      fault_point("x");
      fault_point("x");
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, WUNTRACED);
    if (killed) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    } else {
      ASSERT_TRUE(WIFSTOPPED(status));
      kill(child, SIGCONT);
      waitpid(child, &status, 0);
      EXPECT_TRUE(WIFEXITED(status));
    }
  }
}

TEST_F(FaultPoint, CountsVisitsOfAllThreadsOnce) {
  arm_faults("throw@x#1000", 0);
  std::atomic<int> thrown{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int visit = 0; visit < 500; ++visit) {
        try {
          fault_point("x");
        } catch (const Error&) {
          ++thrown;
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(thrown, 1);
}

TEST_F(FaultPoint, EnvironmentArms) {
  setenv("SHARDQ_FAULT", "throw@x,rank=2", 1);
  arm_faults_from_environment(2);
  unsetenv("SHARDQ_FAULT");
  EXPECT_THROW(fault_point("x"), Error);
  arm_faults_from_environment(2);
  EXPECT_NO_THROW(fault_point("x"));
}

TEST_F(FaultPoint, MalformedSpecificationIsAUsageErrorThatQuotesIt) {
  for (const char* bad :
       {"explode@x", "kill", "kill@", "kill@x#0", "kill@x#a", "sleep@x=", "throw@x,node=1", "throw@x,rank="}) {
    try {
      arm_faults(bad, 0);
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find(bad), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace shardq
