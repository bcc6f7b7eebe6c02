#!/usr/bin/env bash
# Installs what the tests need, builds, and runs all of them. The CUDA backend is compiled wherever nvcc is, its tests run where a GPU is.
#
#   bash tests/run.sh [--asan] [--cpu] [CTEST ARGUMENTS...]
#
#   --asan   also builds with AddressSanitizer and UndefinedBehaviorSanitizer and runs all tests with it (half an hour more)
#   --cpu    leaves the CUDA backend out even where nvcc is
# CTEST ARGUMENTS go to ctest, e.g. -R unit_io. The exit status is not zero when anything failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

asan=no preset=cpu cuda=yes
ctest_arguments=()
for argument in "$@"; do
  case $argument in
    --asan) asan=yes ;;
    --cpu) cuda=no ;;
    *) ctest_arguments+=("$argument") ;;
  esac
done
[[ $cuda == no ]] || ! command -v nvcc >/dev/null || preset=cuda

step() { printf '\n== %s (%s s since the start)\n' "$1" "$SECONDS"; }
jobs=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

step "setup"
bash jobs/setup.sh tests
venv=$(realpath "${SHARDQ_VENV:-.venv}")

step "build ($preset)"
cmake --preset "$preset" -DSHARDQ_PYTHON="$venv/bin/python" >build-configure.log 2>&1 || { cat build-configure.log; exit 1; }
rm -f build-configure.log
cmake --build --preset "$preset" -j "$jobs"

status=0
if [[ $asan == yes ]]; then
  step "build and tests under AddressSanitizer and UndefinedBehaviorSanitizer"
  cmake --preset asan -DSHARDQ_PYTHON="$venv/bin/python" >/dev/null
  cmake --build --preset asan -j "$jobs"
  ctest --preset asan -j "$jobs" "${ctest_arguments[@]}" || status=$?
fi

step "tests"
ctest --test-dir "build/$preset" --output-on-failure -j "$jobs" "${ctest_arguments[@]}" || status=$?
exit "$status"
