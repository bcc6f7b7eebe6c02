// The twin of mpi.cpp for builds without MPI: one process, and a refusal to be one of several.
#ifndef SHARDQ_WITH_MPI
#include <cstdlib>

#include "comm/communicator.hpp"
#include "comm/launcher.hpp"

namespace shardq {

std::unique_ptr<Communicator> make_host_communicator(int*, char***) {
  const Launcher launcher = detect_launcher();
  SHARDQ_CHECK(
      launcher.tasks <= 1, ExitCode::usage,
      "{} started {} tasks, but this shardq was built without MPI (SHARDQ_WITH_MPI=OFF) and runs as one process",
      launcher.name, launcher.tasks);
  return make_single_communicator();
}

int local_rank(Communicator&) {
  return 0;
}

void finish_communication() {}

void abort_job(int code) {
  std::_Exit(code);
}

}  // namespace shardq
#endif
