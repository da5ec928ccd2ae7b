"""Which of two ends does a chain of edges reach? What latents and rewards are worth.

From random weights to rewards, on two CPU cores. Both ends lie equally deep, so that every edge has to be followed, one
after the other. Two layers follow one edge surely by themselves, and two edges sooner with a latent or two; with more
steps they learn two edges without. So the report shows what latents save (against *no latents*, in the same steps),
when the gate stops, and what rewards add.
"""

from slpo_jax.config import default_config

DEPTH = 2


def get_config():
    config = default_config()
    config.tokenizer = "graph:8"
    config.model.update(n_layer=2, n_head=8, n_embd=64, n_positions=64)
    config.gate.detached = False
    config.max_latents = DEPTH + 1
    config.min_latents = 1
    config.prompt.answers = "texts"
    config.prompt_slots = (16,)
    config.max_answer_tokens = 3
    config.cpu_devices = 2
    config.data.graph.update(depth=DEPTH, nodes=8)
    config.data.train = "graph:train"
    config.data.valid = "graph:valid"
    for depth in range(
        1, DEPTH + 2
    ):  # the last is one deeper than any that is trained on
        config.data.eval[f"depth_{depth}"] = f"graph:{depth}"

    config.imitate.update(
        batch_size=128, c_thought=1, max_latent_stage=DEPTH, cot_steps=1500, stage_steps=1500, final_steps=400,
        stage_until=0.98, final_latents="steps", dropout=0.0, control=True, no_thought=True,
    )  # fmt: skip
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="constant"
    )
    config.cold_start.update(
        batch_size=64,
        micro_batches=1,
        steps=200,
        evaluate_every=50,
        patience=3,
        train_backbone=True,
    )
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-4)
    config.rl.update(
        batch_size=32, steps=200, capacities=((0.75, 1.0), (1.0, 1.0))
    )  # answers fill their three slots
    config.rl.objectives = ("slpo", "pathwise")
    config.objective.slpo.latent_reduction = "mean"
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    config.evaluate.update(batch_size=1024, prompt_multiple=16, samples=16)
    config.log_every = 50
    config.checkpoint_every = 500
    return config
