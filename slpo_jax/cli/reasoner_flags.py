"""The flags of the commands that use a reasoner, and the reasoner that they name."""

from typing import TYPE_CHECKING

from absl import flags

from slpo_jax.data.speed import MOST_SPEED
from slpo_jax.errors import UserError

if TYPE_CHECKING:
    from slpo_jax.api.reasoner import TrainedReasoner


def define_flags(samples: int) -> None:
    """Not on import: other commands have flags of the same names.

    Args:
        samples: the default of --samples.
    """
    flags.DEFINE_string(
        "checkpoint", None, "WORKDIR, WORKDIR/checkpoints/STAGE, a Hugging Face directory, hub id, file."
    )
    flags.DEFINE_integer("samples", samples, "Rollouts under the noise of the run's evaluation.", lower_bound=0)
    flags.DEFINE_float("threshold", None, "Of the gate; default: the one chosen in the run, or 0.5.", 0.0, 1.0)
    flags.DEFINE_integer("latents", None, "A fixed number of latents, instead of the gate.", lower_bound=0)
    flags.DEFINE_integer("max_answer_tokens", None, "Default: the run's, or 16.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the noise of --samples.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_string("reasoner", "", "Such as coconut_gpt2; default: what the checkpoint says.")
    flags.DEFINE_string("latent_policy", "", "Of a thought's steps, such as soft; default: the run's.")
    flags.DEFINE_string("instruction", "", "After the question, to a text reasoner; default: the run's.")
    flags.DEFINE_enum(
        "answers",
        None,
        ["auto", "last_number", "boxed", "texts"],
        "How a text reasoner's answer is read; default: the run's.",
    )
    flags.DEFINE_integer("speed", None, "That CoLaR is asked to think at; default: the run's.", 1, MOST_SPEED)
    flags.DEFINE_string("base", "", "Base model's directory or hub id, for a file without config and tokenizer.")
    flags.DEFINE_string("tokenizer", "", "Directory or hub id; default: the checkpoint's or the base's.")
    flags.DEFINE_float("lora_alpha", None, "Scale of LoRA adapters times their rank (CODI's published: 32).")
    flags.DEFINE_bool("json", False, "Print one JSON object instead.")


def load_requested(explain: bool = False) -> "TrainedReasoner":
    """The reasoner that the flags name.

    Args:
        explain: see `slpo_jax.load`.
    Raises:
        UserError: there is none, or it can't be used so.
    """
    values = flags.FLAGS
    if not values.checkpoint:
        raise UserError("--checkpoint: not given; give WORKDIR, WORKDIR/checkpoints/STAGE or a Hugging Face directory")
    from slpo_jax.api.reasoner import load  # takes seconds, for which --help need not wait

    names = ("threshold", "latents", "max_answer_tokens", "reasoner", "base", "tokenizer", "lora_alpha",
             "latent_policy", "instruction", "speed")  # fmt: skip
    asked = {name: getattr(values, name) for name in names}
    return load(values.checkpoint, answers=values.answers or "", explain=explain, **asked)
