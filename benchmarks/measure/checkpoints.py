"""Benchmarks of trained checkpoints: which, and opening them."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.workload import ROOT, load_file
from slpo_jax.errors import UserError
from slpo_jax.run.experiment import Setup, assemble


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The checkpoints and --config."""
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="e.g. WORKDIR/checkpoints/slpo")
    parser.add_argument("--config", required=True, help="what they were trained with: FILE or FILE:ARGUMENT")


def check_paths(flags: argparse.Namespace) -> None:
    """Whether they are there.

    Raises:
        UserError: one is not, or the config file can't be used.
    """
    for path in flags.checkpoints:
        if not path.is_dir():
            raise UserError(f"{path}: no such checkpoint; give WORKDIR/checkpoints/STAGE")
    if not (ROOT / flags.config.partition(":")[0]).is_file():
        raise UserError(f"--config: {flags.config} is no file in the checkout; give e.g. configs/twelve.py:codi_gpt2")
    try:
        load_file(flags.config)
    except UserError:
        raise
    except Exception as error:  # the config file is the user's code, and can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"--config: {flags.config} can't be used ({reason}); give e.g. configs/quickstart.py") from None


def opened(flags: argparse.Namespace, changes: Mapping[str, Any]) -> Iterator[tuple[Path, Setup]]:
    """Each checkpoint's path and setup, whose initial parameters are the checkpoint's.

    Args:
        changes: of the config, by key.
    """
    for path in flags.checkpoints:
        config = load_file(flags.config)
        config.update_from_flattened_dict(changes)
        config.init = str(path)
        yield path, assemble(config)


def name_of(path: Path) -> str:
    """A checkpoint's, for a table: of its run's folder and its stage."""
    return f"{path.resolve().parent.parent.name}, {path.name}"
