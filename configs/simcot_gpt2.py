"""SIM-CoT (Wei et al., 2025) on GPT-2 (124M). simcot_gpt2:coconut or :codi.

Then the paper's cold start, SLPO and evaluation. `slpo train simcot_gpt2:coconut` (the default) goes on from a COCONUT
checkpoint of yours, `--config.init=..`: five stages of two latents, 3 epochs each, 32 epochs in all, the decoder beside
every stage. `:codi` trains CODI from GPT-2 itself with it, as published but for dropout of the adapters' inputs. Both
read GSM8K-Aug from `data/`, as `configs/coconut_gpt2.py`.
"""

from _presets import GSM8K_AUG, coconut_imitation, codi_imitation, paper
from slpo_jax.config import default_config


def get_config(reasoner: str = "coconut"):
    config = default_config()
    config.reasoner = f"{reasoner}_gpt2"
    paper(config, "data", cold_start_micro_batches=2, evaluation_batch=2048)
    if reasoner == "codi":
        config.init = config.base = "openai-community/gpt2"
        codi_imitation(config, epochs=40, learning_rate=3e-3)
        config.imitate.distil.distil_factor = 1.0
        config.imitate.update(micro_batches=2, max_tokens=1_000)
    else:
        config.init = "ModalityDance/latent-tts-coconut"
        coconut_imitation(config)
        batch = 64  # 8 on each of 8 devices
        epoch = -(-GSM8K_AUG // batch)
        config.imitate.update(
            batch_size=batch,
            max_latent_stage=5,
            cot_steps=0,
            stage_steps=3 * epoch,
            final_steps=17 * epoch,
        )
    config.imitate.update(recipe="simcot", dropout=0.1)  # GPT-2's own
    config.stages = ("imitate", "cold_start", "rl", "evaluate")
    return config
