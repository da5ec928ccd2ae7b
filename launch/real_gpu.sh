#!/usr/bin/env bash
# A real model on the GPU of a machine that has no network, takes 64 MiB at a time and is lent for minutes.
#
#   launch/real_gpu.sh prepare [--train=FILE]  here: weights in two parts, data and packages, into runs/carry
#   launch/real_gpu.sh first                   there, brought with the checkout and all of runs/carry but weights.2
#   launch/real_gpu.sh go [SECONDS] [FLAG..]   there, brought with runs/carry/weights.2; again for what is left; with
#                                              --task=countdown, say, the weights being there by then
#
# What there is comes back in OUT, in files under 16 MiB. Each command ends within its SECONDS, and some to save in.
# Environment:
#   DRY_RUN=1  print what would run, and stop
#   OUT        folder for what comes back (default: runs/real/out)
#   PYTHON     the interpreter (default: python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}" out="${OUT:-runs/real/out}" what="${1:-}"
shift || true
export PYTHONPATH="$PWD/runs/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

run() {
    if [[ ${DRY_RUN:-0} != 0 ]]; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

case "$what" in
prepare)
    run "$python" launch/carry.py "$@"
    run "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 -d runs/carry/wheels \
        gguf ml_collections tensorboardX
    ;;
first)
    run "$python" -m pip install -q --no-index --no-deps --upgrade --target runs/site runs/carry/wheels/*.whl
    run "$python" -c "import benchmarks.real" # what is missing is told before the second transfer
    ;;
go)
    run "$python" -m benchmarks.real "--seconds=${1:-480}" --train=runs/carry/data/gsm8k_train.jsonl \
        --weights=runs/carry "--out=$out" "${@:2}"
    ;;
*)
    echo "launch/real_gpu.sh: give prepare, first or go" >&2
    exit 2
    ;;
esac
