#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "core/timer.hpp"
#include "io/work_lock.hpp"
#include "unit/io/stage_store_fixture.hpp"

namespace shardq {
namespace {
namespace fs = std::filesystem;
using namespace std::chrono_literals;

class WorkLockTest : public testing::Test {
 protected:
  void SetUp() override { directory_ = make_test_folder(); }
  void TearDown() override { fs::remove_all(directory_); }

  void write_record(const LockOwner& owner) {
    const nlohmann::json record = {{"host", owner.host},
                                   {"boot", owner.boot},
                                   {"job", owner.job},
                                   {"pid", owner.pid},
                                   {"process_start", owner.process_start},
                                   {"beat", owner.beat}};
    put_file(directory_ / "lock", record.dump());
  }
  static LockOwner on_other_host(const std::string& job) {
    LockOwner owner = LockOwner::self();
    owner.host = "elsewhere";
    owner.job = job;
    return owner;
  }

  fs::path directory_;
};

TEST_F(WorkLockTest, ExcludesAndReleases) {
  {
    const WorkLock lock(directory_);
    expect_error([&] { WorkLock{directory_}; }, ExitCode::usage,
                 {directory_.string(), "in use", std::to_string(getpid())});
  }
  const WorkLock again(directory_);
}

TEST_F(WorkLockTest, ARecordOfThisHostWithoutAnFlockIsADeadOwners) {
  write_record(LockOwner::self());
  Stopwatch watch;
  const WorkLock lock(directory_, 1s);
  EXPECT_LT(watch.seconds(), 0.5);
}

TEST_F(WorkLockTest, AnUnreadableRecordIsNoOwner) {
  put_file(directory_ / "lock", "{\"host\": \"torn");
  const WorkLock lock(directory_);
}

TEST_F(WorkLockTest, ADeadOwnerOnAnotherHostIsTakenOverAfterItsBeatStoodStill) {
  write_record(on_other_host(""));
  Stopwatch watch;
  const WorkLock lock(directory_, 100ms);
  EXPECT_GE(watch.seconds(), 0.3);
}

TEST_F(WorkLockTest, ALivingOwnerOnAnotherHostIsRespectedEvenWithoutItsFlock) {
  LockOwner owner = on_other_host("12");
  write_record(owner);
  std::atomic<bool> stop{false};
  std::thread beating([&] {
    while (!stop) {
      std::this_thread::sleep_for(50ms);
      ++owner.beat;
      write_record(owner);
    }
  });
  expect_error([&] { WorkLock(directory_, 100ms); }, ExitCode::usage, {"in use", "elsewhere", "job 12"});
  stop = true;
  beating.join();
}

TEST_F(WorkLockTest, ARequeuedJobNeedNotWaitForItsFormerSelf) {
  setenv("SLURM_JOB_ID", "12", 1);
  write_record(on_other_host("12"));
  Stopwatch watch;
  { const WorkLock lock(directory_, 1s); }
  unsetenv("SLURM_JOB_ID");
  EXPECT_LT(watch.seconds(), 0.5);
}

TEST_F(WorkLockTest, TheOwnersBeatGoesOnWhileItLives) {
  const WorkLock lock(directory_, 20ms);
  const std::string first = file_text(directory_ / "lock");
  std::this_thread::sleep_for(100ms);
  const std::string later = file_text(directory_ / "lock");
  EXPECT_NE(first, later);
  EXPECT_EQ(first.size(), later.size());
}

TEST_F(WorkLockTest, AFolderThatCannotBeWrittenIsADiskError) {
  expect_error([&] { WorkLock{directory_ / "missing"}; }, ExitCode::disk, {"missing", "No such file"});
}

}  // namespace
}  // namespace shardq
