"""Countdown: a reasoner, then a verifier's rewards. countdown:REASONER_BACKBONE.

The task is to reach a goal with all of three numbers, from left to right. Several answers are right, and a verifier
tells, which uses no key. `slpo train countdown` trains COCONUT on a tiny Llama, and rewards it with and without PKPO's
advantages.

`slpo train countdown:REASONER_BACKBONE`, e.g. `codi_llama`, imitates a few thousand solutions from nothing, and then
each objective from where imitation ended, in as many steps as further imitation takes. Solutions to imitate, problems
of the rewards and tests are all apart by numbers and goal. There is no gate: all latent reasoners think a latent for
each operation.

With `coconut_BACKBONE,beyond` demonstrations have three and four numbers, problems of the rewards three to five, and
tests three, four or five. With `REASONER_BACKBONE,tune` it evaluates on the validation problems alone, and trains each
objective at every rate of `TRIED`; `RATES` are the best of those (`launch/reproduce.py countdown_rates`).
"""

from slpo_jax.config import default_config, objective_variant, variant_name
from slpo_jax.errors import UserError

NUMBERS = 3
GOAL = 99
BEYOND = (3, 5)
TRIED = (3e-5, 1e-4, 3e-4)
_STAGED = {
    "max_latent_stage": NUMBERS - 1,
    "cot_steps": 800,
    "stage_steps": 150,
    "final_steps": 300,
}
# By name: the architecture, keys of config.imitate, tokens of an answer.
REASONERS = {
    "coconut": ("coconut", _STAGED | {"c_thought": 1}, 7),
    "codi": (
        "codi",
        {
            "c_thought": 1,
            "max_latent_stage": NUMBERS - 1,
            "cot_steps": 0,
            "final_steps": 700,
        },
        11,
    ),
    "no_thought": ("coconut", _STAGED | {"c_thought": 0}, 7),
    "cot_sft": (
        "coconut",
        {"c_thought": 0, "max_latent_stage": 0, "cot_steps": 1400},
        20,
    ),
}
# By name: the objective and its settings. The first is a control: no reward, but a key to each problem of the rewards.
OBJECTIVES = {
    "keys": ("pathwise", {"estimator": "mixture", "mixture_weight": 0.0}),
    "slpo_sum": ("slpo", {"latent_reduction": "sum"}),
    "slpo": ("slpo", {"latent_reduction": "mean"}),
    "answer_only": ("answer_only", {}),
    "answer_only_pkpo": ("answer_only", {"advantage": "pkpo"}),
    "replay": ("pathwise", {"estimator": "reward"}),
    "slpo_pkpo": ("slpo", {"latent_reduction": "mean", "advantage": "pkpo"}),
    "replay_pkpo": ("pathwise", {"estimator": "reward", "advantage": "pkpo"}),
    "grpo": ("grpo", {"reduction": "sequence_mean"}),
}
DEFAULT = (
    "keys",
    "answer_only",
    "answer_only_pkpo",
    "slpo",
    "slpo_pkpo",
)  # of these, in `slpo train countdown`
RATES = dict.fromkeys(OBJECTIVES, 1e-4) | {
    "slpo": 3e-5,
    "answer_only": 3e-4,
    "replay": 3e-4,
    "replay_pkpo": 3e-5,
}


def get_config(cell: str = ""):
    is_default = not cell
    cell = cell or "coconut_llama"
    cell, _, more = cell.partition(",")
    name, _, backbone = cell.rpartition("_")
    mores = ("", "tune", "beyond") if name == "coconut" else ("", "tune")
    if name not in REASONERS or backbone not in ("gpt2", "llama") or more not in mores:
        raise UserError(
            f"configs/countdown.py:{cell}{',' * bool(more)}{more}: no such cell; give one of {', '.join(REASONERS)}, "
            "then _gpt2 or _llama, then nothing or ,tune or of coconut ,beyond"
        )
    tunes = more == "tune"
    architecture, imitate, answer_tokens = REASONERS[name]
    config = default_config()
    config.reasoner = f"{architecture}_{backbone}"
    config.tokenizer = f"countdown:{GOAL}"
    config.model.update(n_layer=2, n_head=4, n_embd=64, n_positions=64)
    config.gate.enabled = False
    config.min_latents = 1
    config.max_latents = imitate["c_thought"] * imitate["max_latent_stage"]
    config.prompt.answers = "texts"
    config.prompt_slots = (8,)
    config.max_answer_tokens = answer_tokens
    config.cpu_devices = 2 if is_default else 1
    config.data.countdown.update(
        numbers=(NUMBERS, NUMBERS),
        largest=25,
        goal=GOAL,
        demos_size=4_000,
        train_size=7_000,
    )
    config.data.demos = "countdown:demos"
    config.data.train = "countdown:train"
    config.data.valid = "countdown:valid"
    test = "valid" if tunes else "test"
    config.data.eval[test] = f"countdown:{test}"

    config.stages = ("imitate", "rl", "evaluate")
    config.imitate.update(
        batch_size=128,
        final_latents="published",
        suffix_slots=(8, 14),
        control=not tunes,
        **imitate,
    )
    config.imitate.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, schedule="linear", final_fraction=0.1
    )
    config.imitate.distil.distil_factor = 1.0
    if more == "beyond":
        _beyond(config)
    objectives = (
        DEFAULT if is_default else [each for each in OBJECTIVES if each != "grpo"]
    )
    if not config.max_latents:  # GRPO's ratios are of one policy, without dropout; Pass@k is under dropout as of all
        config.dropout.rate = 0.0
        config.evaluate.dropout = 0.1
        objectives = ["grpo"]
    config.rl.update(
        batch_size=32,
        steps=200,
        capacities=((1.0, 1.0),),
        temperature=1.0,
        objectives=(),
    )
    config.rl.optimizer.update(name="adamw", learning_rate=1e-4, warmup_steps=20)
    for objective in objectives:
        kind, settings = OBJECTIVES[objective]
        for rate in TRIED if tunes else (RATES[objective],):
            named = variant_name(objective, rate) if tunes else objective
            objective_variant(config, named, kind, learning_rate=rate, **settings)
            config.rl.objectives = (*config.rl.objectives, named)
    config.evaluate.update(
        batch_size=1024, prompt_multiple=8, samples=16, seeds=1, probed=0
    )
    config.log_every = 50
    config.checkpoint_every = 10_000
    return config


def _beyond(config) -> None:
    """Demonstrations of three and four numbers, rewards for three to five, tests of each."""
    fewest, most = BEYOND
    config.max_latents = most - 2  # one for each operation of the longest demonstration
    config.imitate.update(
        max_latent_stage=most - 2,
        cot_steps=1200,
        final_steps=400,
        suffix_slots=(9, 15, 21, 27),
    )
    config.prompt_slots = (10,)
    config.max_answer_tokens += 2 * (most - NUMBERS)
    config.data.countdown.update(
        numbers=BEYOND,
        demo_numbers=(fewest, most - 1),
        demos_size=12_000,
        train_size=20_000,
    )
    config.data.eval = {}
    config.data.eval.update(
        {str(count): f"countdown:{count}" for count in range(fewest, most + 1)}
    )
