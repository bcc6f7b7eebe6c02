#include "io/work_lock.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "core/error.hpp"

namespace shardq {
namespace {
using nlohmann::json;

// Of one size, so that a beat overwrites it in place, within one sector.
constexpr size_t kRecordBytes = 512;

std::string first_line(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

/// Start time of a process (field 22 of its stat line); 0 when there is no such process.
uint64_t start_of_process(int64_t pid) {
  const std::string stat = first_line(fmt::format("/proc/{}/stat", pid).c_str());
  const size_t name_end = stat.rfind(')');  // the name may hold blanks and parentheses
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

std::string record_text(const LockOwner& owner) {
  const json record = {{"host", owner.host},
                       {"boot", owner.boot},
                       {"job", owner.job},
                       {"pid", owner.pid},
                       {"process_start", owner.process_start},
                       {"beat", owner.beat}};
  std::string text = record.dump(-1, ' ', false, json::error_handler_t::replace);
  text.resize(kRecordBytes - 1, ' ');
  return text + "\n";
}

/// Opened anew each time: on NFS that is what fetches another host's writes.
std::optional<LockOwner> read_record(const std::filesystem::path& path) {
  std::ifstream file(path);
  const json record = json::parse(file, nullptr, false);
  try {
    return LockOwner{record.at("host"), record.at("boot"),          record.at("job"),
                     record.at("pid"),  record.at("process_start"), record.at("beat")};
  } catch (const json::exception&) {
    return std::nullopt;  // empty after a clean end, or torn by a crash
  }
}
}  // namespace

LockOwner LockOwner::self() {
  LockOwner owner;
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  owner.host = std::string(host.data()).substr(0, 64);
  owner.boot = first_line("/proc/sys/kernel/random/boot_id");
  if (const char* job = std::getenv("SLURM_JOB_ID")) owner.job = std::string(job).substr(0, 32);
  owner.pid = ::getpid();
  owner.process_start = start_of_process(owner.pid);
  return owner;
}

std::string LockOwner::description() const {
  return fmt::format("process {} on {}{}", pid, host, job.empty() ? "" : fmt::format(" (job {})", job));
}

WorkLock::WorkLock(const std::filesystem::path& directory, std::chrono::milliseconds beat)
    : directory_(directory), path_(directory / "lock"), beat_(beat) {
  do fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) fail(ExitCode::disk, "cannot open lock {}: {}", path_.string(), std::strerror(errno));
  // Of a job that was just killed, rank 0 may take a moment to be gone; the restart must not be refused for that.
  constexpr std::chrono::seconds kPatience{3};
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  try {
    while (true) {
      try {
        take();
        break;
      } catch (const Error& error) {
        if (error.code() != ExitCode::usage || std::chrono::steady_clock::now() >= deadline) throw;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
    }
    write_record();
    beater_ = std::thread([this] { keep_beating(); });
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

/// Throws Error(usage) when somebody has the lock.
void WorkLock::take() {
  const bool flocked = try_flock();
  if (const auto owner = read_record(path_); owner && owner_lives(*owner, flocked))
    fail(ExitCode::usage, "work directory {} is in use by {}", directory_.string(), owner->description());
  else if (owner)
    spdlog::info("work directory {}: taking over the lock of {}, which is gone", directory_.string(),
                 owner->description());
}

WorkLock::~WorkLock() {
  {
    std::lock_guard guard(mutex_);
    stop_ = true;
  }
  released_.notify_all();
  beater_.join();
  [[maybe_unused]] const int result = ::ftruncate(fd_, 0);  // an empty record: nobody has to wait for our beat
  ::close(fd_);
}

/// True: had it. False: this file system has no flocks. Throws when somebody has it.
bool WorkLock::try_flock() {
  int result;
  do result = ::flock(fd_, LOCK_EX | LOCK_NB);
  while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  if (errno == EWOULDBLOCK) {
    const auto owner = read_record(path_);
    fail(ExitCode::usage, "work directory {} is in use by {}", directory_.string(),
         owner ? owner->description() : "another process");
  }
  if (errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK || errno == EINVAL) {
    spdlog::warn("{}: this file system has no locks ({}); relying on the record in the file", path_.string(),
                 std::strerror(errno));
    return false;
  }
  fail(ExitCode::disk, "cannot lock {}: {}", path_.string(), std::strerror(errno));
}

bool WorkLock::owner_lives(const LockOwner& owner, bool flocked) const {
  if (owner.host == owner_.host) {
    if (flocked || owner.boot != owner_.boot) return false;
    return start_of_process(owner.pid) == owner.process_start && owner.process_start != 0;
  }
  if (!owner.job.empty() && owner.job == owner_.job) return false;
  spdlog::info("work directory {}: its lock names {}; watching for {:.0f} s whether that is alive", directory_.string(),
               owner.description(), 3 * std::chrono::duration<double>(beat_).count());
  for (int period = 0; period < 3; ++period) {
    std::this_thread::sleep_for(beat_);
    const auto now = read_record(path_);
    if (now && *now != owner) return true;
  }
  return false;
}

void WorkLock::write_record() {
  const std::string text = record_text(owner_);
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = ::pwrite(fd_, text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(ExitCode::disk, "cannot write lock {}: {}", path_.string(), std::strerror(errno));
    done += static_cast<size_t>(written);
  }
  ::fdatasync(fd_);  // so that other hosts see it; of no consequence for ours, hence unchecked
}

void WorkLock::keep_beating() {
  std::unique_lock guard(mutex_);
  while (!released_.wait_for(guard, beat_, [this] { return stop_; })) {
    ++owner_.beat;
    try {
      write_record();
    } catch (const Error& error) {
      spdlog::warn("{}", error.what());  // the flock still holds
    }
  }
}

}  // namespace shardq
