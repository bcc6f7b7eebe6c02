#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <thread>

#include "comm/schedule.hpp"
#include "comm/watch.hpp"

namespace shardq {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kTick{250};
constexpr int64_t kLongestTick = 1000;  // anything longer is time this process did not run
constexpr milliseconds kAbortGrace{10'000};

/// The guarded wait of one thread. The registry below holds it while the thread lives.
struct WaitSlot {
  std::atomic<const char*> name{nullptr};
  std::atomic<int64_t> since{0};
};

/// Everything the watchdog looks at. Never destroyed: threads may outlive main's statics.
struct WatchState {
  std::atomic<int64_t> clock{0};
  std::atomic<int64_t> progress{0};
  std::atomic<int64_t> collectives{0};
  std::atomic<const char*> doing{"start"};

  std::mutex mutex;  // guards what follows
  std::vector<WaitSlot*> slots;
  std::shared_ptr<const PulseTable> peers;
  std::thread thread;
  std::condition_variable wake;
  bool stop = false;
};

WatchState& state() {
  static auto* instance = new WatchState;
  return *instance;
}

class SlotOwner {
 public:
  SlotOwner() {
    std::lock_guard lock(state().mutex);
    state().slots.push_back(&slot_);
  }
  ~SlotOwner() {
    std::lock_guard lock(state().mutex);
    std::erase(state().slots, &slot_);
  }
  WaitSlot& slot() { return slot_; }

 private:
  WaitSlot slot_;
};

WaitSlot& this_thread_slot() {
  thread_local SlotOwner owner;
  return owner.slot();
}

struct OldestWait {
  const char* name = nullptr;
  int64_t since = 0;
};

/// Requires: state().mutex held.
OldestWait oldest_wait() {
  OldestWait oldest;
  for (const WaitSlot* slot : state().slots) {
    const char* name = slot->name.load();
    const int64_t since = slot->since.load();
    if (name && (!oldest.name || since < oldest.since)) oldest = {name, since};
  }
  return oldest;
}

/// What one rank applies to its own waits; looked at by the watchdog thread only.
class Rules {
 public:
  Rules(int rank, int64_t deadline, int64_t silence) : rank_(rank), deadline_(deadline), silence_(silence) {}

  /// The line to end the job with, or nothing.
  std::string find_stall(const OldestWait& wait, const PulseTable* peers, int64_t now) {
    if (const int64_t progress = state().progress.load(); progress != own_progress_) {
      own_progress_ = progress;
      moved_ = now;
    }
    if (!wait.name) return {};
    const int64_t waited = now - wait.since;
    if (waited < std::min(silence_, deadline_)) return {};
    const auto entries = peers ? peers->snapshot() : std::vector<PulseTable::Entry>{};
    std::string silent;
    int64_t moved = moved_;
    for (int r = 0; r < static_cast<int>(entries.size()); ++r) {
      moved = std::max(moved, entries[r].moved);
      if (r != rank_ && now - entries[r].heard >= silence_)
        silent +=
            fmt::format("{}rank {} silent for {:.1f} s (last seen in '{}', collective {})", silent.empty() ? "" : ", ",
                        r, 1e-3 * (now - entries[r].heard), entries[r].pulse.doing.data(), entries[r].pulse.collective);
    }
    if (!silent.empty() && waited >= silence_) return describe(wait, waited) + silent;
    if (waited < deadline_ || now - moved < deadline_) return {};
    std::string still = fmt::format("no rank has made progress for {:.1f} s", 1e-3 * (now - moved));
    for (int r = 0; r < static_cast<int>(entries.size()) && r < 64; ++r)
      if (r != rank_)
        still += fmt::format("{} rank {} in '{}', collective {}", still.back() == 's' ? ";" : ",", r,
                             entries[r].pulse.doing.data(), entries[r].pulse.collective);
    return describe(wait, waited) + still;
  }

 private:
  std::string describe(const OldestWait& wait, int64_t waited) const {
    return fmt::format("stalled for {:.1f} s in {} (collective {}): ", 1e-3 * waited, wait.name,
                       state().collectives.load());
  }

  int rank_;
  int64_t deadline_, silence_;  // milliseconds
  int64_t own_progress_ = -1;
  int64_t moved_ = 0;  // watched time of this rank's last progress
};

/// MPI_Abort may itself wait for a peer that is gone, so it runs beside the exit that is certain.
[[noreturn]] void end_job(int rank, const std::string& stall) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  const std::string line =
      fmt::format("{:02}:{:02}:{:02} [rank {}] watchdog: {}; ending the job with exit code {}\n", local.tm_hour,
                  local.tm_min, local.tm_sec, rank, stall, static_cast<int>(ExitCode::stalled));
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  std::thread([] { abort_job(static_cast<int>(ExitCode::stalled)); }).detach();
  std::this_thread::sleep_for(kAbortGrace);
  ::_exit(static_cast<int>(ExitCode::stalled));
}

void watch(int rank, int64_t deadline, int64_t silence) {
  Rules rules(rank, deadline, silence);
  auto last = std::chrono::steady_clock::now();
  std::unique_lock lock(state().mutex);
  while (!state().wake.wait_for(lock, kTick, [] { return state().stop; })) {
    const auto current = std::chrono::steady_clock::now();
    const int64_t elapsed = std::chrono::duration_cast<milliseconds>(current - last).count();
    last += milliseconds(elapsed);
    const int64_t now = state().clock += std::min(elapsed, kLongestTick);
    const std::string stall = rules.find_stall(oldest_wait(), state().peers.get(), now);
    if (!stall.empty()) {
      lock.unlock();
      end_job(rank, stall);
    }
  }
}

}  // namespace

int64_t watched_milliseconds() {
  return state().clock.load();
}

Pulse own_pulse() {
  Pulse pulse;
  pulse.progress = state().progress.load();
  pulse.collective = state().collectives.load();
  const char* doing = state().doing.load();
  {
    std::lock_guard lock(state().mutex);
    if (const OldestWait wait = oldest_wait(); wait.name) doing = wait.name;
  }
  std::strncpy(pulse.doing.data(), doing, pulse.doing.size() - 1);
  return pulse;
}

PulseTable::PulseTable(int ranks) : entries_(ranks) {
  for (Entry& entry : entries_) entry.heard = entry.moved = watched_milliseconds();
}

void PulseTable::merge(const Pulse* pulses, int first_rank, int count) {
  const int64_t now = watched_milliseconds();
  std::lock_guard lock(mutex_);
  for (int i = 0; i < count; ++i) {
    Entry& entry = entries_[first_rank + i];
    if (pulses[i].beat <= entry.pulse.beat) continue;
    if (pulses[i].progress != entry.pulse.progress) entry.moved = now;
    entry.pulse = pulses[i];
    entry.heard = now;
  }
}

std::vector<PulseTable::Entry> PulseTable::snapshot() const {
  std::lock_guard lock(mutex_);
  return entries_;
}

void watch_peers(std::shared_ptr<const PulseTable> peers) {
  std::lock_guard lock(state().mutex);
  state().peers = std::move(peers);
}

WatchedCollective::WatchedCollective(const char* name, int64_t bytes)
    : wait_((++state().collectives, ++state().progress, name)) {
  own_schedule().add(name, bytes);
}

int64_t WatchedCollective::count() {
  return state().collectives.load();
}

void start_watchdog(int rank, double seconds, double silence_seconds) {
  stop_watchdog();
  if (!(seconds > 0)) return;
  const auto deadline = static_cast<int64_t>(seconds * 1000);
  const auto silence =
      silence_seconds > 0 ? std::min(deadline, static_cast<int64_t>(silence_seconds * 1000)) : deadline;
  {
    std::lock_guard lock(state().mutex);
    state().stop = false;
  }
  state().thread = std::thread(watch, rank, deadline, silence);
}

void stop_watchdog() {
  {
    std::lock_guard lock(state().mutex);
    state().stop = true;
  }
  state().wake.notify_all();
  if (state().thread.joinable()) state().thread.join();
}

void report_progress(const char* what) {
  ++state().progress;
  if (what) state().doing = what;
}

WatchedWait::WatchedWait(const char* name) {
  WaitSlot& slot = this_thread_slot();
  outer_ = slot.name.load();
  outer_since_ = slot.since.load();
  if (!outer_) slot.since = watched_milliseconds();  // within another region that one's time goes on
  slot.name = name;
}

WatchedWait::~WatchedWait() {
  WaitSlot& slot = this_thread_slot();
  slot.since = outer_since_;
  slot.name = outer_;
}

}  // namespace shardq
