#!/bin/bash
# run_or_requeue.sh WORK_DIR COMMAND...
#
# Runs COMMAND (srun ... shardq quantize ... --work WORK_DIR --resume auto). When it ends with exit code 85, "stopped on request,
# resumable" (time limit near, preemption), the Slurm job is put back into the queue and resumes when it starts again.
#
# A job that gets nowhere must not circle for ever: shardq's manifest changes with every stage it commits, and after
# SHARDQ_IDLE_REQUEUES (default 3) restarts in a row with an unchanged manifest the job stays down, exit code 85.
#   SHARDQ_REQUEUE_CODES="85 87" also requeues a job that the watchdog ended (a lost node or a dead link), with the same cap.
# A cancelled job (scancel) is not requeued: its ranks stop in order too, but you wanted it gone. `scancel --signal=USR1 JOB` reaches
# the ranks alone: it makes a running job store its state and go back into the queue.
set -u
[ $# -ge 2 ] || { echo "usage: run_or_requeue.sh WORK_DIR COMMAND..." >&2; exit 2; }
work=$1
shift
idle_limit=${SHARDQ_IDLE_REQUEUES:-3}
codes=${SHARDQ_REQUEUE_CODES:-85}
say() { echo "[$(date +%T)] run_or_requeue: $*"; }

# Slurm sends this script SIGTERM when it ends the job itself: scancel, the time limit, the end of a preemption's grace. It must live
# until srun has handed over the exit code, and then tell these cases apart: only after the time limit is requeueing up to us.
terminated=no
trap 'terminated=yes' TERM
limit=$(scontrol --oneliner show job "${SLURM_JOB_ID:-0}" 2>/dev/null | grep -o ' EndTime=[^ ]*' | cut -d= -f2)
limit=$(date -d "${limit:-never}" +%s 2>/dev/null || echo 9999999999)

# Where slurmstepd itself was killed, the step's PMIx socket stays on the node under the step's number. A restarted job counts its steps
# from 0 again and could not start there, so each restart begins one number higher.
for _ in $(seq "${SLURM_RESTART_COUNT:-0}"); do srun --mpi=none --ntasks="${SLURM_NNODES:-1}" --ntasks-per-node=1 true; done

say "job ${SLURM_JOB_ID:-none}, restart ${SLURM_RESTART_COUNT:-0}: $*"
code=0
"$@" || code=$?
say "ended with exit code $code"
case " $codes " in *" $code "*) ;; *) exit $code ;; esac
if [ -z "${SLURM_JOB_ID:-}" ]; then
  say "no Slurm job to requeue: run the same command again to resume"
  exit $code
fi

if [ $terminated = yes ] && [ "$(date +%s)" -lt $((limit - 5)) ]; then
  say "Slurm is ending the job (cancelled, or preempted and requeued by Slurm itself): the same command resumes it"
  exit $code
fi

# Restarts of this job without progress, noted beside the work directory: "JOB CHECKSUM COUNT".
manifest=$(cksum "$work/manifest.json" 2>/dev/null | cut -d' ' -f1,2 | tr ' ' '-')
current="$SLURM_JOB_ID ${manifest:-none}" note=${work%/}.requeues idle=0
if [ -r "$note" ] && read -r job checksum count <"$note" && [ "$job $checksum" = "$current" ]; then idle=$((count + 1)); fi
echo "$current $idle" >"$note"
if [ "$idle" -ge "$idle_limit" ]; then
  say "no stage was committed in the last $idle restarts: not requeued. Give the job more time, or see $work"
  exit $code
fi
say "requeue, restarts without progress: $idle of $idle_limit"
if ! scontrol requeue "$SLURM_JOB_ID"; then
  say "scontrol requeue was refused (the site may forbid it): submit the job again to resume"
  exit $code
fi
sleep 60  # Slurm ends this script; leaving first would let the job count as finished
exit $code
