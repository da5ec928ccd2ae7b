"""The paper's settings for CODI on Llama-3.2-1B-Instruct: cold start, SLPO and evaluation (appendix A).

The paper's 16 prompts a device on 4 devices are the batch of 64; batches are sharded over whatever devices there are.
`--config=configs/codi_llama1b.py:DIR` reads GSM8K-Aug (`train.txt`, lines "question||steps #### answer"),
`gsm_valid.json`, `gsm_test.json`, `gsm_hard.json` and `multiarith.json` from DIR; the default is `data`.
CODI's own training starts from the base model:
`--config.init=meta-llama/Llama-3.2-1B-Instruct --config.stages="('imitate','cold_start','slpo','evaluate')"`.
It is the published one but for the learning rate's way down, which is linear here and a cosine there, and dropout of
the adapters' inputs (0.1), which adapters that are merged before they are used can't have.
"""

from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()  # the defaults are the paper's; what follows names them again, so that they are in view
    config.reasoner = "codi_llama"
    config.init = "zen-E/CODI-llama3.2-1b-Instruct"
    config.base = "meta-llama/Llama-3.2-1B-Instruct"
    config.lora_alpha = 32.0  # of the published file's adapters
    config.model.update(dtype="bfloat16", remat=True)
    config.stages = ("cold_start", "slpo", "evaluate")
    config.max_latents = 12
    config.min_latents = 3
    config.dropout.rate = 0.1
    config.prompt_slots = (64, 128, 256)
    config.max_answer_tokens = 16

    config.data.train = f"{folder}/train.txt"
    config.data.valid = f"{folder}/gsm_valid.json"
    config.data.eval.gsm8k = f"{folder}/gsm_test.json"
    config.data.eval.gsm_hard = f"{folder}/gsm_hard.json"
    config.data.eval.multiarith = f"{folder}/multiarith.json"

    # CODI's own training, not run by default: 10 epochs at 128 a step, of which 3% are warm-up.
    config.imitate.update(
        batch_size=128, micro_batches=4, c_thought=2, max_latent_stage=3, cot_steps=0, final_steps=30_130,
        final_latents="published", dropout=0.0, suffix_slots=(128, 192), max_tokens=200, teacher_factor=1.0,
        distil_factor=20.0, last_step=False,
    )  # fmt: skip
    config.imitate.lora.update(rank=128, alpha=32.0)
    config.imitate.optimizer.update(
        name="adamw", learning_rate=8e-4, schedule="linear", warmup_steps=904, weight_decay=0.1, clip_norm=2.0
    )

    # 15 epochs of GSM8K-Aug's 385,620 problems at 4 devices x 8 x 8 = 256 a step.
    config.cold_start.update(batch_size=256, micro_batches=8, trajectories=4, steps=22_595, evaluate_every=500)
    config.cold_start.update(patience=20)
    config.cold_start.optimizer.update(name="adafactor", learning_rate=1e-4)

    config.slpo.update(batch_size=64, group=8, passes=4, advantage="rloo", steps=40_000)
    config.slpo.optimizer.update(name="adafactor", learning_rate=1e-6, warmup_steps=2_000)

    config.evaluate.update(samples=16, seeds=3, batch_size=256)
    return config
