"""Operations modulo 10, each on the last's result: what are latents worth?

`7 * 3 + 9 * 7` goes from left to right, modulo 10. Two layers soon follow two operations by themselves; whether
they follow three, with a latent for each or without, depends on the seed. So the report shows what latents are worth
(against *no latents*, in the same steps), and whether the gate stops after as many latents as a problem has steps.
"""

from slpo_jax.config import default_config

DEPTH, MODULUS = 3, 10


def get_config():
    config = default_config()
    config.tokenizer = f"chain:{MODULUS}"
    config.model.update(n_layer=2, n_head=4, n_embd=64, n_positions=64)
    config.gate.detached = False
    config.max_latents = DEPTH + 1
    config.min_latents = 1
    config.prompt.answers = "texts"
    config.prompt_slots = (12,)
    config.max_answer_tokens = 3
    config.cpu_devices = 2
    config.data.chain.update(depth=DEPTH, modulus=MODULUS)
    config.data.train = "chain:train"
    config.data.valid = "chain:valid"
    for depth in range(1, DEPTH + 2):  # the last is one deeper than any that is trained on
        config.data.eval[f"depth_{depth}"] = f"chain:{depth}"

    config.imitate.update(
        batch_size=128, c_thought=1, max_latent_stage=DEPTH, cot_steps=1500, stage_steps=2000, final_steps=400,
        stage_until=0.98, final_latents="steps", suffix_slots=(4, 10, 16), dropout=0.0, no_thought=True,
    )  # fmt: skip
    # At a falling rate the last stage was not learned in these steps, with two operations modulo 13.
    config.imitate.optimizer.update(learning_rate=2e-3, warmup_steps=100, schedule="constant")
    config.cold_start.update(
        batch_size=64, micro_batches=1, steps=200, evaluate_every=50, patience=3, train_backbone=True
    )
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-4)
    config.stages = ("imitate", "cold_start", "evaluate")
    config.evaluate.update(batch_size=1024, prompt_multiple=4, samples=0)
    config.log_every = 50
    config.checkpoint_every = 500
    return config
