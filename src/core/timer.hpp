#pragma once
#include <chrono>
#include <map>
#include <string>

namespace shardq {

/// Wall-clock seconds since construction or reset (steady clock).
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  void reset() { start_ = std::chrono::steady_clock::now(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Seconds by phase name ("read", "forward", "hessian", "reduce", "factor", "loop", "update", "gather", "write",
/// "checkpoint").
using PhaseSeconds = std::map<std::string, double>;

/// Adds its lifetime to one phase, less that of timers within it on the same thread: every second counts once.
class PhaseTimer {
 public:
  PhaseTimer(PhaseSeconds& seconds, std::string phase)
      : seconds_(seconds), phase_(std::move(phase)), outer_(innermost) {
    innermost = this;
  }
  ~PhaseTimer() {
    const double lived = watch_.seconds();
    seconds_[phase_] += lived - within_;
    if (outer_) outer_->within_ += lived;
    innermost = outer_;
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  PhaseSeconds& seconds_;
  static inline thread_local PhaseTimer* innermost = nullptr;
  std::string phase_;
  Stopwatch watch_;
  PhaseTimer* outer_;
  double within_ = 0;  ///< seconds of timers inside this one
};

}  // namespace shardq
