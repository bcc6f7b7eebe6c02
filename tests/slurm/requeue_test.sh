#!/bin/bash
# requeue_test.sh: jobs/run_or_requeue.sh with a scontrol and an srun of our own, so that its decisions are tested where no Slurm is.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir -p "$dir/bin" "$dir/work"
# scontrol: notes requeues; show gives the end of the job's time. sleep and srun: nothing to wait for.
cat >"$dir/bin/scontrol" <<'SCRIPT'
#!/bin/bash
case "$*" in
  requeue*) [ -z "${REFUSE:-}" ] || exit 1; echo "$*" >>"$CALLS" ;;
  *show*) echo "JobId=7 JobState=RUNNING EndTime=${END_TIME:-2999-01-01T00:00:00} Reason=None" ;;
esac
SCRIPT
printf '#!/bin/bash\nexit 0\n' >"$dir/bin/sleep"
printf '#!/bin/bash\necho "$*" >>"$CALLS.srun"\n' >"$dir/bin/srun"
chmod +x "$dir"/bin/*
export PATH=$dir/bin:$PATH CALLS=$dir/calls
failures=0

# run EXIT_CODE_EXPECTED REQUEUES_EXPECTED TITLE COMMAND...: one start of the job
run() {
  local code=$1 requeues=$2 title=$3
  shift 3
  : >"$CALLS"
  "$root/jobs/run_or_requeue.sh" "$dir/work" "$@" >"$dir/log" 2>&1
  local got=$? count
  count=$(wc -l <"$CALLS")
  if [ $got = "$code" ] && [ "$count" = "$requeues" ]; then
    echo "ok    $title"
  else
    echo "WRONG $title: exit code $got (expected $code), $count requeues (expected $requeues)"
    cat "$dir/log"
    failures=$((failures + 1))
  fi
}

unset SLURM_JOB_ID SLURM_RESTART_COUNT SHARDQ_REQUEUE_CODES SHARDQ_IDLE_REQUEUES
run 85 0 'without Slurm nothing is requeued' bash -c 'exit 85'
export SLURM_JOB_ID=7
run 0 0 'a finished job stays finished' bash -c 'exit 0'
run 3 0 'bad input is not requeued' bash -c 'exit 3'
run 87 0 'a stall is not requeued unless asked for' bash -c 'exit 87'
SHARDQ_REQUEUE_CODES='85 87' run 87 1 'a stall is requeued where asked for' bash -c 'exit 87'
REFUSE=1 run 85 0 'a refused requeue keeps the exit code' bash -c 'exit 85'
rm -f "$dir/work.requeues"

# Progress: every start commits something.
for i in 1 2 3 4 5 6; do
  SLURM_RESTART_COUNT=$i run 85 1 "restart $i with progress is requeued" bash -c "echo stage $i >>$dir/work/manifest.json; exit 85"
done
# No progress: three restarts are granted, the fourth is not.
for i in 1 2 3; do
  count=$((i < 3 ? 1 : 0))
  run 85 $count "start $i without progress: $count requeue" bash -c 'exit 85'
done
run 85 1 'progress resets the count' bash -c "echo more >>$dir/work/manifest.json; exit 85"
rm -f "$dir/work/manifest.json" "$dir/work.requeues"
for i in 1 2 3 4; do
  count=$((i < 4 ? 1 : 0))
  run 85 $count "start $i without any manifest: $count requeue" bash -c 'exit 85'
done
SLURM_JOB_ID=8 run 85 1 'a new submission counts anew' bash -c 'exit 85'

# Slurm ends the job: SIGTERM to the script while the step runs.
terminate='kill -TERM $PPID; exit 85'
run 85 0 'a cancelled job is not requeued' bash -c "$terminate"
rm -f "$dir/work.requeues"
END_TIME=$(date -d '-1 minute' +%FT%T) run 85 1 'the time limit is followed by a requeue' bash -c "$terminate"

rm -f "$CALLS.srun"
SLURM_RESTART_COUNT=3 run 0 0 'a third restart' bash -c 'exit 0'
[ "$(wc -l <"$CALLS.srun")" = 3 ] || { echo "WRONG: three restarts use up three step numbers"; failures=$((failures + 1)); }

# The templates' own shell: arguments without --work are refused, both spellings are found.
. "$root/jobs/job_environment.sh"
[ "$(job_work_directory r.yaml --work /a/b --device cpu)" = /a/b ] || { echo 'WRONG: --work DIR'; failures=$((failures + 1)); }
[ "$(job_work_directory --work=/c r.yaml)" = /c ] || { echo 'WRONG: --work=DIR'; failures=$((failures + 1)); }
job_work_directory r.yaml --output /x 2>/dev/null && { echo 'WRONG: no --work was accepted'; failures=$((failures + 1)); }
for script in "$root"/jobs/*.sbatch "$root"/jobs/*.sh; do
  bash -n "$script" || { echo "WRONG: $script does not parse"; failures=$((failures + 1)); }
done
echo "$failures failures"
[ $failures = 0 ]
