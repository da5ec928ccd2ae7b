"""`python -m benchmarks.gradients CHECKPOINT.. [--batches=N] [--further=N] [--dropout=thought,..] [--right=1,2,..]`.

Whether SLPO's latent term points where the reward does. A rollout is a function of parameters and dropout masks, so
replaying it has the reward's exact gradient; less what goes past the latents, through the answer alone, that is what
the latent term stands for. Both are of the same rollouts.

- Acc: greedy, on the test sets of the run (%)
- share: length of the mean exact gradient through the latents, over that of what goes past them
- exact: cosine of the former's mean over --batches with its mean over --further, of other problems: the most that can
  be seen with so many
- SLPO: the same of the latent term's mean over --batches
- itself: cosine of that mean with the latent term's own over --further: where it is low, noise hides the direction
- noise: standard deviation over batches of the latent term's length along the exact mean, in units of that
- of answer, of both: cosine of the whole exact gradient's mean over --further with the mean over --batches of the
  answer's term, and of that with the latent term by its mean over the width

A row has the checkpoints that differ in their seed alone; ± is the standard error over them. It is named by what the
rows differ in: how they were imitated and from how many demonstrations, where rollouts have dropout (--dropout), and
how many right answers a problem has (--right), where the task says so, as Countdown does.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any, get_args

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
from slpo_jax.policy.noise import DropoutWhere, PassKeys
from slpo_jax.policy.policy import Policy, PromptedBatch, repeat_rows
from slpo_jax.policy.score import score
from slpo_jax.run.setup import Setup
from slpo_jax.run.train_rl import make_training_policy
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.objectives.objective import policy_gradient_loss
from slpo_jax.training.rollouts import make_batch, roll_out

FIGURES = ("exact", "SLPO", "noise", "itself", "share", "answer", "both", "Acc")
RIGHT = (0, 1, 2, 4, 6)
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
    """float32 [3, parameters of the reasoner]: the reward's exact gradient through the latents, what goes past them,
    and the latent term's.

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
    return jax.numpy.stack([whole - past, past, latent])


def measure(
    setup: Setup,
    params: Any,
    problems: EncodedProblems,
    where: DropoutWhere,
    flags: argparse.Namespace,
) -> dict[str, float]:
    """`FIGURES` on these problems, but for Acc; `where` is of the rollouts' dropout."""
    config = setup.config
    trained = make_training_policy(setup, rl_of(config.rl, _WHOLE))
    policy = trained.with_config(dropout_where=where)
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

    exact, past, latent = np.stack([taken(step) for step in range(flags.batches)], 1)
    further = sum(taken(flags.batches + step) for step in range(flags.further))
    exact_F, past_F, latent_F = further / flags.further
    along = latent @ exact_F / (exact_F @ exact_F)
    answer = past.mean(0)
    both = answer + latent.mean(0) / setup.reasoner.width
    return {
        "exact": cosine(exact.mean(0), exact_F),
        "SLPO": cosine(latent.mean(0), exact_F),
        "noise": float(along.std(ddof=1)),
        "itself": cosine(latent.mean(0), latent_F),
        "share": float(np.linalg.norm(exact_F) / np.linalg.norm(past_F)),
        "answer": cosine(answer, exact_F + past_F),
        "both": cosine(both, exact_F + past_F),
    }


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two vectors; 0 where one is 0."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def with_answers(problems: EncodedProblems, count: int) -> EncodedProblems:
    """The problems that have so many right answers; 0 is all.

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
    return problems.subset(kept)


def row_names(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """What rows are called: what each has that not all have; a row alone has all."""
    shared = set.intersection(*map(set, rows)) if len(rows) > 1 else set()
    return [", ".join(fact for fact in row if fact not in shared) for row in rows]


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    found: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for checkpoint in flags.checkpoints:
        reasoner = slpo_jax.load(checkpoint)
        setup = reasoner.solver.setup
        if setup.reward.on_device is None or not setup.policy.config.max_latents:
            raise UserError(
                f"{checkpoint}: needs latents, and a reward that is judged on the device; give another"
            )
        right = [reasoner.evaluate(name, samples=0).summary["acc"] for name in setup.tests]  # fmt: skip
        acc = 100.0 * float(np.mean(right))

        # SIM-CoT's decoder, where it is kept, is no part of rollouts, and has numbers without a gradient.
        used = {part.name for part in setup.parts}
        params = {name: reasoner.params[name] for name in reasoner.params if name in used}  # fmt: skip

        # How many right answers a problem has is said by some tasks alone.
        says = "solutions" in setup.train.problems[0].columns
        counts = flags.right or (RIGHT if says else (0,))
        for where in flags.dropout or (setup.config.dropout.where,):
            for count in counts:
                row = (
                    setup.config.imitate.recipe,
                    f"{len(setup.demos):,} demonstrations",
                    f"dropout: {where}",
                    f"right answers: {count or 'any number'}",
                )
                problems = with_answers(setup.train, count)
                figures = measure(setup, params, problems, where, flags)
                found.setdefault(row, []).append(figures | {"Acc": acc})
                print(f"{checkpoint}, {row}: {found[row][-1]}", file=sys.stderr, flush=True)  # fmt: skip

    rows = []
    for name, seeds in zip(row_names(list(found)), found.values(), strict=True):
        cells = [summed_up([seed[figure] for seed in seeds]) for figure in FIGURES]
        rows.append([name, *cells])
    work = {name: getattr(flags, name) for name in ("batches", "further", "prompts")}
    return {
        "machine": machine(),
        "work": work,
        "tables": {"gradients": {"columns": ["", *FIGURES], "rows": rows}},
    }


def summed_up(values: Sequence[float]) -> dict[str, float] | float:
    """Mean and standard error over training seeds; of one, the value itself."""
    if len(values) == 1:
        return values[0]
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return {"value": float(np.mean(values)), "se": error}


def markdown(result: dict[str, Any]) -> str:
    """Its header and its table."""
    cells = [[name, *map(as_text, row)] for name, *row in result["tables"]["gradients"]["rows"]]  # fmt: skip
    facts = [f"- {format_facts(result[name])}" for name in ("machine", "work")]
    return "\n".join(["# The latent term's gradient and the reward's own", *facts, "",
                      *markdown_table(["", *FIGURES], cells)])  # fmt: skip


def as_text(cell: dict[str, float] | float) -> str:
    """A cell of the table."""
    if isinstance(cell, float):
        return f"{cell:.2f}"
    return f"{cell['value']:.2f} ± {cell['se']:.2f}"


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
        help="e.g. RUN/checkpoints/imitate, also of several training seeds",
    )
    parser.add_argument("--batches", type=int, default=16, help="default: 16")
    parser.add_argument("--further", type=int, default=48, help="default: 48")
    parser.add_argument(
        "--prompts", type=int, default=32, help="of a batch; default: 32"
    )
    parser.add_argument(
        "--dropout",
        default="",
        help="where rollouts have it, e.g. thought,latents; default: as in the run",
    )
    parser.add_argument(
        "--right",
        default="",
        help="numbers of right answers; 0 is all; default: 0,1,2,4,6 where problems say it, else 0",
    )
    flags = parser.parse_args(argv)
    if not flags.right.replace(",", "0").isdecimal() and flags.right:
        raise UserError(
            f"--right: {flags.right} is no list of whole numbers; give e.g. 1,2,4"
        )
    flags.right = [int(count) for count in flags.right.split(",") if count]
    flags.dropout = [where for where in flags.dropout.split(",") if where]
    places = get_args(DropoutWhere)
    if unknown := [where for where in flags.dropout if where not in places]:
        raise UserError(f"--dropout: no {unknown[0]}; give some of {', '.join(places)}")
    check_flags(flags, batches=2, further=2, prompts=2)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
