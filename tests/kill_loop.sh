#!/usr/bin/env bash
# Kills, starves and unplugs the quantization of the bundled model hundreds of times, resumes it each time, on another number of ranks, and
# compares every checkpoint byte for byte with an undisturbed run's. About half an hour on two cores; ctest runs a short one (faults_program).
#
#   bash tests/kill_loop.sh [BUILD_FOLDER [RESULT_JSON]]      default: build/cpu bench/results/kill_loop.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build/cpu} result=${2:-bench/results/kill_loop.json}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -B tests/faults/program_faults.py --binary "$(realpath "$build")/shardq" --shim "$(realpath "$build")/tests/faults/io_shim.so" \
  --scratch "$scratch" --json "$result" kill=200 power=60 enospc=40 eio=40 stop=40
