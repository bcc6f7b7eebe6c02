#include "core/stop_signal.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace shardq {
namespace {

class StopSignal : public testing::Test {
 protected:
  void SetUp() override { install_stop_signals(); }
  void TearDown() override { remove_stop_signals(); }
};

TEST_F(StopSignal, NothingIsRequestedAtFirst) {
  EXPECT_FALSE(stop_requested());
  EXPECT_EQ(stop_signal_name(), "");
}

TEST_F(StopSignal, EachSignalIsNotedByName) {
  for (auto [signal, name] : {std::pair{SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}, {SIGINT, "SIGINT"}}) {
    raise(signal);
    EXPECT_TRUE(stop_requested());
    EXPECT_EQ(stop_signal_name(), name);
    remove_stop_signals();
    EXPECT_FALSE(stop_requested());
    install_stop_signals();
  }
}

TEST_F(StopSignal, FirstSignalKeepsItsName) {
  raise(SIGUSR1);
  raise(SIGTERM);
  raise(SIGTERM);  // Slurm sends it twice; that must not kill
  EXPECT_EQ(stop_signal_name(), "SIGUSR1");
}

TEST_F(StopSignal, InstallingTwiceKeepsTheFormerHandlers) {
  install_stop_signals();
  remove_stop_signals();
  struct sigaction now = {};
  sigaction(SIGTERM, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
}

int wait_status_of(void (*body)()) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST_F(StopSignal, SecondInterruptEndsTheProcess) {
  const int once = wait_status_of([] { raise(SIGINT); });
  EXPECT_TRUE(WIFEXITED(once) && WEXITSTATUS(once) == 0);
  const int twice = wait_status_of([] {
    raise(SIGINT);
    raise(SIGINT);
  });
  EXPECT_TRUE(WIFSIGNALED(twice) && WTERMSIG(twice) == SIGINT);
}

TEST_F(StopSignal, InterruptAfterTermIsStillOnlyTheFirstInterrupt) {
  const int status = wait_status_of([] {
    raise(SIGTERM);
    raise(SIGINT);
  });
  EXPECT_TRUE(WIFEXITED(status));
}

}  // namespace
}  // namespace shardq
