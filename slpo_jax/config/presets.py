"""Objectives with other settings, for config files."""

from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config.config_files import override
from slpo_jax.config.sections import section
from slpo_jax.errors import UserError
from slpo_jax.training.objectives import OBJECTIVES


def objective_variant(config: ConfigDict, name: str, kind: str, **settings: Any) -> None:
    """A further entry under `config.objective`: an objective with other settings, trained under a name of its own.

    Args:
        name: of its checkpoint and its row; put it into `config.rl.objectives` too.
        kind: a name in `training.objectives.OBJECTIVES`.
    Raises:
        UserError: unknown kind or setting.
    """
    if kind not in OBJECTIVES:
        raise UserError(f"config.objective.{name}.kind: {kind!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    config.objective[name] = section(OBJECTIVES[kind]())
    override(config, {f"objective.{name}.{key}": value for key, value in {"kind": kind, **settings}.items()})


def tried(name: str, rate: float) -> str:
    """What an objective is called at a rate that is tried, such as NAME_3e_05: a name that flags can give."""
    return f"{name}_{rate:.0e}".replace("-", "_")
