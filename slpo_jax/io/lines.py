"""Warnings of our own look as all other lines, in commands and in Python; those of others stay as they are."""

import logging as python_logging
import os
import sys
from pathlib import Path

from absl import logging


def are_ours(record: python_logging.LogRecord) -> bool:
    """Whether this package says it."""
    return record.pathname.startswith(f"{Path(__file__).parents[1]}{os.sep}")


class Lines(logging.PythonFormatter):
    """Warnings of our own as what is printed, without time and place."""

    def format(self, record: python_logging.LogRecord) -> str:
        return record.getMessage() if are_ours(record) else super().format(record)


def print_plainly() -> None:
    """Have warnings of our own printed as lines for as long as nobody has said where messages go.

    absl's `logging` begins with `basicConfig()` then, whose handler would put "WARNING:absl:" before them.
    """
    if not python_logging.root.handlers and _print not in (known := logging.get_absl_logger()).filters:
        known.addFilter(_print)


def _print(record: python_logging.LogRecord) -> bool:
    """Print it, or leave it to the handlers."""
    layouts = [getattr(handler.formatter, "_fmt", "") for handler in python_logging.root.handlers]
    if not are_ours(record) or any(layout != python_logging.BASIC_FORMAT for layout in layouts):
        return True
    print(record.getMessage(), file=sys.stderr)
    return False
