#!/usr/bin/env bash
# All hosts of a Cloud TPU slice as one run, from a machine with gcloud:
#
#   TPU=NAME ZONE=ZONE launch/tpu.sh --config=configs/coconut_gpt2.py --workdir=/runs/coconut [--config.key=value ...]
#
# On every host the checkout lies in FOLDER, installed with jax[tpu], and the workdir on a disk that all hosts share.
# Arguments go to slpo_jax.main as they are; jax finds the other hosts by itself.
#
# Failure policy. A host that fails or is preempted takes the run down on all: the others notice within jax's heartbeat
# (100 s) and end. Then the same command is given again, once the slice is ready, at most RESTARTS times, and goes on
# from the last whole checkpoint. Status 2 is a mistake in the arguments and ends it at once.
# Environment:
#   DRY_RUN=1   print the command, and stop
#   FOLDER      the checkout on the hosts (default: slpo_jax)
#   RESTARTS    default: 20
#   PATIENCE    seconds between two looks whether the slice is ready (default: 60)
set -euo pipefail
for name in TPU ZONE; do
    if [[ -z ${!name:-} ]]; then
        echo "$name: missing; give the slice's name and zone, e.g. TPU=slpo ZONE=us-central2-b" >&2
        exit 2
    fi
done
if [[ " $*" != *" --workdir"* ]]; then
    echo "--workdir: missing; a run that is started again must find its checkpoints, so name a folder that stays" >&2
    exit 2
fi
remote="cd $(printf '%q' "${FOLDER:-slpo_jax}") && launch/one_machine.sh$(printf ' %q' --distributed "$@")"
slice=(gcloud compute tpus tpu-vm)
command=("${slice[@]}" ssh "$TPU" "--zone=$ZONE" --worker=all "--command=$remote")
if [[ ${DRY_RUN:-0} != 0 ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit
fi

for ((attempt = 0; attempt <= ${RESTARTS:-20}; attempt++)); do
    until [[ $("${slice[@]}" describe "$TPU" "--zone=$ZONE" '--format=value(state)') == READY ]]; do
        echo "tpu.sh: $TPU is not ready; looking again in ${PATIENCE:-60} s" >&2
        sleep "${PATIENCE:-60}"
    done
    status=0
    "${command[@]}" || status=$?
    if [[ $status -eq 0 || $status -eq 2 ]]; then
        exit "$status"
    fi
    echo "tpu.sh: the run ended with status $status; going on from its last checkpoint" >&2
done
exit "$status"
