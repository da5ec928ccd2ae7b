"""The flags of the commands that use a reasoner, and the reasoner that they name."""

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from absl import flags

from slpo_jax.config.load_options import LoadOptions
from slpo_jax.errors import UserError

if TYPE_CHECKING:
    from slpo_jax.api.reasoner import TrainedReasoner


def define_options(names: Collection[str]) -> None:
    """A flag for each option of these names; not on import: commands share them."""
    hints = get_type_hints(LoadOptions)
    for field in dataclasses.fields(LoadOptions):
        if field.name not in names:
            continue
        kinds, limits = get_args(hints[field.name]) or (hints[field.name],), field.metadata["limits"]
        what: Any = (field.name, field.default, field.metadata["about"])
        bounds: Any = (limits.least, limits.most)
        if int in kinds:
            flags.DEFINE_integer(*what, *bounds)
        elif float in kinds:
            flags.DEFINE_float(*what, *bounds)
        elif bool in kinds:
            flags.DEFINE_bool(*what)
        elif str in kinds:
            flags.DEFINE_string(*what)
        else:
            flags.DEFINE_enum(field.name, None, list(filter(None, kinds)), what[2])


def define_flags(samples: int, explain: bool = False) -> None:
    """Those of asking a checkpoint.

    Args:
        samples: the default of --samples.
        explain: whether it can be asked to say latents in words.
    """
    flags.DEFINE_string(
        "checkpoint", None, "WORKDIR, WORKDIR/checkpoints/STAGE, a Hugging Face directory, hub id, file."
    )
    flags.DEFINE_integer("samples", samples, "Rollouts under the noise of the run's evaluation.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Of the noise of --samples.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_bool("json", False, "Print one JSON object instead.")
    define_options([name for name in get_type_hints(LoadOptions) if explain or name != "explain"])


def load_requested() -> "TrainedReasoner":
    """The reasoner that the flags name.

    Raises:
        UserError: there is none, or it can't be used so.
    """
    values = flags.FLAGS
    if not values.checkpoint:
        raise UserError("--checkpoint: not given; give WORKDIR, WORKDIR/checkpoints/STAGE or a Hugging Face directory")
    from slpo_jax.api.reasoner import load  # takes seconds, for which --help need not wait

    asked = {name: values[name].value for name in get_type_hints(LoadOptions) if name in values}
    return load(values.checkpoint, **{name: value for name, value in asked.items() if value is not None})
