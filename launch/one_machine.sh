#!/usr/bin/env bash
# One process that drives every GPU of this machine (4 in the paper), alone or as one of several that make one run.
#
#   launch/one_machine.sh --config=configs/coconut_gpt2.py --workdir=runs/coconut [--config.key=value ...]
#
# Arguments go to slpo_jax.main as they are. The same command again goes on from the workdir's last checkpoint.
# To make one run of several machines by hand, give on each of them, with the workdir on a disk that they share,
#   COORDINATOR=FIRST_MACHINE:8476 PROCESSES=2 PROCESS=0 launch/one_machine.sh ...
# with PROCESS=1 on the second. Failure policy: where one ends, the others do within jax's heartbeat (100 s); start all
# again. A signal to one of them stops all after the same step, with a checkpoint.
# Environment:
#   DRY_RUN=1                       print what would run, and stop
#   PYTHON                          the interpreter (default: python)
#   CUDA_VISIBLE_DEVICES            a choice of GPUs (default: all)
#   JAX_COMPILATION_CACHE_DIR       compiled programs, kept between runs (default: below the user's cache folder)
#   XLA_PYTHON_CLIENT_MEM_FRACTION  share of each GPU's memory taken at the start (default: .92, jax's own is .75)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/slpo_jax/xla}"
# The run has the GPUs to itself; memory taken at once does not fragment as memory taken piece by piece does.
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-true}"
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-.92}"
# Metrics and progress reach a log file as they are printed.
export PYTHONUNBUFFERED=1

command=("${PYTHON:-python}" -m slpo_jax.main "$@")
if [[ -n ${COORDINATOR:-} ]]; then
    if [[ -z ${PROCESSES:-} || -z ${PROCESS:-} ]]; then
        echo "COORDINATOR: goes with PROCESSES, how many there are, and PROCESS, which this one is, from 0" >&2
        exit 2
    fi
    command+=("--coordinator=$COORDINATOR" "--processes=$PROCESSES" "--process=$PROCESS")
fi
if [[ ${DRY_RUN:-0} != 0 ]]; then
    for name in JAX_COMPILATION_CACHE_DIR XLA_PYTHON_CLIENT_PREALLOCATE XLA_PYTHON_CLIENT_MEM_FRACTION; do
        printf '%s=%q ' "$name" "${!name}"
    done
    printf '%q ' "${command[@]}"
    printf '\n'
    exit
fi
mkdir -p "$JAX_COMPILATION_CACHE_DIR"
# exec: signals from the shell or the scheduler reach the program itself.
exec "${command[@]}"
