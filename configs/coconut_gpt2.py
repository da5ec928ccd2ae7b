"""The paper's settings for COCONUT on GPT-2 (124M): cold start, SLPO and evaluation (appendix A).

The paper's 16 prompts a device on 4 devices are the batch of 64; batches are sharded over whatever devices there are.
`--config=configs/coconut_gpt2.py:DIR` reads GSM8K-Aug (`train.txt`, lines "question||steps #### answer"),
`gsm_valid.json`, `gsm_test.json`, `gsm_hard.json` and `multiarith.json` from DIR; the default is `data`.
The published checkpoint brings its tokenizer; to start from another file without one, give
`--config.init=FILE --config.base=openai-community/gpt2`. COCONUT's own training starts from GPT-2 itself:
`--config.init=openai-community/gpt2 --config.stages="('imitate','cold_start','slpo','evaluate')"`.
"""

from slpo_jax.config import default_config


def get_config(folder: str = "data"):
    config = default_config()  # the defaults are the paper's; what follows names them again, so that they are in view
    config.reasoner = "coconut_gpt2"
    config.init = "ModalityDance/latent-tts-coconut"
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

    # COCONUT's own training, not run by default: 25 epochs of CoT-SFT, 3 of each stage, 13 of the last, at 128 a step.
    config.imitate.update(
        batch_size=128, micro_batches=1, c_thought=2, max_latent_stage=3, cot_steps=75_325, stage_steps=9_039,
        final_steps=39_169, final_latents="published", dropout=0.1, suffix_slots=(64,),
    )  # fmt: skip
    config.imitate.optimizer.update(
        name="adamw", learning_rate=1e-4, weight_decay=0.01, decay_vectors=True, clip_norm=None
    )

    # 15 epochs of GSM8K-Aug's 385,620 problems at 4 devices x 32 x 2 = 256 a step.
    config.cold_start.update(batch_size=256, micro_batches=2, trajectories=4, steps=22_595, evaluate_every=500)
    config.cold_start.update(patience=20)
    config.cold_start.optimizer.update(name="adafactor", learning_rate=1e-4)

    config.slpo.update(batch_size=64, group=8, passes=4, advantage="rloo", steps=40_000)
    config.slpo.optimizer.update(name="adafactor", learning_rate=1e-6, warmup_steps=2_000)

    config.evaluate.update(samples=16, seeds=3, batch_size=2048)
    return config
