"""The data sets that the stages of a run ask for: which, known before anything is loaded, and their problems."""

import contextlib
from collections.abc import Iterator
from typing import Any

from absl import logging

from slpo_jax.config.config import Config
from slpo_jax.data.problem import Problems, without
from slpo_jax.data.problems import Role, load_problems
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import STYLES, Kind, style_of
from slpo_jax.rewards.reward import CORRECT

# Which split of a data set the key asks for; sets to evaluate on are asked for their test split.
_ROLES: dict[str, Role] = {"config.data.train": "train", "config.data.valid": "validation"}


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """Without warnings, of data that are going to be read again."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def sets_to_evaluate(config: Config) -> tuple[str, ...]:
    """The names under `config.data.eval` that the stage evaluate asks for."""
    return tuple(config.evaluate.datasets or config.data.eval)


def load_set(config: Config, key: str, source: Any, texts: bool = False) -> Problems:
    """The problems of a key's source; of training problems those that validation has too are left out, and counted.

    Args:
        source: as `load_problems` takes it.
        texts: answers may be any texts; else what `config.reward` can compare.
    Raises:
        UserError: the key, and what is wrong with its source.
    """
    if isinstance(source, str) and not source:
        raise UserError(f"{key}: not set; give a file or a synthetic set such as synthetic:train")
    compared = STYLES[style_of(config.prompt.answers, "after_mark")].kind
    kind: Kind = compared if config.reward == CORRECT and not texts else "texts"

    def load(key, source):
        try:
            return load_problems(source, config.data.of_task(source), _ROLES.get(key, "test"), kind, config.data.fields)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None

    problems = load(key, source)
    if key == "config.data.train" and config.data.valid:
        # GSM8K's training file holds the validation questions; nothing may be chosen on problems trained on.
        total = len(problems)
        problems = problems.with_only(without(problems, load("config.data.valid", config.data.valid)))
        if 0 < len(problems) < total and config.data.valid != f"{source}[valid]":  # which is set apart from it
            count = total - len(problems)
            logging.warning("%s: left out %d of %d problems, which are also in config.data.valid", key, count, total)
    if not problems:
        raise UserError(f"{key}: every problem of {source} is also in config.data.valid; give another set")
    return problems
