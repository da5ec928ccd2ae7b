"""Few demonstrations, then rewards, in minutes on two CPU cores. quickstart:CELL.

`7 * 3 + 9 * 7 + 2` is worked out from left to right, modulo 10. A few hundred written solutions of one to four
operations are imitated by SIM-CoT, which teaches each latent to be a step. Then a verifier rewards answers to other
problems, all of four operations, and tests are apart from both. The report shows what rewards are worth, against as
many further steps of imitation.

    slpo train quickstart                                         imitation, further imitation, SLPO
    slpo train quickstart:all --workdir=runs/all                  also answer_only, replay, and SFT on keys
    slpo train quickstart:no_latents --workdir=runs/no_latents    rewards without latents
    slpo train quickstart:cot --workdir=runs/cot                  rewards with written steps, by GRPO

With `,tune` after a cell (`quickstart:tune` for the first) each objective is trained at every rate of `TRIED` and
evaluated on the validation problems alone; `RATES` are the best of those (`launch/reproduce.py quickstart_rates`).
"""

from slpo_jax.config import default_config, objective_variant, variant_name
from slpo_jax.errors import UserError

DEMOS = 600
BACKBONE = "gpt2"
OPERATIONS = 4
MODULUS = 10
COT_STEPS = 800
STAGE_STEPS = 500
FINAL_STEPS = 100  # at most; without latents all of them are taken
REWARD_STEPS = 400  # of each objective, and of further imitation
TRIED = (1e-4, 3e-4, 1e-3)
# By name: the objective and its settings. The first is a control: no reward, but a key to each problem of the rewards.
OBJECTIVES = {
    "keys": ("pathwise", {"estimator": "mixture", "mixture_weight": 0.0}),
    "answer_only": ("answer_only", {}),
    "slpo": ("slpo", {"latent_reduction": "mean"}),
    "replay": ("pathwise", {"estimator": "reward"}),
    "grpo": ("grpo", {"reduction": "sequence_mean"}),
}
RATES = {
    "further": 3e-4, "keys": 3e-4, "answer_only": 1e-4, "slpo": 3e-4, "replay": 3e-4,
    "no_latents: answer_only": 3e-4, "cot: grpo": 3e-4,
}  # fmt: skip
# By cell, the objectives that are trained; `solve` asks the last.
CELLS = {
    "": ("slpo",),
    "all": ("keys", "answer_only", "slpo", "replay"),
    "no_latents": ("answer_only",),
    "cot": ("grpo",),
}


def get_config(cell: str = ""):
    name, _, more = ("", "", cell) if cell == "tune" else cell.partition(",")
    if name not in CELLS or more not in ("", "tune"):
        raise UserError(
            f"configs/quickstart.py:{cell}: no such cell; give none or one of {', '.join(filter(None, CELLS))}, then "
            "nothing or ,tune"
        )
    tunes = more == "tune"
    thinks = name in ("", "all")
    config = default_config()
    config.reasoner = f"coconut_{BACKBONE}"
    config.tokenizer = f"chain:{MODULUS}"
    config.model.update(n_layer=2, n_head=4, n_embd=64, n_positions=64)
    config.gate.enabled = False
    config.min_latents = 1
    config.max_latents = OPERATIONS if thinks else 0
    config.prompt.answers = "texts"
    config.prompt_slots = (2 * OPERATIONS + 4,)
    config.max_answer_tokens = 3
    config.data.chain.update(
        depth=OPERATIONS,
        least_depth=OPERATIONS,
        modulus=MODULUS,
        demos_size=DEMOS,
        train_size=8_500,
    )
    config.data.demos = "chain:demos"
    config.data.train = "chain:train"
    config.data.valid = "chain:valid"
    test = "valid" if tunes else "test"
    config.data.eval[test] = f"chain:{test}"

    config.stages = ("imitate", "rl", "evaluate")
    config.imitate.update(
        batch_size=128, c_thought=0, max_latent_stage=OPERATIONS, cot_steps=COT_STEPS, stage_steps=STAGE_STEPS,
        final_steps=FINAL_STEPS, suffix_slots=tuple(range(4, 6 * OPERATIONS + 4, 6)), dropout=0.1,
    )  # fmt: skip
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="constant"
    )
    if thinks:
        config.imitate.update(
            recipe="simcot", c_thought=1, stage_until=0.98, final_latents="steps"
        )
        config.imitate.simcot.keep = True
        if not tunes:
            config.imitate.update(control=True, control_rate=RATES["further"])
    elif name == "cot":
        config.imitate.update(max_latent_stage=0, cot_steps=1_500, final_steps=0)
        config.max_answer_tokens = 6 * OPERATIONS + 8
        # GRPO's ratios are of one policy, without dropout; Pass@k is under dropout as of all.
        config.dropout.rate = 0.0
        config.evaluate.dropout = 0.1

    config.rl.update(
        batch_size=32,
        steps=REWARD_STEPS,
        capacities=((1.0, 1.0),),
        temperature=1.0,
        objectives=(),
    )
    config.rl.optimizer.update(name="adamw", learning_rate=3e-4, warmup_steps=20)
    for objective in CELLS[name]:
        kind, settings = OBJECTIVES[objective]
        rate = RATES[objective if thinks else f"{name}: {objective}"]
        for each in TRIED if tunes else (rate,):
            named = variant_name(objective, each) if tunes else objective
            objective_variant(config, named, kind, learning_rate=each, **settings)
            config.rl.objectives = (*config.rl.objectives, named)
    config.evaluate.update(batch_size=1024, prompt_multiple=4, samples=16, seeds=1)
    config.log_every = 50
    config.checkpoint_every = 10_000
    return config
