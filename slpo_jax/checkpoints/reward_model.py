"""A reward model of latents that a checkpoint holds: of our stage latent_rm, or in the layout of its authors.

Theirs (`ModalityDance/latent-tts-rm`) is a language model without its head, under Hugging Face's names, the reasoner's
special tokens among its rows, and `classifier.weight` [1, D] and `classifier.bias`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from slpo_jax.architectures.tensors import open_tensors
from slpo_jax.architectures.weights import backbone_weights, linear, read_tree, refuse_leftovers
from slpo_jax.checkpoints.description import Description
from slpo_jax.checkpoints.foreign import locate
from slpo_jax.errors import UserError
from slpo_jax.io.orbax import difference, is_checkpoint, stored_params
from slpo_jax.models.parts import REASONER
from slpo_jax.models.reasoner import BACKBONE

_KEY = "config.evaluate.reward_model"


def read_reward_model(source: str, description: Description, like: Any) -> dict[str, Any]:
    """Its parameters.

    Args:
        source: a stage's checkpoint of ours, or a directory, file or hub id in the published layout.
        description: of the reasoner that it is to judge.
        like: shapes and types of the parameters that judge this reasoner.
    Raises:
        UserError: there is none, or it is of another reasoner.
    """
    path = Path(source).expanduser()
    if path.is_dir() and is_checkpoint(path):
        trained = stored_params(path)
        if what := difference(trained.shapes, like):
            raise UserError(
                f"{_KEY}: {source} is no reward model of this reasoner ({what}); give one that was trained on it"
            )
        return trained.read(like)
    stored = open_tensors(locate(source, _KEY))
    model = dataclasses.replace(description.model, tied=True)
    backbone, heads = backbone_weights(model), description.architecture.heads(model.n_embd)
    others = [*heads, *linear(("classifier",), "classifier", (1, model.n_embd))]
    try:
        tree, rest = read_tree(backbone, stored, source), read_tree(others, stored, source)
        refuse_leftovers([*backbone, *others], stored, model, source)
    except UserError as error:
        raise UserError(f"{_KEY}: is no reward model of this reasoner: {error}") from None
    classifier = rest.pop("classifier")
    return {REASONER: {BACKBONE: tree, **rest}, "classifier": classifier}
