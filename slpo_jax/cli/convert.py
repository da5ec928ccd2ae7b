"""`slpo export SRC DST` and `slpo import SRC DST`: checkpoints between Orbax and Hugging Face.

`python -m slpo_jax.cli.convert export|import SRC DST` is the same.

import  SRC (a Hugging Face directory or hub id, a torch, safetensors or GGUF file) -> DST, an Orbax checkpoint that
        `--config.init=DST` takes. A base model gets the reasoner's tokens; a gate is imported if there is one.
export  SRC (WORKDIR/checkpoints/STAGE, WORKDIR for its newest, or what import wrote) -> DST, a directory that
        `transformers.AutoModelForCausalLM.from_pretrained` opens and, with trust_remote_code=True, thinks with: its
        README.md has the lines. `reasoner.safetensors` beside the model has the gate (`gate.*`) and CODI's projector
        (`projector.{1,3,4}.*`, as in its published layout), `reasoner.json` the rest.

--explain keeps SIM-CoT's decoder both ways, in an export as `decoder.safetensors`.
"""

from pathlib import Path

from absl import flags

from slpo_jax.cli import reasoner_flags
from slpo_jax.cli.command import run_command
from slpo_jax.config.naming import FLAGS, naming
from slpo_jax.errors import UserError


def main(argv: list[str]) -> None:
    if len(argv) != 4 or argv[1] not in ("import", "export"):
        raise UserError("usage: slpo export SRC DST, or slpo import SRC DST; see --help")
    (_, action, source, target), values = argv, flags.FLAGS
    # Imports that take seconds wait until they are needed: --help comes at once.
    from slpo_jax.checkpoints.detect import identify, newest_checkpoint
    from slpo_jax.checkpoints.export import export_checkpoint, import_checkpoint
    from slpo_jax.config.config import Config
    from slpo_jax.io.files import check_free

    with naming(FLAGS | {"config.init": "SRC"}):
        if action == "export":
            source = newest_checkpoint(source)
            made = export_checkpoint(Path(source).expanduser(), Path(target).expanduser(), values.explain)
        else:
            check_free(Path(target).expanduser())
            identity = identify(source, values.base, values.lora_alpha)
            config = Config(tokenizer=values.tokenizer, reasoner=values.reasoner or identity.likely_reasoner)
            made = import_checkpoint(identity, Path(target).expanduser(), config, values.explain)
    said, model = made.description, made.description.model
    gate = "no gate" if said.gate is None else f"a {'trained' if said.gate_trained else 'random'} gate"
    name = f"{made.architecture.name}_{model.model_type}"
    print(f"{action}ed: {target}, from {source}: {name}, {model.n_layer} x {model.n_embd}, with {gate}")


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    reasoner_flags.define_options(("reasoner", "base", "tokenizer", "lora_alpha", "explain"))
    flags.adopt_module_key_flags(reasoner_flags)
    run_command(main, goes_on=False)


if __name__ == "__main__":
    run()
