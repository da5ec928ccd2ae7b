"""Countdown in minutes, on two CPU cores: COCONUT from random weights, then rewards.

The task is to reach a goal with all of three numbers, from left to right. Several answers are right, and a verifier
tells, which uses no key. A few thousand written solutions are imitated; then the verifier rewards answers to other
problems, and tests are apart from both. So the report shows what rewards are worth, against as many further steps of
imitation.
"""

from slpo_jax.config import default_config

GOAL = 99


def get_config():
    config = default_config()
    config.tokenizer = f"countdown:{GOAL}"
    config.model.update(n_layer=2, n_head=4, n_embd=64, n_positions=64)
    config.gate.detached = False
    config.max_latents = 2
    config.min_latents = 1
    config.prompt.answers = "texts"
    config.prompt_slots = (8,)
    config.max_answer_tokens = 7
    config.cpu_devices = 2
    config.data.countdown.update(numbers=(3, 3), largest=25, goal=GOAL, demos_size=4_000, train_size=7_000)
    config.data.demos = "countdown:demos"
    config.data.train = "countdown:train"
    config.data.valid = "countdown:valid"
    config.data.eval.test = "countdown:test"

    config.imitate.update(
        batch_size=128, c_thought=1, max_latent_stage=2, cot_steps=800, stage_steps=150, final_steps=300,
        final_latents="published", suffix_slots=(8, 14), dropout=0.0, control=True,
    )  # fmt: skip
    config.imitate.optimizer.update(learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.1)
    config.cold_start.update(
        batch_size=64, micro_batches=1, steps=60, evaluate_every=30, patience=3, train_backbone=True
    )
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-4)
    config.rl.update(batch_size=32, steps=200, capacities=((1.0, 1.0),), temperature=1.0)
    config.rl.objectives = ("answer_only", "slpo")  # `solve` asks the last
    config.objective.slpo.latent_reduction = "mean"
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    config.evaluate.update(batch_size=1024, prompt_multiple=8, samples=16)
    config.log_every = 50
    config.checkpoint_every = 500
    return config
