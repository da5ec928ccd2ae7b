"""Word problems: COCONUT until imitation has converged, then SLPO. arithmetic:hard.

Does SLPO beat its controls? A reasoner of width 32, which still fails a part of the problems when imitation has
converged. Imitation runs under dropout, as released GPT-2 reasoners were trained: without it, Pass@1 under dropout
starts so low that any training under dropout looks good (`launch/reproduce.py ablations` shows it). SLPO's learning
rate was chosen on the validation split.

`slpo train arithmetic:hard` has numbers to 99 and up to four steps; it fails more than half of these.
"""

from slpo_jax.config import default_config


def get_config(variant: str = ""):
    config = default_config()
    config.tokenizer = "synthetic:30"
    config.model.update(n_layer=2, n_head=2, n_embd=32, n_positions=64)
    config.max_latents = 6
    config.min_latents = 1
    config.prompt_slots = (24,)
    config.max_answer_tokens = 3
    config.data.train = "synthetic:train"
    config.data.valid = "synthetic:valid"
    config.data.eval.same = "synthetic:test"
    config.data.eval.large = "synthetic:large"
    config.data.eval.template = "synthetic:template"

    config.imitate.update(
        batch_size=64, c_thought=1, max_latent_stage=3, cot_steps=1500, stage_steps=500, final_steps=12_000,
        final_latents="random", dropout=0.1, control=True,
    )  # fmt: skip
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.02
    )
    config.cold_start.update(
        batch_size=32, micro_batches=1, steps=600, evaluate_every=100, patience=6
    )
    config.cold_start.optimizer.update(name="adamw", learning_rate=3e-3)
    config.rl.update(batch_size=32, steps=600, capacities=((0.625, 1.0), (1.0, 1.0)))
    config.objective.slpo.latent_reduction = "mean"
    # Validation, three seeds; and all rates that validation chose for SLPO on small reasoners are 1e-5 or 3e-5.
    config.rl.optimizer.update(name="adamw", learning_rate=3e-5, warmup_steps=20)
    config.evaluate.update(batch_size=1024, prompt_multiple=24)
    config.log_every = 20
    config.checkpoint_every = 1000
    if variant == "hard":
        config.tokenizer = "synthetic:99"
        config.prompt_slots = (28,)
        config.data.synthetic.update(max_value=99, max_steps=4)
        config.imitate.max_latent_stage = 4
    return config
