"""Choices on the validation split."""

import json

import numpy as np

from slpo_jax.evaluation.evaluate import accuracy
from slpo_jax.io.files import read_json, write_text
from slpo_jax.policy.policy import Stopping
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.stage import Params


def validation_accuracy(experiment: Experiment, params: Params, stopping: Stopping, rule: float | int) -> float:
    """Acc on the validation split, where all choices are made."""
    valid = experiment.valid
    done = experiment.evaluator.run(
        params, valid, stopping, rule, limit=experiment.config.evaluate.limit, label="validation"
    )
    return accuracy(experiment.reader, valid, done)


def choose(experiment: Experiment, name: str, params: Params, stopping: Stopping, rules: list) -> float | int:
    """The rule (threshold or number of latents) with the best validation Acc, ties to the smaller.

    The sweep is kept in `thresholds.json` under `name`.
    """
    path = experiment.workdir.thresholds
    known = read_json(path, default={})
    found = {str(rule): validation_accuracy(experiment, params, stopping, rule) for rule in sorted(rules)}
    best = sorted(rules)[int(np.argmax(list(found.values())))]
    problems = min(experiment.config.evaluate.limit or len(experiment.valid), len(experiment.valid))
    known[name] = found | {"chosen": best, "problems": problems}
    write_text(path, json.dumps(known, indent=1) + "\n")
    return best
