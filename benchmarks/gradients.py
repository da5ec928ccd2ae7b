"""`python -m benchmarks.gradients CHECKPOINT.. [--batches=N] [--further=N] [--right=1,2,4,6] [--json=FILE]`.

Whether SLPO's latent term points where the reward does, by the number of right answers that a problem of Countdown has.
A rollout is a function of parameters and dropout masks, so replaying it has the reward's exact gradient; less what goes
past the latents, through the answer alone, that is what the latent term stands for. Both are of the same rollouts.

- exact: cosine of that gradient's mean over --batches with its mean over --further, of other problems: the most that
  can be seen with so many
- SLPO: the same of the latent term's mean over --batches
- noise: standard deviation over batches of the latent term's length along the exact mean, in units of that

Each checkpoint is one training seed; ± is the standard error over them.
"""

import argparse
import dataclasses
import functools
import sys
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

import slpo_jax
from benchmarks.measure.report import (
    Parser,
    check_flags,
    format_facts,
    machine,
    markdown_table,
    run_command,
)
from slpo_jax.config.config import rl_of
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.models.parts import REASONER
from slpo_jax.policy import noise
from slpo_jax.policy.advantage import rloo
from slpo_jax.policy.noise import PassKeys
from slpo_jax.policy.policy import Policy, PromptedBatch, repeat_rows
from slpo_jax.policy.score import score
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_rl import training_policy
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.objectives.objective import policy_gradient_loss
from slpo_jax.training.rollouts import make_batch, roll_out

FIGURES = ("exact", "SLPO", "noise")
_WHOLE = OBJECTIVES["pathwise"](estimator="reward", temperature=1.0, stop_weight=0.0)
_LATENT = OBJECTIVES["slpo"](temperature=1.0, answer_weight=0.0, stop_weight=0.0)


def gradients(
    policy: Policy,
    params: Any,
    batch: PromptedBatch,
    verifier: Any,
    group: int,
    key: jax.Array,
):
    """float32 [2, parameters of the reasoner]: the reward's exact gradient through the latents, and the latent term's.

    Args:
        verifier: of completions, on the device.
        group: G, rollouts a prompt.
        key: of the step.
    """
    trajectories, rewards_BG = roll_out(policy, params, batch, verifier, group, key)

    def past_latents(params):
        keys = PassKeys(
            trajectories.keys, trajectories.keys
        )  # masks of the prompts are each rollout's own
        scores = score(
            policy, params, repeat_rows(batch.prompts, group), trajectories, keys
        )
        return policy_gradient_loss(
            ((1.0, scores.answer_log_prob),), jax.vmap(rloo)(rewards_BG)
        )

    def of(objective):
        return lambda params: objective(
            policy, params, batch, trajectories, rewards_BG, jax.random.fold_in(key, 1)
        )[0]

    whole, past, latent = (
        ravel_pytree(jax.grad(loss)(params)[REASONER])[0]
        for loss in (of(_WHOLE), past_latents, of(_LATENT))
    )
    return jax.numpy.stack([whole - past, latent])


def measure(
    setup: Setup, params: Any, problems: EncodedProblems, flags: argparse.Namespace
) -> tuple[float, ...]:
    """`FIGURES` on these problems."""
    config = setup.config
    policy = training_policy(setup, rl_of(config.rl, _WHOLE))
    take = jax.jit(
        functools.partial(gradients, policy), static_argnames=("verifier", "group")
    )

    def taken(step: int) -> np.ndarray:
        batch = make_batch(
            problems,
            step,
            config.seed,
            flags.prompts,
            setup.prompt_slots,
            setup.references,
        )
        key = noise.stream_key(setup.key, "rl", step)
        return np.asarray(
            take(
                params,
                batch,
                verifier=setup.reward.on_device,
                group=config.rl.group,
                key=key,
            ),
            float,
        )

    exact, latent = np.stack([taken(step) for step in range(flags.batches)], axis=1)
    further = (
        sum(taken(flags.batches + step)[0] for step in range(flags.further))
        / flags.further
    )
    along = latent @ further / (further @ further)
    return (
        cosine(exact.mean(0), further),
        cosine(latent.mean(0), further),
        float(along.std(ddof=1)),
    )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two vectors; 0 where one is 0."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def with_answers(problems: EncodedProblems, count: int) -> EncodedProblems:
    """The problems of Countdown that have so many right answers; 0 is all.

    Raises:
        UserError: there are none.
    """
    kept = [
        i
        for i, problem in enumerate(problems.problems)
        if count in (0, problem.columns.get("solutions"))
    ]
    if not kept:
        raise UserError(f"--right: no problem has {count} right answers; leave it out")
    own = {}
    for name in ("prompts", "steps", "answers"):
        values = getattr(problems, name)
        own[name] = [values[i] for i in kept]
    return dataclasses.replace(
        problems, problems=tuple(problems.problems[i] for i in kept), **own
    )


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    found: dict[int, list[tuple[float, ...]]] = {count: [] for count in flags.right}
    for checkpoint in flags.checkpoints:
        solver = slpo_jax.load(checkpoint).solver
        if (
            solver.setup.reward.on_device is None
            or not solver.setup.policy.config.max_latents
        ):
            raise UserError(
                f"{checkpoint}: needs latents, and a reward that is judged on the device; give another"
            )
        for count, rows in found.items():
            rows.append(
                measure(
                    solver.setup,
                    solver.params,
                    with_answers(solver.setup.train, count),
                    flags,
                )
            )
            print(f"{checkpoint}, {count}: {rows[-1]}", file=sys.stderr, flush=True)
    seeds = max(len(flags.checkpoints), 1)
    rows = [
        [f"right answers: {count or 'any number'}",
         *({"value": float(np.mean(values)), "se": float(np.std(values, ddof=1) / seeds**0.5) if seeds > 1 else 0.0}
           for values in zip(*found[count], strict=True))]
        for count in flags.right
    ]  # fmt: skip
    work = {name: getattr(flags, name) for name in ("batches", "further", "prompts")}
    return {
        "machine": machine(),
        "work": work,
        "tables": {"gradients": {"columns": ["", *FIGURES], "rows": rows}},
    }


def markdown(result: dict[str, Any]) -> str:
    """Its header and its table."""
    cells = [[name, *(f"{cell['value']:.2f} ± {cell['se']:.2f}" for cell in row)]
             for name, *row in result["tables"]["gradients"]["rows"]]  # fmt: skip
    facts = [f"- {format_facts(result[name])}" for name in ("machine", "work")]
    return "\n".join(["# The latent term's gradient and the reward's own", *facts, "",
                      *markdown_table(["", *FIGURES], cells)])  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one can't be used.
    """
    parser = Parser(
        "gradients",
        "Where SLPO's latent term points, beside the reward's exact gradient.",
    )
    parser.add_argument(
        "checkpoints",
        nargs="+",
        help="e.g. RUN/checkpoints/imitate, one a training seed",
    )
    parser.add_argument("--batches", type=int, default=16, help="default: 16")
    parser.add_argument("--further", type=int, default=48, help="default: 48")
    parser.add_argument(
        "--prompts", type=int, default=32, help="of a batch; default: 32"
    )
    parser.add_argument(
        "--right",
        default="0,1,2,4,6",
        help="numbers of right answers; 0 is all; default: 0,1,2,4,6",
    )
    flags = parser.parse_args(argv)
    if not flags.right.replace(",", "").isdecimal():
        raise UserError(
            f"--right: {flags.right} is no list of whole numbers; give e.g. 1,2,4"
        )
    flags.right = [int(count) for count in flags.right.split(",") if count]
    check_flags(flags, batches=2, further=2, prompts=2)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
