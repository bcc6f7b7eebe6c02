#pragma once
#include <atomic>
#include <string>
#include <string_view>

namespace shardq {

/// Named places where a test can make this process die, freeze, fail or wait. Compiled in always, because what is
/// tested should be what is shipped; off unless the environment arms them, and then a visit costs one relaxed load.
///
/// SHARDQ_FAULT holds faults separated by ';', each  ACTION@POINT[#VISIT][=VALUE][,rank=R]:
///   kill@stage_committed#3,rank=1   SIGKILL to itself on the third visit, on rank 1 only
///   stop@tap_done                   SIGSTOP (a frozen rank)
///   term@safe_point#8               SIGTERM to itself, as Slurm sends it
///   throw@stage_written=4           Error with that exit code (default 77)
///   oom@forward                     OutOfMemory
///   sleep@tap_done#*=0.5            that many seconds (default 1), on every visit
/// VISIT counts from 1 (default 1); '*' is every visit. Without rank, every rank.
namespace fault_point_detail {
extern std::atomic<bool> armed;
void visit(std::string_view name);
}  // namespace fault_point_detail

/// A place of that name is reached. Threads may visit at the same time.
inline void fault_point(std::string_view name) {
  if (fault_point_detail::armed.load(std::memory_order_relaxed)) fault_point_detail::visit(name);
}

/// Replaces what is armed and starts counting anew; an empty specification disarms. Error(usage) quoting a malformed
/// one.
void arm_faults(const std::string& specification, int rank);
/// arm_faults with $SHARDQ_FAULT; call once when the rank is known.
void arm_faults_from_environment(int rank);

}  // namespace shardq
