"""Choices on the validation split."""

import json

import numpy as np

from slpo_jax.evaluation.evaluate import accuracy
from slpo_jax.evaluation.kept import KeptRollouts
from slpo_jax.io.files import read_json, write_text
from slpo_jax.policy.policy import Stopping
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.stage import Params


def validation_accuracy(
    experiment: Experiment,
    params: Params,
    stopping: Stopping,
    rule: float | int,
    kept: KeptRollouts | None = None,
) -> float:
    """Acc on the validation split, where all choices are made.

    Args:
        kept: see `Evaluator.run`.
    """
    valid, limit = experiment.valid, experiment.config.evaluate.limit
    done = experiment.evaluator.run(params, valid, stopping, rule, limit=limit, label="validation", kept=kept)
    return accuracy(experiment.reader, valid, done)


def choose(
    experiment: Experiment, name: str, params: Params, stopping: Stopping, rules: list, chosen_for: str
) -> float | int:
    """The rule (threshold or number of latents) with the best validation Acc, ties to the smaller.

    The sweep is kept in `thresholds.json` under `name`.

    Args:
        chosen_for: digest of all that the choice depends on.
    """
    path, kept = experiment.workdir.thresholds, KeptRollouts(experiment.workdir.sweep(name), chosen_for)
    known = read_json(path, default={})
    found = {
        str(rule): validation_accuracy(experiment, params, stopping, rule, kept.having(f"rule {rule}"))
        for rule in sorted(rules)
    }
    best = sorted(rules)[int(np.argmax(list(found.values())))]
    problems = min(experiment.config.evaluate.limit or len(experiment.valid), len(experiment.valid))
    known[name] = found | {"chosen": best, "problems": problems}
    write_text(path, json.dumps(known, indent=1) + "\n")
    kept.clear()
    return best
