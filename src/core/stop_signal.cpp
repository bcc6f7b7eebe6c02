#include "core/stop_signal.hpp"

#include <signal.h>

#include <array>
#include <atomic>

namespace shardq {
namespace {
constexpr std::array<int, 3> kStopSignals = {SIGTERM, SIGUSR1, SIGINT};

std::atomic<int> first_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "signal handlers may touch lock-free atomics only");
volatile sig_atomic_t interrupts = 0;
bool installed = false;
std::array<struct sigaction, kStopSignals.size()> former;

extern "C" void note_stop_signal(int signal) {
  if (signal == SIGINT) {
    interrupts = interrupts + 1;
    if (interrupts >= 2) {
      // Default action, so that the shell sees a death by SIGINT; the signal is blocked here and fires on return.
      ::signal(SIGINT, SIG_DFL);
      ::raise(SIGINT);
      return;
    }
  }
  int none = 0;
  first_signal.compare_exchange_strong(none, signal, std::memory_order_relaxed);
}
}  // namespace

void install_stop_signals() {
  if (installed) return;
  struct sigaction action = {};
  action.sa_handler = note_stop_signal;
  action.sa_flags = SA_RESTART;  // reads and writes of libraries that do not expect EINTR go on
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kStopSignals.size(); ++i) sigaction(kStopSignals[i], &action, &former[i]);
  installed = true;
}

void remove_stop_signals() {
  if (!installed) return;
  for (size_t i = 0; i < kStopSignals.size(); ++i) sigaction(kStopSignals[i], &former[i], nullptr);
  installed = false;
  interrupts = 0;
  first_signal.store(0, std::memory_order_relaxed);
}

bool stop_requested() {
  return first_signal.load(std::memory_order_relaxed) != 0;
}

std::string_view stop_signal_name() {
  switch (first_signal.load(std::memory_order_relaxed)) {
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    case SIGINT:
      return "SIGINT";
    default:
      return "";
  }
}

}  // namespace shardq
