"""Chains of three operations: one of nine reasoners, in equal time. chains:REASONER.

`slpo train chains:simcot_codi` trains a tiny GPT-2 from nothing on `7 * 3 + 9 * 7`, from left to right, modulo 10.
Problems have one to three operations; each number of operations is a test set, and so is one more than is trained on.
There are no rewards and no gate. COCONUT and CODI have a latent for each operation, and so have their SIM-CoTs; CoLaR,
ReGuLaR and AdaLR stop by themselves. `none` has no latents, and `cot` writes each operation out.

Every reasoner gets as many steps as take about four minutes on one CPU core. Where a recipe has stages, a stage ends
when 98 % of its rows are right, or at its share of the steps. Nothing here was tuned: all have the learning rate of
`configs/depth.py`.
"""

from _presets import colar_thought
from slpo_jax.config import default_config
from slpo_jax.errors import UserError

OPERATIONS = 3
MODULUS = 10
WORDS = 6 * OPERATIONS  # tokens of written operations
_CURRICULUM = {"c_thought": 1, "max_latent_stage": OPERATIONS}
# A latent of AdaLR's for each operation.
_ADAPTIVE = {
    "recipe": "adalr",
    "c_thought": 0,
    "max_latent_stage": 0,
    "adalr.latents": 0,
    "adalr.latents_a_step": 1,
    "adalr.most": OPERATIONS + 1,
}
# By name: the architecture; keys of config.imitate; steps in four minutes; how they are shared among the words, each
# stage and the last; tokens of an answer.
REASONERS = {
    "none": ("coconut", {"c_thought": 0, "max_latent_stage": OPERATIONS}, 4500, (3, 2, 1), 3),
    "cot": ("coconut", {"c_thought": 0, "max_latent_stage": 0}, 1850, (1, 0, 0), WORDS + 8),
    "coconut": ("coconut", _CURRICULUM, 2400, (3, 2, 1), 3),
    "simcot_coconut": ("coconut", _CURRICULUM | {"recipe": "simcot"}, 1600, (3, 2, 1), 3),
    "codi": ("codi", _CURRICULUM, 1300, (0, 0, 1), 7),
    "simcot_codi": ("codi", _CURRICULUM | {"recipe": "simcot"}, 950, (0, 0, 1), 7),
    "colar": ("colar", _CURRICULUM | {"recipe": "colar"}, 1750, (1, 0, 1), 4),
    "regular": ("colar", _CURRICULUM | {"recipe": "regular"}, 2000, (1, 0, 1), 4),
    "adalr": ("adalr", _ADAPTIVE, 1300, (1, 0, 3), 7),
}  # fmt: skip
_TOKENS_A_LATENT = 3  # CoLaR's: two latents an operation


def get_config(name: str = "simcot_coconut"):
    if name not in REASONERS:
        known = ", ".join(REASONERS)
        raise UserError(
            f"configs/chains.py:{name}: no such reasoner; give one of {known}"
        )
    architecture, imitate, steps, shares, answer_tokens = REASONERS[name]
    config = default_config()
    config.reasoner = f"{architecture}_gpt2"
    config.tokenizer = f"chain:{MODULUS}"
    config.model.update(n_layer=2, n_head=4, n_embd=64, n_positions=128)
    config.gate.enabled = False
    config.min_latents = 1
    config.max_latents = OPERATIONS * imitate["c_thought"]
    config.dropout.rate = 0.0
    config.prompt.answers = "texts"
    config.prompt_slots = (32,)
    config.max_answer_tokens = answer_tokens
    config.data.chain.update(depth=OPERATIONS, modulus=MODULUS)
    config.data.train = "chain:train"
    config.data.valid = "chain:valid"
    for depth in range(1, OPERATIONS + 2):
        config.data.eval[f"depth_{depth}"] = f"chain:{depth}"

    # A batch has slots for the words that its stage leaves.
    config.imitate.update(
        batch_size=128,
        suffix_slots=tuple(range(4, WORDS + 16, 6)),
        dropout=0.0,
        final_latents="published",
    )
    config.imitate.update_from_flattened_dict(imitate)
    words, stage, last = shares
    share = steps // (words + stage * config.imitate.max_latent_stage + last)
    config.imitate.update(
        cot_steps=words * share,
        stage_steps=stage * share,
        final_steps=last * share,
    )
    # The other recipes say themselves when a phase ends.
    if imitate.get("recipe", "simcot") == "simcot":
        config.imitate.stage_until = 0.98
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="constant"
    )
    config.imitate.distil.distil_factor = 1.0
    config.imitate.adalr.distil_factor = 1.0

    if architecture == "colar":
        by_chunks = name == "colar"
        latents = -(-WORDS // _TOKENS_A_LATENT) if by_chunks else OPERATIONS
        colar_thought(config, latents)
        config.model.update(scale=0.2)  # near the standard deviation of its embeddings
        config.prompt.speed = _TOKENS_A_LATENT if by_chunks else 1
    elif architecture == "adalr":
        config.latent_policy.name = "adalr"
        config.max_latents = OPERATIONS + 1

    config.stages = ("imitate", "evaluate")
    config.evaluate.update(batch_size=1024, prompt_multiple=4, samples=0)
    config.log_every = 50
    config.checkpoint_every = 10_000
    return config
