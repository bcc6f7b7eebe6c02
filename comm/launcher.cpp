#include "comm/launcher.hpp"

#include <cstdlib>

#include "core/error.hpp"

namespace shardq {

Launcher detect_launcher(const std::function<const char*(const char*)>& get) {
  const auto number = [&](const char* name) {
    const char* value = get(name);
    return value ? std::atoi(value) : 0;
  };
  const bool pmix = get("PMIX_RANK") != nullptr;
  const bool pmi = get("PMI_RANK") != nullptr || get("PMI_FD") != nullptr;
  if (const int tasks = number("OMPI_COMM_WORLD_SIZE"); tasks > 0) return {"mpirun", tasks, true};
  if (get("SLURM_STEP_ID") != nullptr) {
    const int tasks = number("SLURM_STEP_NUM_TASKS");
    if (pmix || pmi || tasks > 1) return {"srun", tasks > 0 ? tasks : 1, pmix || pmi};
    return {};
  }
  if (const int tasks = number("PMI_SIZE"); tasks > 0) return {"PMI", tasks, true};
  if (pmix || pmi) return {"PMI", 1, true};
  return {};
}

Launcher detect_launcher() {
  return detect_launcher([](const char* name) -> const char* { return std::getenv(name); });
}

void check_world_size(const Launcher& launcher, int world_size) {
  SHARDQ_CHECK(world_size > 1 || launcher.tasks <= 1, ExitCode::usage,
               "{} started {} tasks, but MPI sees {}: each would do the whole job alone. Start with `srun --mpi=pmix` "
               "(see `srun "
               "--mpi=list`) or with the mpirun of the MPI library shardq was built with",
               launcher.name, launcher.tasks, world_size);
}

}  // namespace shardq
