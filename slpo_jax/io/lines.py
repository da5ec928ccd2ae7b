"""Warnings of our own look as all other lines, in commands and in Python; those of others stay as they are."""

import logging as python_logging
import os
import sys
from pathlib import Path

from absl import logging

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def print_plainly() -> None:
    """Have warnings of our own printed as lines for as long as nobody has said where messages go.

    absl's `logging` begins with `basicConfig()` then, whose handler would put "WARNING:absl:" before them.
    """
    if not python_logging.root.handlers and _print not in (known := logging.get_absl_logger()).filters:
        known.addFilter(_print)


def _print(record: python_logging.LogRecord) -> bool:
    """Print it, or leave it to the handlers."""
    layouts = [getattr(handler.formatter, "_fmt", "") for handler in python_logging.root.handlers]
    if not record.pathname.startswith(_PACKAGE) or any(layout != python_logging.BASIC_FORMAT for layout in layouts):
        return True
    print(record.getMessage(), file=sys.stderr)
    return False
