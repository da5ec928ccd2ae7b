"""Which data sets the stages of a run ask for, known before anything is loaded."""

from pathlib import Path

from ml_collections import ConfigDict

from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.text.problems import check_source


def stages_to_train(config: ConfigDict, workdir: Workdir) -> list[str]:
    """Those of `config.stages` that have steps left to take."""
    makes = {
        "imitate": {"imitate", *(["imitate_control"] if config.imitate.control else [])},
        "cold_start": {"cold_start"},
        "rl": set(config.rl.objectives),
        "evaluate": set(),
    }
    finished = set(workdir.finished_stages())
    return [stage for stage in config.stages if makes[stage] - finished]


def sets_to_evaluate(config: ConfigDict) -> tuple[str, ...]:
    """The names under `config.data.eval` that the stage evaluate asks for."""
    return tuple(config.evaluate.datasets or config.data.eval)


def check_sources(config: ConfigDict, workdir: Path) -> None:
    """Fail on a file that isn't there, seconds before models and tokenizer are made.

    Raises:
        UserError: the key and the file.
    """
    wanted = {}
    if stages_to_train(config, Workdir(workdir)):
        wanted["config.data.train"] = config.data.train
    if "evaluate" in config.stages:
        wanted |= {f"config.data.eval.{name}": config.data.eval[name] for name in sets_to_evaluate(config)}
    for key, source in wanted.items():
        try:
            check_source(source)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
