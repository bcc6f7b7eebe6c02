// A job in which something goes wrong at step 3, for comm_faults.sh: comm_faults CASE [PID_DIR]. Deadlines are short:
// silence 3 s, no progress 8 s.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <thread>

#include "comm/communicator.hpp"

namespace {
using namespace shardq;

constexpr double kProgressSeconds = 8, kSilenceSeconds = 3;
constexpr int kFaultyRank = 1, kFaultyStep = 3;

void work(double seconds, bool reporting) {
  for (double done = 0; done < seconds; done += 0.1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (reporting) report_progress("forward");
  }
}

void go_wrong(const std::string& fault, Communicator& comm) {
  if (fault == "stop") raise(SIGSTOP);
  if (fault == "kill") raise(SIGKILL);
  if (fault == "exit") ::_exit(0);
  if (fault == "abort") abort_job(77);
  if (fault == "slow") work(2.5 * kProgressSeconds, true);
  if (fault == "stuck") {
    report_progress("solve");
    work(100 * kProgressSeconds, false);
  }
  if (fault == "schedule") comm.broadcast(nullptr, 0, 0);  // moves nothing, so only a comparison shows it
  if (fault == "mismatch") comm.barrier();                 // one collective more than the others make
}

int run(const std::string& fault, Communicator& comm) {
  const bool suspended = fault == "suspend";  // from outside: long enough to be hit
  for (int step = 0; step < (suspended ? 60 : 6); ++step) {
    if (comm.rank() == kFaultyRank && step == kFaultyStep) go_wrong(fault, comm);
    agree(comm, [&] {
      if (fault == "throw" && comm.rank() == kFaultyRank && step == kFaultyStep)
        fail(ExitCode::input, "shard 7 is truncated");
    });
    double sum = 1;
    comm.all_reduce_sum(&sum, 1);
    if (suspended) work(0.1, true);
    check_schedule(comm, "step");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string fault = argc > 1 ? argv[1] : "none";
  try {
    auto comm = make_host_communicator(&argc, &argv);
    start_watchdog(comm->rank(), kProgressSeconds, kSilenceSeconds);
    if (argc > 2) std::ofstream(fmt::format("{}/{}", argv[2], comm->rank())) << ::getpid() << "\n";
    try {
      const int code = run(fault, *comm);
      if (comm->rank() == 0) std::printf("finished\n");
      finish_communication();
      return code;
    } catch (const AgreedError& error) {
      if (comm->rank() == 0) std::fprintf(stderr, "error: %s\n", error.what());
      finish_communication();
      return static_cast<int>(error.code());
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    abort_job(static_cast<int>(error.code()));
  }
}
