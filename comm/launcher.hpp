#pragma once
#include <functional>
#include <string>

namespace shardq {

/// What the process environment says about who started us.
struct Launcher {
  std::string name;         ///< "mpirun", "PMI", "srun"; empty: started alone
  int tasks = 1;            ///< how many processes it says it started
  bool speaks_mpi = false;  ///< it left the wire-up information (PMIx or PMI) an MPI library needs
};

/// Reads the environment through `get` (name -> value or null), so that tests can bring their own.
///
/// mpirun's variables win over Slurm's: inside an sbatch allocation mpirun starts its daemons with srun, whose task
/// count is the number of nodes. SLURM_PROCID alone means nothing: a batch script has it too; only a step has
/// SLURM_STEP_ID.
Launcher detect_launcher(const std::function<const char*(const char*)>& get);
Launcher detect_launcher();

/// Refuses N independent processes under a launcher that started N > 1: each would do the whole job and overwrite the
/// others. Errors: Error(usage).
void check_world_size(const Launcher& launcher, int world_size);

}  // namespace shardq
