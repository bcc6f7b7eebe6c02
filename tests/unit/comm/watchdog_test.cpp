#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "comm/watch.hpp"

namespace shardq {
namespace {

using std::chrono::milliseconds;

void sleep_for(int ms) {
  std::this_thread::sleep_for(milliseconds(ms));
}

/// Death tests fork; the watchdog is a thread.
class Watchdog : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override {
    stop_watchdog();
    watch_peers(nullptr);
  }
};

void wait_in_vain() {
  start_watchdog(3, 0.8);
  report_progress("factor");
  const WatchedWait wait("tap barrier");
  sleep_for(8000);
}

TEST_F(Watchdog, EndsAStalledWaitAndNamesIt) {
  EXPECT_EXIT(wait_in_vain(), ::testing::ExitedWithCode(87),
              "\\[rank 3\\] watchdog: stalled for .* s in tap barrier \\(collective 0\\): no rank has made progress");
}

void wait_for_silent_peer() {
  const auto peers = std::make_shared<PulseTable>(2);
  watch_peers(peers);
  start_watchdog(0, 60, 1.0);
  Pulse pulse;
  pulse.beat = 1;
  pulse.collective = 41;
  std::snprintf(pulse.doing.data(), pulse.doing.size(), "forward");
  peers->merge(&pulse, 1, 1);
  const WatchedCollective collective("all_reduce_sum");
  for (int i = 0; i < 80; ++i) {
    report_progress();  // others' progress does not excuse a silent peer
    sleep_for(100);
  }
}

TEST_F(Watchdog, NamesASilentPeer) {
  EXPECT_EXIT(wait_for_silent_peer(), ::testing::ExitedWithCode(87),
              "in all_reduce_sum \\(collective 1\\): rank 1 silent for 1\\.[0-9] s \\(last seen in 'forward', "
              "collective 41\\)");
}

TEST_F(Watchdog, SparesAWaitWhileThisRankProgresses) {
  start_watchdog(0, 0.8);
  const WatchedWait wait("writer");
  for (int i = 0; i < 20; ++i) {
    report_progress();
    sleep_for(100);
  }
}

TEST_F(Watchdog, SparesAWaitForASlowPeerThatProgresses) {
  const auto peers = std::make_shared<PulseTable>(2);
  watch_peers(peers);
  start_watchdog(0, 0.8);
  const WatchedWait wait("all_reduce_sum");
  for (int i = 1; i <= 20; ++i) {
    Pulse pulse;
    pulse.beat = pulse.progress = i;
    peers->merge(&pulse, 1, 1);
    sleep_for(100);
  }
}

TEST_F(Watchdog, LooksAtWaitsOnly) {
  start_watchdog(0, 0.6);
  sleep_for(1500);  // computing, however long, is no stall
  {
    const WatchedWait outer("outer");
    const WatchedWait inner("inner");
  }
  sleep_for(1000);
}

void wait_nested() {
  start_watchdog(0, 0.8);
  const WatchedWait outer("outer");
  for (int i = 0; i < 100; ++i) {
    const WatchedWait inner("inner");
    sleep_for(50);
  }
}

TEST_F(Watchdog, AnOuterWaitGoesOnAfterTheInner) {
  EXPECT_EXIT(wait_nested(), ::testing::ExitedWithCode(87), "watchdog: stalled");
}

void other_thread_waits() {
  start_watchdog(0, 0.8);
  std::thread waiter([] {
    const WatchedWait wait("background write");
    sleep_for(8000);
  });
  waiter.join();
}

TEST_F(Watchdog, SeesEveryThread) {
  EXPECT_EXIT(other_thread_waits(), ::testing::ExitedWithCode(87), "in background write");
}

TEST_F(Watchdog, ZeroTurnsItOffAndItCanRestart) {
  start_watchdog(0, 0);
  {
    const WatchedWait wait("x");
    sleep_for(700);
  }
  for (int i = 0; i < 3; ++i) start_watchdog(0, 30);
  stop_watchdog();
  stop_watchdog();
}

TEST(PulseTable, TakesNewerBeatsOnly) {
  PulseTable table(3);
  Pulse pulses[3];
  pulses[0].beat = 5;
  pulses[0].progress = 7;
  pulses[2].beat = 1;
  table.merge(pulses, 0, 3);
  Pulse stale;
  stale.beat = 4;
  stale.progress = 100;
  table.merge(&stale, 0, 1);
  const auto entries = table.snapshot();
  EXPECT_EQ(entries[0].pulse.beat, 5);
  EXPECT_EQ(entries[0].pulse.progress, 7);
  EXPECT_EQ(entries[1].pulse.beat, 0);
  EXPECT_EQ(entries[2].pulse.beat, 1);
}

TEST(OwnPulse, SaysWhereThisRankIs) {
  report_progress("loop");
  const Pulse before = own_pulse();
  EXPECT_STREQ(before.doing.data(), "loop");
  const WatchedCollective collective("broadcast");
  const Pulse inside = own_pulse();
  EXPECT_STREQ(inside.doing.data(), "broadcast");
  EXPECT_EQ(inside.collective, before.collective + 1);
  EXPECT_GT(inside.progress, before.progress);
}

}  // namespace
}  // namespace shardq
