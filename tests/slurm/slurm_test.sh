#!/bin/bash
# slurm_test.sh PROGRAM [CASE...]: shardq as a job of a real Slurm with two "nodes", started for this test on this machine.
#
# The quick-start model is quantized by jobs/many_nodes.sbatch on 2 nodes x 2 ranks and must give byte for byte what mpirun -n 4 gives:
#   plain       undisturbed
#   time_limit  Slurm's warning before the time limit: stop, requeue, resume
#   preemption  a job of higher priority takes the nodes: stop, requeue, resume
#   lost_node   one node's processes die: the watchdog ends the job and names a silent rank; requeue, resume
#   cancel      scancel: stopped in order, not requeued; a new submission resumes
#   singletons  srun without PMIx: refused instead of four whole runs side by side
# Ends with 125 (skipped, said aloud) where Slurm cannot be had. Needs root. Set SLURM_TEST_KEEP=1 to keep the directory.
set -u
program=$(realpath "${1:?usage: slurm_test.sh PROGRAM [CASE...]}")
shift
cases=${*:-plain time_limit preemption lost_node cancel singletons}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
export PATH=$PATH:/usr/sbin:/sbin

skip() {
  echo "SKIPPED: the Slurm test did not run: $1"
  exit 125
}
[ "$(id -u)" = 0 ] || skip "it needs root to start its own Slurm (unshare)"
unshare --uts --mount true 2>/dev/null || skip "this machine does not allow namespaces (unshare)"
if ! command -v slurmctld slurmd munged srun mpirun >/dev/null; then
  command -v apt-get >/dev/null || skip "slurmctld, slurmd, munged or mpirun is missing, and there is no apt-get"
  echo "installing slurm-wlm and munge"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge openmpi-bin; } \
    >/tmp/slurm_test_install.log 2>&1 || skip "slurm-wlm and munge could not be installed, see /tmp/slurm_test_install.log"
fi
dir=$(mktemp -d /tmp/shardq_slurm.XXXXXX)
chmod 755 "$dir"  # munge wants its socket reachable
finish() {
  "$here/private_slurm.sh" stop "$dir/slurm"
  [ -n "${SLURM_TEST_KEEP:-}" ] || rm -rf --one-file-system "$dir"
}
trap finish EXIT
"$here/private_slurm.sh" start "$dir/slurm" 2 || { echo "FAILED: Slurm did not start"; exit 1; }
. "$dir/slurm/environment"
srun --mpi=list 2>&1 | grep -q pmix || skip "this Slurm has no PMIx plugin"
cd "$root"

# ---- what a run is -----------------------------------------------------------------------------------
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# tap_seconds: stages are waited for, and shards would take their place.
arguments=(configs/mini-moe.yaml --device cpu --set calibration.max_samples=32 --set checkpoint.tap_seconds=0)
paths() { echo --output "$dir/$1" --work "$dir/$1.work"; }
log() { echo "$dir/$1.log"; }

mpirun --oversubscribe --bind-to none -n 4 "$program" quantize "${arguments[@]}" $(paths reference) >"$(log reference)" 2>&1 ||
  { cat "$(log reference)"; echo "FAILED: the reference run under mpirun"; exit 1; }

failures=0
expect() {  # expect NAME TEXT COMMAND...: the command must succeed
  local name=$1 text=$2
  shift 2
  if "$@"; then echo "ok    $name: $text"; else echo "WRONG $name: $text"; failures=$((failures + 1)); fi
}
in_log() { grep -Eq -- "$2" "$(log "$1")"; }
not_in_log() { ! in_log "$@"; }
same_output() { diff -r "$dir/reference" "$dir/$1" >/dev/null 2>&1; }

# The job's program: before its first restart every safe point lasts $SLOW seconds longer, so that what is to hit the job hits it.
cat >"$dir/slow_at_first" <<SCRIPT
#!/bin/sh
[ "\${SLURM_RESTART_COUNT:-0}" != 0 ] || export SHARDQ_FAULT="sleep@safe_point#*=\${SLOW:-0}"
exec "$program" "\$@"
SCRIPT
chmod +x "$dir/slow_at_first"

# submit NAME [sbatch options]: the number of the job.
slow=0
submit() {
  local name=$1
  shift
  SHARDQ=$dir/slow_at_first SLOW=$slow SHARDQ_HOME=$root sbatch --parsable --chdir="$root" --output="$(log "$name")" --job-name="$name" \
    --gpus-per-node=0 --ntasks-per-node=2 --cpus-per-task=1 --time=20 "$@" jobs/many_nodes.sbatch "${arguments[@]}" $(paths "$name")
}
job_field() { scontrol --oneliner show job "$1" 2>/dev/null | grep -o " $2=[^ ]*" | head -1 | cut -d= -f2; }
# wait_until SECONDS COMMAND...
wait_until() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.3
  done
}
ended() { case $(job_field "$1" JobState) in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL | DEADLINE) true ;; *) false ;; esac; }
restarted() { [ "$(job_field "$1" Restarts)" -ge 1 ]; }
stages() { grep -o '"tap\|"name":"layer[0-9]*\.[a-z_]*"' "$dir/$1.work/manifest.json" 2>/dev/null | wc -l; }
has_stages() { [ "$(stages "$1")" -ge "$2" ]; }

# finished_like_reference NAME JOB
finished_like_reference() {
  expect "$1" "the job ends in time" wait_until 180 ended "$2"
  expect "$1" "it completed (found $(job_field "$2" JobState), exit code $(job_field "$2" ExitCode))" \
    test "$(job_field "$2" JobState)" = COMPLETED
  expect "$1" "the output equals mpirun's byte for byte" same_output "$1"
}

# ---- the cases ---------------------------------------------------------------------------------------
case_plain() {
  local job
  job=$(submit plain)
  finished_like_reference plain "$job"
  expect plain "it was never restarted" test "$(job_field "$job" Restarts)" = 0
}

case_time_limit() {
  local job
  # One minute of time, the warning 30 s before its end; slowed down, the run takes longer than that.
  slow=2
  job=$(submit time_limit --time=1 --signal=USR1@30)
  slow=0
  expect time_limit "the warning comes and the job is requeued" wait_until 120 restarted "$job"
  expect time_limit "the ranks stopped on SIGUSR1" in_log time_limit 'stopped on SIGUSR1 after'
  expect time_limit "exit code 85 led to the requeue" in_log time_limit 'run_or_requeue: ended with exit code 85'
  wait_until 400 ended "$job"
  finished_like_reference time_limit "$job"
  expect time_limit "it resumed from stored stages" in_log time_limit 'resuming: [1-9][0-9]* stages'
}

case_preemption() {
  local job urgent
  slow=1
  job=$(submit preemption)
  slow=0
  expect preemption "stages are committed" wait_until 60 has_stages preemption 2
  urgent=$(sbatch --parsable --partition=high --nodes=2 --exclusive --output=/dev/null --wrap='sleep 2')
  expect preemption "the urgent job gets the nodes" wait_until 60 ended "$urgent"
  expect preemption "the ranks stopped on SIGTERM" in_log preemption 'stopped on SIGTERM after'
  wait_until 200 ended "$job"
  finished_like_reference preemption "$job"
  expect preemption "it was restarted" restarted "$job"
  expect preemption "it resumed from stored stages" in_log preemption 'resuming: [1-9][0-9]* stages'
}

# Kills the processes of one node's step: slurmstepd and its ranks. What they leave behind stays.
kill_node() {  # kill_node JOB NODE
  local pid
  for pid in $(pgrep -f "slurmstepd: \[$1\.0\]"); do
    [ "$(nsenter --target "$pid" --uts hostname)" = "$2" ] || continue
    kill -9 $(pgrep -P "$pid") "$pid"
    return 0
  done
  return 1
}

case_lost_node() {
  local job start
  slow=1
  job=$(submit lost_node)
  slow=0
  expect lost_node "stages are committed" wait_until 60 has_stages lost_node 2
  expect lost_node "the processes of n1 are killed" kill_node "$job" n1
  start=$SECONDS
  expect lost_node "the watchdog speaks within 40 s" wait_until 40 in_log lost_node 'watchdog: stalled .* rank [23] silent for 2[0-9]'
  expect lost_node "no living rank is called silent" not_in_log lost_node 'rank [01] silent'
  expect lost_node "the job leaves with exit code 87 within 60 s" \
    wait_until $((60 - SECONDS + start)) in_log lost_node 'run_or_requeue: ended with exit code 87'
  wait_until 240 ended "$job"
  finished_like_reference lost_node "$job"
  expect lost_node "it resumed from stored stages" in_log lost_node 'resuming: [1-9][0-9]* stages'
}

case_cancel() {
  local job
  slow=1
  job=$(submit cancel)
  slow=0
  expect cancel "stages are committed" wait_until 60 has_stages cancel 2
  scancel "$job"
  expect cancel "the job ends" wait_until 30 ended "$job"
  sleep 3
  expect cancel "it is cancelled, not requeued (found $(job_field "$job" JobState))" test "$(job_field "$job" JobState)" = CANCELLED
  expect cancel "the ranks stopped in order" in_log cancel 'stopped on SIGTERM after'
  job=$(submit cancel)
  finished_like_reference cancel "$job"
}

case_singletons() {
  srun --mpi=none -N2 -n4 "$program" quantize "${arguments[@]}" $(paths singletons) >"$(log singletons)" 2>&1
  expect singletons "the exit code is 2" test $? = 2
  expect singletons "the message says how to start it" in_log singletons 'srun started 4 tasks .*--mpi=pmix'
  expect singletons "nothing was written" test ! -e "$dir/singletons.work"
}

for name in $cases; do
  start=$SECONDS before=$failures
  "case_$name"
  echo "case $name: $((SECONDS - start)) s"
  if [ $failures -gt $before ]; then
    echo "---- $(log "$name")"
    tail -n 60 "$(log "$name")"
    echo "----"
  fi
done
echo "$failures failures"
[ $failures = 0 ]
