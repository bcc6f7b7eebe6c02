#!/bin/bash
# comm_faults.sh PROGRAM CASE [RANKS]: runs comm_faults under mpirun with one fault and checks exit code, message and time.
set -u
program=$1 fault=$2 ranks=${3:-3}
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

case $fault in
  none)     code=0  most=20 text='finished' ;;
  stop)     code=87 most=20 text='stalled for .* s in all_gather .*rank 1 silent for [34]\.[0-9] s .last seen in' ;;
  kill)     code=137 most=15 text='signal 9' ;;
  exit)     code=any most=15 text='rank 1|exited|finalize' ;;
  abort)    code=77 most=15 text='' ;;
  throw)    code=3  most=15 text='error: rank 1: shard 7 is truncated' ;;
  slow)     code=0  most=45 text='finished' ;;
  stuck)    code=87 most=30 text="no rank has made progress for .* s; rank 1 in 'solve'|no rank has made progress for .* s; rank 0 in .*rank 1 in 'solve'" ;;
  schedule) code=77 most=15 text='ranks disagree on the collectives of step: call 1 is all_gather of 24 bytes on rank 0, broadcast of 0 bytes on rank 1' ;;
  mismatch) code=87 most=30 text="no rank has made progress" ;;
  suspend)  code=0  most=60 text='finished' ;;
  nccl_stop) code=87 most=40 text='rank 1 silent for' ;;
  nccl_kill) code=137 most=40 text='signal 9' ;;
  singletons) code=2 most=10 text='started 4 tasks, but MPI sees 1' ;;
  *) echo "unknown case $fault"; exit 2 ;;
esac

arguments=("$fault" "$dir")
case $fault in nccl_*) arguments=("$ranks" "${fault#nccl_}" "$dir") ;; esac

start=$(date +%s)
if [ "$fault" = singletons ]; then
  OMPI_COMM_WORLD_SIZE=4 timeout 60 "$program" none >"$dir/out" 2>&1
  got=$?
else
  timeout 120 mpirun --oversubscribe -n "$ranks" "$program" "${arguments[@]}" >"$dir/out" 2>&1 &
  job=$!
  if [ "$fault" = suspend ]; then
    sleep 2.5
    pids=$(cat "$dir"/[0-9]*)
    kill -STOP $pids; sleep 11; kill -CONT $pids  # longer than both deadlines
  fi
  wait $job; got=$?
fi
seconds=$(($(date +%s) - start))
cat "$dir/out"
if [ $got = 125 ]; then exit 125; fi  # skipped: too few GPUs
echo "case $fault: exit code $got (expected $code), $seconds s (at most $most)"

ok=1
if [ $code = any ]; then [ $got -ne 0 ] || ok=0; else [ $got -eq $code ] || ok=0; fi
[ $seconds -le $most ] || ok=0
grep -Eq -- "$text" "$dir/out" || { echo "the output lacks: $text"; ok=0; }
if [ "$fault" = throw ]; then [ "$(grep -c 'error: rank 1' "$dir/out")" = 1 ] || { echo 'more than one voice'; ok=0; }; fi
for file in "$dir"/[0-9]*; do
  [ -e "$file" ] || continue
  sleep 0.2
  if kill -0 "$(cat "$file")" 2>/dev/null; then sleep 3; fi  # the launcher may still be killing
  if kill -0 "$(cat "$file")" 2>/dev/null; then echo "rank $(basename "$file") is still there"; ok=0; fi
done
[ $ok = 1 ]
