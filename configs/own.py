"""All four stages on problems of your own: a small GPT-2 from random weights that reads bytes, for an hour of CPU.

`--config.data.train=FILE`, `.valid` and `.eval.NAME` say where they are; a line of a .jsonl file is
`{"question": "Tom has 5 apples. He buys 3. How many now?", "steps": ["5 + 3 = 8"], "answer": "8"}`.
A longer question than the last of `prompt_slots` is named, in bytes; the step counts are small.
"""

from slpo_jax.config import default_config


def get_config():
    config = default_config()
    config.tokenizer = "bytes"
    config.model.update(n_layer=4, n_head=2, n_embd=64, n_positions=1024)
    config.max_latents = 6
    config.min_latents = 1
    config.prompt_slots = (96, 192, 448)
    config.max_answer_tokens = 16
    config.data.train = "my_train.jsonl"
    config.data.valid = "my_valid.jsonl"
    config.data.eval.mine = "my_test.jsonl"
    config.imitate.update(
        batch_size=8, c_thought=1, max_latent_stage=3, cot_steps=300, stage_steps=60, final_steps=500,
        final_latents="random", control=True,
    )  # fmt: skip
    config.imitate.optimizer.update(learning_rate=1e-3, warmup_steps=50, schedule="linear", final_fraction=0.1)
    config.cold_start.update(batch_size=8, micro_batches=1, steps=100, evaluate_every=50, patience=2)
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(batch_size=8, steps=30)
    config.objective.slpo.latent_reduction = "mean"
    config.rl.optimizer.update(name="adamw", learning_rate=3e-5, warmup_steps=10)
    config.evaluate.update(batch_size=256, samples=8, seeds=1)
    config.checkpoint_every = 200
    return config
