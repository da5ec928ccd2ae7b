"""Choices on the validation split."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from slpo_jax.evaluation.completions import Completions, accuracy
from slpo_jax.evaluation.records import RolloutCache
from slpo_jax.io.progress import begin
from slpo_jax.policy.policy import Stopping
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.stage import Params
from slpo_jax.training.metrics import warn_of_cuts


def validation_accuracy(
    experiment: Experiment,
    params: Params,
    stopping: Stopping,
    rule: float | int,
    cache: RolloutCache | None = None,
) -> float:
    """Acc on the validation split, where all choices are made.

    Args:
        cache: see `Evaluator.run`.
    """
    valid, limit = experiment.valid, experiment.config.evaluate.limit
    done = experiment.evaluator.run(params, valid, stopping, rule, limit=limit, label="validation", cache=cache)
    note_cuts(experiment, "validation", [done])
    return accuracy(experiment.reward, valid, done)


def note_cuts(experiment: Experiment, label: str, found: Sequence[Completions]) -> None:
    """`warn_of_cuts` of an evaluation's completions."""
    cuts = [experiment.reward.read(tokens).cut for done in found for tokens in done.tokens]
    key = "evaluate.max_answer_tokens" if experiment.config.evaluate.max_answer_tokens else "max_answer_tokens"
    warn_of_cuts(label, float(np.mean(cuts)), key)


def choose(
    experiment: Experiment, name: str, params: Params, stopping: Stopping, rules: list, selected_for: str
) -> dict[str, Any]:
    """The sweep of a row, see `Row.sweep`: the rule with the best validation Acc is chosen, ties to the smaller.

    Args:
        selected_for: digest of all that the choice depends on.
    """
    begin(f"evaluate: the {'number of latents' if stopping == 'length' else 'threshold'} of {name}")
    cache = RolloutCache(experiment.workdir.sweep(name), selected_for)
    found = {
        str(rule): validation_accuracy(experiment, params, stopping, rule, cache.having(f"rule {rule}"))
        for rule in sorted(rules)
    }
    best = sorted(rules)[int(np.argmax(list(found.values())))]
    cache.clear()
    problems = min(experiment.config.evaluate.limit or len(experiment.valid), len(experiment.valid))
    return found | {"chosen": best, "problems": problems}
