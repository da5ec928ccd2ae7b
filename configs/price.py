"""The price of a thought: from six latents for every chain to as many as it needs.

Problems have one to three operations modulo 10, and imitation (SIM-CoT) gives each six latents, two for a step. The
cold start then teaches the gate to stop after the sixth alone. Rewards train gate and reasoner: 1 for a right answer,
and AdaLR's relative length, by which the right completions of a problem are compared. `configs/price.py:right` is the
control, of the same steps without the length.
"""

from slpo_jax.config import default_config
from slpo_jax.errors import UserError

DEPTH = 3
MODULUS = 10
LATENTS = 6
REWARDS = {
    "length": (("correct", 1.0), ("relative_length", 1.0)),
    "right": (("correct", 1.0),),
}


def get_config(rewards: str = "length"):
    if rewards not in REWARDS:
        raise UserError(
            f"--config: no rewards {rewards!r}; give one of {', '.join(REWARDS)}, as FILE:REWARDS"
        )
    config = default_config()
    config.tokenizer = f"chain:{MODULUS}"
    config.model.update(n_layer=2, n_head=4, n_embd=64, n_positions=64)
    config.gate.detached = False
    config.update(
        max_latents=LATENTS,
        min_latents=LATENTS,
        max_answer_tokens=3,
        prompt_slots=(12,),
    )
    config.prompt.answers = "texts"
    config.dropout.rate = 0.1
    config.data.chain.update(depth=DEPTH, modulus=MODULUS)
    config.data.train = "chain:train"
    config.data.valid = "chain:valid"
    for depth in range(1, DEPTH + 1):
        config.data.eval[f"depth_{depth}"] = f"chain:{depth}"

    config.imitate.update(
        recipe="simcot", batch_size=128, c_thought=LATENTS // DEPTH, max_latent_stage=DEPTH, cot_steps=1500,
        stage_steps=1500, final_steps=400, stage_until=0.98, final_latents="published", suffix_slots=(4, 10, 16),
        dropout=0.0,
    )  # fmt: skip
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="constant"
    )
    # The only candidate length is all six.
    config.cold_start.update(
        batch_size=64, micro_batches=1, steps=200, evaluate_every=50, patience=3
    )
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rewards = REWARDS[rewards]
    config.rl.update(batch_size=32, group=8, steps=600, temperature=1.0)
    # A group's differences are divided by their deviation: a ten-thousandth, where all are right, is learned from.
    config.objective.slpo.update(advantage="grpo", latent_reduction="mean")
    config.rl.optimizer.update(name="adamw", learning_rate=3e-4, warmup_steps=20)
    config.stages = ("imitate", "cold_start", "rl", "evaluate")
    config.evaluate.update(batch_size=1024, prompt_multiple=4, samples=8, seeds=1)
    config.log_every = 20
    config.checkpoint_every = 500
    return config
