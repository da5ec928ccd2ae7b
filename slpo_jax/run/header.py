"""The first line of a run, before anything is imported that takes a second."""

import sys
from pathlib import Path

from slpo_jax import __version__

_begun: list[str] = []  # workdirs that were said


def say_start(workdir: str | Path, config: str = "") -> None:
    """Say where it is, on standard error, once.

    Args:
        config: its name or file.
    """
    if str(workdir) not in _begun:
        _begun.append(str(workdir))
        named = f", config {config}" if config else ""
        print(f"slpo_jax {__version__}: workdir {workdir}{named}", file=sys.stderr, flush=True)
