#!/bin/bash
# Ranks on this machine under mpirun:
#   jobs/local.sh RANKS RECIPE.yaml [shardq's options]        e.g.  jobs/local.sh 2 configs/mini-moe.yaml --device cpu
#
# Ctrl-C (or SIGTERM to this script) once: every rank stores its state and leaves with exit code 85; the same command resumes.
# Twice: the job is ended at once; it resumes from the last committed stage.
# SHARDQ=path/to/shardq chooses the program; by default the build directory that has one.
set -u
[ $# -ge 2 ] || { echo "usage: local.sh RANKS RECIPE.yaml [options of shardq quantize]" >&2; exit 2; }
case $1 in '' | *[!0-9]* | 0) echo "local.sh: expected a number of ranks, found '$1'" >&2; exit 2 ;; esac
ranks=$1
shift
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=${SHARDQ:-}
for candidate in cuda cpu; do
  [ -n "$program" ] || [ ! -x "$home/build/$candidate/shardq" ] || program=$home/build/$candidate/shardq
done
[ -n "$program" ] || { echo "local.sh: no shardq below $home/build: build it first, or set SHARDQ" >&2; exit 2; }

# A rank's threads share the cores evenly; Open MPI must not tie a rank to one core (its default), nor refuse more ranks than cores.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
# With GPUs: threads that spin while they wait take cores from those that drive NCCL and MPI.
if command -v nvidia-smi >/dev/null; then export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}; fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1   # containers
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

# In a session of its own, so that the terminal's Ctrl-C reaches this script alone: mpirun would answer it with SIGKILL after a second.
# SIGUSR1 it passes on to the ranks.
setsid mpirun -n "$ranks" --oversubscribe --bind-to none "$program" quantize "$@" --resume auto &
job=$!
asked=0
stop() {
  asked=$((asked + 1))
  if [ $asked = 1 ]; then
    echo "local.sh: stopping; once more ends the job at once" >&2
    kill -USR1 $job 2>/dev/null
  else
    kill -TERM $job 2>/dev/null
  fi
}
trap stop INT TERM
code=0
while kill -0 $job 2>/dev/null; do   # a trapped signal interrupts wait
  wait $job
  code=$?
done
wait $job 2>/dev/null
last=$?
[ $last = 127 ] || code=$last
[ $code = 85 ] && echo "local.sh: stopped; the same command resumes" >&2
exit $code
