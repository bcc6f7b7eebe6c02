#pragma once
#include <cstdint>
#include <string>

#include "core/timer.hpp"

namespace shardq {

/// One bar on rank 0 where stderr is a terminal, otherwise a plain line per layer or every 30 s. Work is counted in
/// arbitrary units.
class Progress {
 public:
  Progress(bool active, double total_units);
  /// Units done since the run began, of which `skipped` came from a former run and say nothing about speed.
  void show(double done_units, double skipped_units, const std::string& what);
  void finish();

 private:
  bool active_, terminal_;
  double total_;
  Stopwatch watch_, since_line_;
  bool shown_ = false;
};

/// "1 h 02 min", "3 min 05 s", "12 s".
std::string readable_seconds(double seconds);
/// "1.23 GB" (decimal units, as files are listed).
std::string readable_bytes(double bytes);

}  // namespace shardq
