"""The one config of a command or a call: what it names, and without a config what follows from the data."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from slpo_jax.config.config import Config
from slpo_jax.config.overrides import merge_settings
from slpo_jax.config.registry import list_shipped, read_config_file
from slpo_jax.errors import UserError, naming
from slpo_jax.io.files import flatten
from slpo_jax.run.own_data_settings import KEYS, derived_settings


def requested_config(
    start: str | ConfigDict,
    sources: Mapping[str, str],
    tests: Mapping[str, str],
    changes: Mapping[str, Any],
    begin: Callable[[int], None],
    cut: Callable[[Config], Config] | None = None,
) -> Config:
    """Merge what a command or a call gives into one config.

    Without a config the data is read, and what was chosen from it is printed to standard error.

    Args:
        start: a shipped config's name, a config file, or what one made; "" has the settings chosen from the problems to
            train on, and shown.
        sources: of train, valid and base; "" is the config's.
        tests: sets to evaluate on, NAME = source, instead of the config's.
        changes: further keys by dotted name, or nested.
        begin: sets jax up for `config.cpu_devices`, before a base model of ours asks for devices.
        cut: makes less of the config's problems, before any are read.
    Raises:
        UserError: a key or a file can't be used, or one is given twice.
    """
    # What --train and its like set, and the flag that did so, by key.
    files = dict[str, Any]()
    set_by = dict[str, str]()
    for name, source in sources.items():
        if source:
            files[KEYS[name]] = source
            set_by[KEYS[name]] = f"--{name}={source}"
    for name, source in tests.items():
        flag = f"--test={name}={source}"
        set_by[f"data.eval.{name}"] = flag
        set_by["data.eval"] = flag
    if tests:
        files["data.eval"] = tests
    # No key may be set twice.
    changes = {key.removeprefix("config."): value for key, value in changes.items()}
    for key in (*changes, *flatten(changes)):
        if key in set_by:
            raise UserError(
                f"{set_by[key]}: config.{key} is given too; leave one of the two out"
            )
    if start and sources["base"]:
        raise UserError(
            "--base: goes with --train and without a config; beside a config set config.init"
        )
    file = read_config_file(start) if start and isinstance(start, str) else start
    # Lay files and changes over the config. Without one the least number of latents follows from the most.
    config = merge_settings(Config(), file or {"min_latents": 1}, files, changes)
    if not start and not config.data.train:
        raise UserError(
            f"--config: not given; give one of {', '.join(list_shipped())}, a file, or --train=FILE"
        )
    config = cut(config) if cut else config
    # Without a config the data and the base model say what else is chosen.
    begin(config.cpu_devices)
    if not start:
        # The user knows `config.init` by the flag that set it.
        names = {"config.init": "--base"} if sources["base"] else {}
        with naming(names):
            config, lines = derived_settings(config, flatten(changes))
        print("\n".join(lines), file=sys.stderr)
    return config
