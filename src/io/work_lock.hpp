#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

namespace shardq {

/// Who holds a work directory, as written in its lock file.
struct LockOwner {
  std::string host, boot, job;  ///< job: SLURM_JOB_ID, empty outside Slurm
  int64_t pid = 0;
  uint64_t process_start = 0;  ///< clock ticks since boot: tells a process from a later one with its pid
  uint64_t beat = 0;           ///< counts up while the owner lives

  static LockOwner self();
  /// "process 123 on node7 (job 42)".
  std::string description() const;
  bool operator==(const LockOwner&) const = default;
};

/// Exclusive use of a work directory, from construction to destruction, by an flock on `<directory>/lock`: the kernel,
/// or the NFS server, drops it when its owner dies, so that a dead owner never stands in the way. The file stays
/// behind, empty.
///
/// Some cluster file systems keep flocks to the node that took them, or have none. So the lock file also says who the
/// owner is and carries a beat that the owner renews. An flock that was had over the record of another host is believed
/// only if that beat stands still for three periods (compared with itself, so that clocks need not agree), or if the
/// record is of our own job, of which Slurm runs one incarnation at a time. Not covered: two jobs that start in the
/// same moment on a file system without flocks.
class WorkLock {
 public:
  /// Errors: Error(usage) naming the live owner; Error(disk) where the file cannot be opened or written.
  explicit WorkLock(const std::filesystem::path& directory, std::chrono::milliseconds beat = std::chrono::seconds(5));
  ~WorkLock();
  WorkLock(const WorkLock&) = delete;
  WorkLock& operator=(const WorkLock&) = delete;

 private:
  void take();
  bool try_flock();
  bool owner_lives(const LockOwner& owner, bool flocked) const;
  void write_record();
  void keep_beating();

  std::filesystem::path directory_, path_;
  std::chrono::milliseconds beat_;
  int fd_ = -1;
  LockOwner owner_ = LockOwner::self();
  std::mutex mutex_;
  std::condition_variable released_;
  bool stop_ = false;
  std::thread beater_;
};

}  // namespace shardq
