#include "comm/launcher.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/error.hpp"

namespace shardq {
namespace {

Launcher launcher_of(const std::map<std::string, std::string>& environment) {
  return detect_launcher([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launcher, NobodyMeansAlone) {
  EXPECT_EQ(launcher_of({}).name, "");
  // A batch script's own environment, and an allocation's: a program started there without srun is alone.
  EXPECT_EQ(launcher_of({{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}).name, "");
  EXPECT_EQ(launcher_of({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}).name, "");
}

TEST(Launcher, Srun) {
  const Launcher bare = launcher_of({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}});
  EXPECT_EQ(bare.name, "srun");
  EXPECT_EQ(bare.tasks, 4);
  EXPECT_FALSE(bare.speaks_mpi);
  EXPECT_TRUE(launcher_of({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"PMIX_RANK", "3"}}).speaks_mpi);
  EXPECT_TRUE(launcher_of({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"PMI_RANK", "3"}}).speaks_mpi);
}

TEST(Launcher, MpirunInsideAnAllocationCountsItsOwnTasks) {
  const Launcher launcher = launcher_of(
      {{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"PMIX_RANK", "0"}});
  EXPECT_EQ(launcher.name, "mpirun");
  EXPECT_EQ(launcher.tasks, 8);
}

TEST(Launcher, HydraAndBarePmix) {
  EXPECT_EQ(launcher_of({{"PMI_SIZE", "3"}, {"PMI_RANK", "1"}}).tasks, 3);
  EXPECT_EQ(launcher_of({{"PMIX_RANK", "1"}}).name, "PMI");
}

TEST(Launcher, ManySingletonsAreRefused) {
  const Launcher four{"srun", 4, true};
  EXPECT_NO_THROW(check_world_size(four, 4));
  EXPECT_NO_THROW(check_world_size(four, 2));  // another communicator layout is MPI's business
  EXPECT_NO_THROW(check_world_size({"srun", 1, true}, 1));
  try {
    check_world_size(four, 1);
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("srun started 4 tasks, but MPI sees 1"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace shardq
