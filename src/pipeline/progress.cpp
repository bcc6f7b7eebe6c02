#include "pipeline/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace shardq {

std::string readable_seconds(double seconds) {
  const int64_t s = std::llround(seconds);
  if (seconds < 10) return fmt::format("{:.1f} s", seconds);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  return fmt::format("{} h {:02} min", s / 3600, s % 3600 / 60);
}

std::string readable_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  int unit = 0;
  while (bytes >= 1000 && unit < 5) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, units[unit]);
}

Progress::Progress(bool active, double total_units)
    : active_(active), terminal_(isatty(STDERR_FILENO)), total_(total_units) {}

void Progress::show(double done, double skipped, const std::string& what) {
  if (!active_) return;
  // A terminal is repainted at most ten times a second; a log file gets a line every 30 s.
  if (shown_ && since_line_.seconds() < (terminal_ ? 0.1 : 30.0) && done < total_) return;
  const double fraction = total_ > 0 ? std::min(1.0, done / total_) : 1.0;
  const double elapsed = watch_.seconds(), fresh = done - skipped;
  const std::string eta = fresh > 0 ? readable_seconds(elapsed * (total_ - done) / fresh) : "?";
  if (terminal_) {
    const int width = 24, filled = static_cast<int>(fraction * width);
    fmt::print(stderr, "\r\033[K[{}{}] {:3.0f} %  {}  ETA {}", std::string(filled, '#'),
               std::string(width - filled, '.'), 100 * fraction, what, eta);
  } else {
    fmt::print(stderr, "{:3.0f} %  {}  elapsed {}  ETA {}\n", 100 * fraction, what, readable_seconds(elapsed), eta);
  }
  std::fflush(stderr);
  shown_ = true;
  since_line_.reset();
}

void Progress::finish() {
  if (active_ && terminal_ && shown_) fmt::print(stderr, "\n");
}

}  // namespace shardq
