"""The config of a run: its keys, what they may be, and where they are read from."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # of what `__getattr__` finds
    from slpo_jax.config.config import (
        Config,
        default_config,
        objective_variant,
        read_config,
        variant_name,
    )

__all__ = [
    "Config",
    "default_config",
    "objective_variant",
    "read_config",
    "variant_name",
]


def __getattr__(name: str) -> Any:
    """Import what stands in `__all__`, and jax with it, when it is asked for: `registry` lists configs without."""
    if name not in __all__:
        raise AttributeError(f"module 'slpo_jax.config' has no attribute {name!r}")
    return getattr(importlib.import_module("slpo_jax.config.config"), name)
