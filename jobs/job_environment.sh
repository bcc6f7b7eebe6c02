# Sourced by the sbatch templates: environment of MPI, NCCL and UCX, and one function. What is commented out is for sites that need it.

# ---- threads ---------------------------------------------------------------------------------------
# The CPU parts (reading, packing, the CPU backend) use one OpenMP thread a core that the rank was given. Since Slurm 22.05 srun no
# longer takes --cpus-per-task over from the job.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# With GPUs the threads have little to do, and such as spin while they wait take cores from those that drive NCCL and MPI.
if command -v nvidia-smi >/dev/null; then export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}; fi

# ---- NCCL: traffic between GPUs --------------------------------------------------------------------
# NVLink multicast needs rights on the fabric manager that many sites do not give to jobs; its failure is a hang. shardq's messages are
# large, where rings reach the same speed.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}   # INFO shows rings, transports and why one was not taken
# The interface NCCL's ranks find each other over (bootstrap, and data where there is no InfiniBand). Needed where the default route
# is a management network; a leading = means exactly this name.
# export NCCL_SOCKET_IFNAME==ib0
# Which InfiniBand adapters carry data; by default all that are near a GPU.
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
# RoCE needs the GID that has an IPv4 address, often 3: see show_gids.
# export NCCL_IB_GID_INDEX=3
# A link that flaps: retry longer before NCCL gives up (then shardq ends with exit code 77).
# export NCCL_IB_TIMEOUT=22

# ---- MPI: control messages, and all traffic on the CPU backend --------------------------------------
# Open MPI takes UCX where it was built with it. UCX_NET_DEVICES restricts it to the fast adapter; UCX_TLS lists transports: without
# "cuda" among them, since shardq gives MPI host memory only.
# export OMPI_MCA_pml=ucx UCX_NET_DEVICES=mlx5_0:1 UCX_TLS=rc,sm,self
# UCX installs signal handlers for crashes by default; SIGTERM and SIGUSR1, which shardq handles, are not among them.
# Ethernet only: the TCP transport must take a network on which the nodes reach each other.
# export OMPI_MCA_btl_tcp_if_include=eth0

# The value of --work among shardq's arguments: where run_or_requeue.sh looks for progress.
job_work_directory() {
  local argument previous=''
  for argument in "$@"; do
    case $argument in --work=*) echo "${argument#--work=}"; return 0 ;; esac
    [ "$previous" = --work ] && { echo "$argument"; return 0; }
    previous=$argument
  done
  echo "the job's arguments lack --work DIR: without it a restart could not find the finished stages" >&2
  return 1
}
