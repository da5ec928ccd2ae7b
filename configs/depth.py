"""Chains of one to five operations, and a gate that ends the thought. depth:CELL.

`7 * 3 + 9 * 7 + 2 + 5` goes from left to right, modulo 10. Training mixes problems of one to five operations, and each
is a test set of its own. SIM-CoT's decoder says in words what each latent is to be, and the demonstrations teach the
gate when to stop. The other cells, `slpo train depth:CELL`, stand beside it:

* `simcot`, which is what runs without a cell: latents replace the operations one after the other, and each stage ends
  when 98 % of its rows are right.
* `none`: without latents, by the same demonstrations, in more steps than SIM-CoT needs.
* `cot`: chain of thought, which writes every operation out.
* `coconut`: as `simcot`, without the decoder.
"""

from slpo_jax.config import default_config
from slpo_jax.errors import UserError

DEPTH = 5
MODULUS = 10
CELLS = ("simcot", "none", "cot", "coconut")
WORDS = 6 * DEPTH  # the most tokens of written operations, six each


def get_config(cell: str = "simcot"):
    if cell not in CELLS:
        raise UserError(
            f"--config: {cell!r} is no cell of configs/depth.py; use one of {', '.join(CELLS)}"
        )
    config = default_config()
    config.tokenizer = f"chain:{MODULUS}"
    config.model.update(n_layer=2, n_head=4, n_embd=64, n_positions=128)
    config.min_latents = 1
    config.prompt.answers = "texts"
    config.prompt_slots = (2 * DEPTH + 10,)
    config.max_answer_tokens = 3
    config.data.chain.update(depth=DEPTH, modulus=MODULUS)
    config.data.train = "chain:train"
    config.data.valid = "chain:valid"
    for depth in range(1, DEPTH + 1):
        config.data.eval[f"depth_{depth}"] = f"chain:{depth}"

    config.imitate.update(
        batch_size=128, suffix_slots=tuple(range(4, WORDS + 4, 6)), dropout=0.0
    )
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="constant"
    )
    if cell in ("simcot", "coconut"):
        _think(config)
    else:
        config.max_latents = 0
        config.gate.enabled = False
        config.imitate.c_thought = 0
    if cell == "simcot":
        config.imitate.recipe = "simcot"
    elif cell == "none":
        config.imitate.update(
            cot_steps=800, max_latent_stage=DEPTH, stage_steps=700, final_steps=400
        )
    elif cell == "cot":
        config.imitate.update(cot_steps=1500, max_latent_stage=0, final_steps=0)
        config.max_answer_tokens = WORDS + 8
    config.stages = ("imitate", "evaluate")
    config.evaluate.update(batch_size=1024, prompt_multiple=4, samples=0)
    config.log_every = 50
    config.checkpoint_every = 500
    return config


def _think(config):
    """Have a latent for each operation, and the gate stop after the last."""
    config.max_latents = DEPTH + 1
    config.gate.detached = False
    config.imitate.update(
        c_thought=1, max_latent_stage=DEPTH, final_latents="steps", gate_weight=1.0,
        cot_steps=1500, stage_steps=1500, final_steps=400, stage_until=0.98,
    )  # fmt: skip
