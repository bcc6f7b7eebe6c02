#!/usr/bin/env bash
# Everything that needs GPUs, on a machine of any number of them, in stages that can be chosen:
#
#   bash bench/gpu_session.sh RESULTS [STAGE...]       default: build tests links two_gpus study restart faults sanitizer
#
#   build      CMake and Ninja into $BUILD                       tests      equivalence tests and ctest -R ranks_nccl
#   links      bus rates of NCCL (PyTorch)                       one_gpu    production.py on one GPU
#   two_gpus   the same jobs on 1 and all GPUs, every plan       whole      all 48 layers of Qwen3-30B-A3B on 1 and all GPUs
#   restart    killed on all GPUs, resumed on one, and back      faults     SIGKILL and SIGSTOP of one rank
#   study      scaling_study.py over tokens, GPUs and plans      eight      all of Qwen3-30B-A3B on 1, 2, 4, 8 GPUs, DeepSeek-V3's experts on all
#   slices     sums of experts at once and in slices beside the last chunk: what the latter hides
#   kernels    bench_cuda_kernels, bench_cuda_forward and the same with SHARDQ_DISPATCH=scatter
#   quality    a real model quantized in several ways, against the CPU (needs QUALITY=FOLDER, see bench/quality.py)
#   sanitizer  compute-sanitizer on a few tests                  predict    the prediction beside what the other stages measured
#
# Each stage prints one line of JSON (also appended to RESULTS/session.jsonl), keeps its log in RESULTS/STAGE.log and ends within its own limit:
# LIMIT_STAGE=SECONDS changes it. A stage that fails does not stop the others; the exit status is 1 then. Stages may be run again and add to their files.
# Variables: GPUS (default: all), BUILD (/tmp/b), WORK (/tmp/session: models and runs, about 50 GB; whole 110 GB), SHARDQ (a program that is built already),
# CMAKE_ARGS, PYTHON, DEVICE=cpu and SCALE=tiny for a rehearsal without a GPU.
# shellcheck disable=SC2086,SC2317 # CMAKE_ARGS are words; stages are called by name
set -u
[ $# -ge 1 ] || { sed -n '2,19s/^# \{0,1\}//p' "$0" >&2; exit 2; }
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1" || exit 2
results=$(cd "$1" && pwd)
shift
BUILD=${BUILD:-/tmp/b} WORK=${WORK:-/tmp/session} PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} SCALE=${SCALE:-full}
GPUS=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$GPUS" -ge 1 ] || GPUS=2
SHARDQ=${SHARDQ:-$BUILD/shardq}
mkdir -p "$WORK"
cd "$home" || exit 2
export PATH=$PATH:/usr/local/cuda/bin
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
plans=reduce_scatter,all_reduce,all_to_all
counts=1$(for n in 2 4 8; do [ "$n" -gt "$GPUS" ] || printf ,%s $n; done)
common=(--shardq "$SHARDQ" --device "$DEVICE" --scale "$SCALE")
# A rehearsal's matrices have few columns, and its tokens take long on a CPU.
if [ "$SCALE" = tiny ]; then
  common+=(--set quantization.group_size=16 --threads 1)
  long=16x128 short=8x32 tokens=(--tokens-list "512,2048") qwen=3 llama=2
else
  long=512x2048 short=8x256 tokens=() qwen=20 llama=0
fi
model=qwen3-30b-a3b:4

declare -A limits=([build]=420 [tests]=300 [links]=90 [one_gpu]=420 [two_gpus]=540 [whole]=540 [restart]=300 [faults]=420 [study]=560 [eight]=580 [sanitizer]=300 [predict]=60 [quality]=120 [kernels]=120 [slices]=240)

# Ends before the stage's limit by itself, so that what it has measured so far is kept.
inner() { echo $((limit - 15)); }

stage_build() {
  cmake -G Ninja -S "$home" -B "$BUILD" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_ARCHITECTURES=90 -DSHARDQ_PYTHON="$(command -v "$PYTHON")" ${CMAKE_ARGS:-} &&
    cmake --build "$BUILD" && "$SHARDQ" version
}
stage_tests() {
  local code=0
  timeout $(($(inner) / 2)) "$BUILD/tests/equivalence" --gtest_brief=1 || code=1
  # The libraries that our own kernels replace.
  SHARDQ_FACTOR=library SHARDQ_UPDATE=library timeout 60 "$BUILD/tests/equivalence" --gtest_brief=1 \
    --gtest_filter='Factorize*:LinearEquivalence.*Block*:Gptq*' || code=1
  # The kernel that waits for its first run here.
  SHARDQ_DISPATCH=scatter timeout 60 "$BUILD/tests/equivalence" --gtest_brief=1 --gtest_filter='Routing.*' || code=1
  ctest --test-dir "$BUILD" -R ranks_nccl --output-on-failure --timeout 120 || code=1
  return "$code"
}
stage_kernels() {
  "$BUILD/bench/bench_cuda_kernels" --json "$results/h200_kernels.json" && "$BUILD/bench/bench_cuda_forward" "$results/h200_forward.json" &&
    SHARDQ_DISPATCH=scatter "$BUILD/bench/bench_cuda_forward" "$results/forward_scatter.json"
}
stage_links() { "$PYTHON" bench/links.py --gpus "$GPUS" --out "$results/h200x${GPUS}_links.json"; }
stage_one_gpu() {
  "$PYTHON" bench/production.py "${common[@]}" --out "$results/production_1.json" --work "$WORK/p" --limit-seconds "$(inner)" \
    "qwen3-30b-a3b:$qwen:$long" "qwen3-30b-a3b:$qwen:$short" "llama-3-8b:$llama:$long" "llama-3-8b:$llama:$short"
}
stage_two_gpus() {
  "$PYTHON" bench/production.py "${common[@]}" --out "$results/production_$GPUS.json" --work "$WORK/p" --limit-seconds "$(inner)" --ranks "1,$GPUS" --plans "$plans" \
    "llama-3-8b:$llama:$long" "qwen3-30b-a3b:$qwen:$long" "qwen3-30b-a3b:$qwen:$short"
}
stage_slices() {
  local slices layers=8
  [ "$SCALE" != tiny ] || layers=3
  for slices in 0 auto; do
    SHARDQ_REDUCE_SLICES=$slices "$PYTHON" bench/production.py "${common[@]}" --out "$results/production_slices_$slices.json" --work "$WORK/p" \
      --limit-seconds $(($(inner) / 2)) --ranks "$GPUS" --plans reduce_scatter "qwen3-30b-a3b:$layers:$long" || return 1
  done
}
stage_whole() {
  rm -rf "$WORK/p" "$WORK/checks"
  "$PYTHON" bench/production.py "${common[@]}" --out "$results/production_whole_$GPUS.json" --work "$WORK/p" --limit-seconds "$(inner)" --ranks "1,$GPUS" \
    --plans reduce_scatter --compare-layers 4 "qwen3-30b-a3b:0:$long"
  local code=$?
  rm -rf "$WORK/p"
  return "$code"
}
checks() {
  local more=(--set calibration.chunk_tokens=8192)  # many safe points
  [ "$SCALE" != tiny ] || more=(--samples 32 --length 64 --set calibration.chunk_tokens=128)
  "$PYTHON" bench/session_checks.py "$1" "${common[@]}" --ranks "$GPUS" --work "$WORK/checks" --model "$model" "${more[@]}"
}
stage_restart() { checks restart; }
# A real model, which somebody has to bring: QUALITY is a folder as jobs/quickstart.sh smollm2 makes it in out/smollm2.
stage_quality() {
  [ -d "${QUALITY:-}/model" ] || { echo "QUALITY='${QUALITY:-}' has no model: not run" >&2; return 1; }
  "$PYTHON" bench/quality.py --shardq "$SHARDQ" --device "$DEVICE" --files "$QUALITY" --work "$WORK/quality" --limit-seconds "$(inner)" --out "$results/h200_quality.json" &&
    "$PYTHON" bench/quality.py --out "$results/h200_quality.json" --compare bench/results/cpu_quality.json
}
stage_faults() { checks faults; }
stage_study() {
  "$PYTHON" bench/scaling_study.py "${common[@]}" --models "$model,llama-3-8b:4" --ranks "$counts" --plans "$plans" "${tokens[@]}" --scratch "$WORK" \
    --limit-seconds "$(inner)" --output "$results/scaling_h200x$GPUS"
}
# The scaling run of a machine with 4 or 8 GPUs, within ten minutes: the most GPUs first, in case time runs out.
stage_eight() {
  local begin=$SECONDS code=0 counts
  counts=1$(for n in 8 4 2; do [ "$n" -gt "$GPUS" ] || printf ,%s $n; done)
  rm -rf "$WORK/p"
  "$PYTHON" bench/production.py "${common[@]}" --out "$results/production_eight.json" --work "$WORK/p" --limit-seconds $(($(inner) * 2 / 3)) --ranks "$counts" --plans "$plans" \
    --compare-layers 4 "qwen3-30b-a3b:$([ "$SCALE" = tiny ] && echo 3 || echo 0):$long" || code=1
  rm -rf "$WORK/p"
  "$PYTHON" bench/production.py "${common[@]}" --out "$results/production_eight.json" --work "$WORK/p" --limit-seconds $(($(inner) - SECONDS + begin)) --ranks "$GPUS" \
    --plans all_to_all,reduce_scatter,all_reduce --compare-layers 1 "deepseek-v3-experts:3:$long" || code=1
  rm -rf "$WORK/p"
  return "$code"
}
# Races in shared memory, and reads outside of what was allocated; each test alone, because they take a hundred times as long.
stage_sanitizer() {
  local begin=$SECONDS code=0 tool test
  for tool in racecheck memcheck; do
    for test in GptqLoop.CodesAndResidualsAreEqual FactorizeEquivalence.FactorsGiveTheMatrixBack TriangleEquivalence.PackAndUnpack \
      Routing.SortByExpertIsStable RoundingEquivalence.PermuteColumnsThereAndBack LinearEquivalence.GramSumsAreTheSameBitsEveryTime; do
      [ $((SECONDS - begin + 20)) -lt "$(inner)" ] || { echo "not run: $tool $test (out of time)"; continue; }
      echo "== $tool $test"
      timeout $(($(inner) - SECONDS + begin)) compute-sanitizer --tool "$tool" --error-exitcode 9 "$BUILD/tests/equivalence" --gtest_brief=1 --gtest_filter="$test"
      case $? in 0) ;; 124) echo "not finished: $tool $test" ;; *) code=1 ;; esac
    done
  done
  return "$code"
}
stage_predict() {
  local links=() file
  [ ! -e "$results/h200x${GPUS}_links.json" ] || links=(--links "$results/h200x${GPUS}_links.json")
  for file in "$results"/production_*.json "$results"/scaling_h200x*/phases.json; do
    [ ! -e "$file" ] || { echo "== $file"; "$PYTHON" bench/scaling_model.py --validate "$file" "${links[@]}" || return 1; }
  done
}

# What a stage has to say, as a JSON value, from the last lines of its log.
said() {
  case $1 in
    links | restart | faults) tail -n 1 "$results/$1.log" | grep '^{' || echo null ;;
    *) tac "$results/$1.log" | sed '/^== stage /q' | tac | grep -iE 'passed|failed|^\|.*[0-9]|out of time|summary|not (run|finished|know)|stopped after|^shardq [0-9]|on [0-9]+.*:$|compute [0-9.]+ /' | tail -n 20 |
        "$PYTHON" -c 'import json, sys; print(json.dumps([line.strip()[:200] for line in sys.stdin]))' ;;
  esac
}

status=0
[ $# -gt 0 ] || set -- build tests links two_gpus study restart faults sanitizer
for name in "$@"; do
  [ -n "${limits[$name]:-}" ] || { echo "gpu_session.sh: no stage $name; there are: ${!limits[*]}" >&2; exit 2; }
  override=LIMIT_$name
  limit=${!override:-${limits[$name]}}
  begin=$SECONDS
  echo "== stage $name, $(date -u +%FT%TZ)" >>"$results/$name.log"
  # A subshell in a session of its own: at the limit it and all that it started are ended, and nothing else.
  set -m
  ( "stage_$name" ) >>"$results/$name.log" 2>&1 &
  job=$!
  set +m
  code=
  while kill -0 -- -$job 2>/dev/null; do
    if [ $((SECONDS - begin)) -ge "$limit" ]; then
      # The scripts end their ranks at SIGTERM, which may take them 20 s.
      [ "$code" = 124 ] || kill -TERM -- -$job 2>/dev/null
      [ $((SECONDS - begin)) -lt $((limit + 25)) ] || kill -KILL -- -$job 2>/dev/null
      code=124
    fi
    sleep 0.2
  done
  wait $job 2>/dev/null
  code=${code:-$?}
  [ "$code" = 0 ] || status=1
  printf '{"stage": "%s", "exit_code": %s, "seconds": %s, "gpus": %s, "said": %s}\n' "$name" "$code" $((SECONDS - begin)) "$GPUS" "$(said "$name")" | tee -a "$results/session.jsonl"
  # One file with everything, in case only a few files can be taken from the machine.
  tar -C "$(dirname "$results")" -czf "$results.tar.gz" "$(basename "$results")" 2>/dev/null
done
exit $status
