"""`python -m benchmarks.gradients --config=FILE CHECKPOINT.. [--batches N] [--json FILE]`; see `--help`.

How far the surrogate's credit for a thought points where the reward does. A rollout's thought is a function of
parameters and keys, so the gradient of the reward through the latents can be taken exactly, by replaying it; SLPO's
latent term estimates it from K passes. Both are taken on the same trajectories, rewards and advantages, batch by batch.
Prints Markdown; `--json` writes every number behind it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.flatten_util import ravel_pytree
from tqdm import tqdm

from benchmarks.measure import checkpoints
from benchmarks.measure.fits import FITTED, PASSES
from benchmarks.measure.report import Parser, check_flags, listed, machine, markdown_table, run_command, set_up
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.advantage import rloo
from slpo_jax.policy.policy import Policy
from slpo_jax.policy.prompted import PromptedBatch, repeat_rows
from slpo_jax.policy.rollout import Trajectories, replay
from slpo_jax.policy.score import PassKeys, score
from slpo_jax.run.experiment import Setup
from slpo_jax.run.rl import training_policy
from slpo_jax.training.batches import make_batch
from slpo_jax.training.objectives import OBJECTIVES
from slpo_jax.training.objectives.objective import policy_gradient_loss
from slpo_jax.training.rl import roll_out

EXACT = "reward, through the latents"
WHOLE = "reward, the whole"
WHOLES: dict[str, dict[str, Any]] = {
    WHOLE: {"estimator": "reward"},
    "Pass@k, the whole": {"estimator": "pass_at_k"},
    "reference, the whole": {"estimator": "mixture", "mixture_weight": 0.0},
}
DEFINITIONS = f"""
{EXACT}: gradient of -A_i log pi(a_i | x, h(theta, eps_i)), its keys and length fixed, with respect to the parameters \
that made the latents alone: the exact path of the reward's gradient that SLPO's latent term stands for
reward, past the latents: the same with the latents fixed, so through the answer alone; together they are the whole
the whole: of the reward, of Pass@k itself (pathwise, `pass_at_k`) and of the reference answer's likelihood, each with \
its paths through and past the latents; set beside the whole of the reward
SLPO, K: of -A_i log N(h_t; mu_t, sigma_t^2) summed over t, under K passes with fresh masks
own prompt masks: passes under the masks that each rollout's prompt had; pooled covariance: of all steps of a batch, \
and along its axes of most variance alone; all with the variance detached
likelihood, exact: of -A_i log p(h_t) summed over t, under --sigma's additive noise instead of dropout, where it is \
known: the unbiased estimator that the surrogate stands for
noise: root of the mean squared distance of the batches' gradients from their mean, over its norm (corrected for \
the noise that is left in it); inf where no mean shows
cosine: with that of the reward through the latents, or a whole with the reward's, of the same batch; mean over \
batches ± its standard error
share: its mean along the mean of the same over --further batches, in units of that; 1 where it is unbiased; inf where \
no such mean shows; ± its standard error
noise along: standard deviation over batches of the same
cosine of the means: of its mean over --batches and the other's over --further
answers sampled at temperature 1, RLOO; gradients of the reasoner's parameters
""".strip().splitlines()


@struct.dataclass
class Drawn:
    """One batch's rollouts.

    Attributes:
        rewards: float32 [B, G].
        key: of the scoring passes.
    """

    batch: PromptedBatch
    trajectories: Trajectories
    rewards: jax.Array
    key: jax.Array


def through_latents(policy: Policy, params, drawn: Drawn):
    """The exact gradient of the reward with respect to what made the latents."""
    prompts = repeat_rows(drawn.batch.prompts, drawn.rewards.shape[1])
    keys = PassKeys(drawn.trajectories.keys, drawn.trajectories.keys)

    def loss(makes_latents):
        actions = replay(policy, makes_latents, drawn.batch.prompts, drawn.trajectories).actions
        scores = score(policy, params, prompts, drawn.trajectories, keys, actions=actions)
        return policy_gradient_loss(((1.0, scores.answer_log_prob),), jax.vmap(rloo)(drawn.rewards))

    return jax.grad(loss)(params)


def past_latents(policy: Policy, params, drawn: Drawn):
    """The rest of it: of the answer, after the very same latents."""
    prompts = repeat_rows(drawn.batch.prompts, drawn.rewards.shape[1])
    keys = PassKeys(drawn.trajectories.keys, drawn.trajectories.keys)

    def loss(params):
        scores = score(policy, params, prompts, drawn.trajectories, keys)
        return policy_gradient_loss(((1.0, scores.answer_log_prob),), jax.vmap(rloo)(drawn.rewards))

    return jax.grad(loss)(params)


def of_objective(name: str, **settings: Any) -> Callable[[Policy, Any, Drawn], Any]:
    """An objective's gradient without its stop term.

    Args:
        name: in `OBJECTIVES`.
        settings: of that.
    """
    objective = OBJECTIVES[name](stop_weight=0.0, **settings)

    def gradient(policy: Policy, params, drawn: Drawn):
        def loss(params):
            return objective(policy, params, drawn.batch, drawn.trajectories, drawn.rewards, drawn.key)[0]

        return jax.grad(loss)(params)

    return gradient


def surrogate(**settings: Any) -> Callable[[Policy, Any, Drawn], Any]:
    """SLPO's latent term alone; settings of `objectives.slpo.Slpo`."""
    return of_objective("slpo", answer_weight=0.0, **settings)


def estimators(flags: argparse.Namespace) -> dict[str, Callable[[Policy, Any, Drawn], Any]]:
    """By name."""
    passes, epsilons = flags.passes, flags.epsilons
    found: dict[str, Callable[[Policy, Any, Drawn], Any]] = {EXACT: through_latents}
    found["reward, past the latents"] = past_latents
    found |= {name: of_objective("pathwise", **settings) for name, settings in WHOLES.items()}
    if flags.sigma:
        return found | {"likelihood, exact": of_objective("exact", answer_weight=0.0)}
    found |= {f"SLPO, K = {count}": surrogate(passes=count) for count in passes}
    detached = f"SLPO, K = {PASSES}, variance detached"
    found[detached] = surrogate(passes=PASSES, detach_variance=True)
    found |= {f"SLPO, K = {PASSES}, epsilon = {size:g}": surrogate(passes=PASSES, epsilon=size) for size in epsilons}
    return found | {f"SLPO, K = {PASSES}, {name}": gradient for name, gradient in FITTED.items()}


@dataclasses.dataclass(frozen=True)
class Direction:
    """The mean of a gradient over many batches.

    Attributes:
        mean: [reasoner's parameters].
        square: squared norm of what it estimates, without the noise that is left in it.
    """

    mean: np.ndarray
    square: float


def direction(gradients: Iterable[np.ndarray]) -> Direction:
    """Of two gradients at least."""
    count, total, squares = 0, np.float64(0), 0.0
    for vector in gradients:
        count, total, squares = count + 1, total + vector, squares + float(vector @ vector)
    mean = total / count
    left = (squares / count - float(mean @ mean)) / (count - 1)
    return Direction(mean, float(mean @ mean) - left)


def measure(setup: Setup, params: Any, flags: argparse.Namespace) -> tuple[dict[str, np.ndarray], dict[str, Direction]]:
    """Estimator -> its gradients [batches, reasoner's parameters], and the means of `EXACT` and `WHOLE`."""
    policy = training_policy(setup, OBJECTIVES["pathwise"](estimator="reward", temperature=1.0))
    functions = estimators(flags)

    @jax.jit
    def draw(params, batch, key):
        rolled_by, verify = jax.random.fold_in(key, 0), setup.reward.on_device
        trajectories, rewards = roll_out(policy, params, batch, verify, flags.group, rolled_by)
        return Drawn(batch, trajectories, rewards, jax.random.fold_in(key, 1))

    def taken(names: Collection[str], steps: range) -> Iterator[dict[str, np.ndarray]]:
        @jax.jit
        def gradients(params, drawn):
            return {name: ravel_pytree(functions[name](policy, params, drawn)["reasoner"])[0] for name in names}

        slots = setup.prompt_slots, setup.reference_width
        for step in tqdm(steps, f"{len(names)} estimators", disable=not sys.stderr.isatty()):
            batch = make_batch(
                setup.train, step, flags.seed, flags.prompts, *slots, answer_slots=policy.config.answer_slots
            )
            drawn = draw(params, batch, noise.stream_key(jax.random.key(flags.seed), "rl", step))
            yield {name: np.asarray(vector, np.float64) for name, vector in gradients(params, drawn).items()}

    found = list(taken(functions, range(flags.batches)))
    further = list(taken((EXACT, WHOLE), range(flags.batches, flags.batches + flags.further)))
    return (
        {name: np.stack([each[name] for each in found]) for name in functions},
        {name: direction(each[name] for each in further) for name in (EXACT, WHOLE)},
    )


def compared(gradients: dict[str, np.ndarray], means: dict[str, Direction]) -> list[dict[str, Any]]:
    """A row an estimator, of what `measure` gives: norm, noise, cosines and share, see `DEFINITIONS`."""
    rows = []
    for name, found in gradients.items():
        beside = WHOLE if name in WHOLES else EXACT
        exact, along = gradients[beside], means[beside]
        shares = found @ along.mean / along.square if along.square > 0 else np.full(len(found), np.inf)
        count, mean = len(found), found.mean(axis=0)
        variance = np.square(found - mean).sum() / (count - 1)
        norm = np.sqrt(max(np.square(mean).sum() - variance / count, 0.0))
        cosines = [_cosine(a, b) for a, b in zip(found, exact, strict=True)]
        rows.append({
            "estimator": name,
            "norm": float(norm),
            "noise": float(np.sqrt(variance) / norm) if norm else float("inf"),
            "cosine": float(np.mean(cosines)),
            "cosine_se": float(np.std(cosines, ddof=1) / np.sqrt(count)),
            "cosine_of_means": _cosine(mean, along.mean),
            "share": float(shares.mean()),
            "noise_along": float(shares.std(ddof=1)) if along.square > 0 else float("inf"),
        })  # fmt: skip
    return rows


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    set_up(1)
    additive = {"thinker.name": "additive", "thinker.additive.sigma": flags.sigma, "dropout.rate": 0.0}
    tables, changes = {}, additive if flags.sigma else {}
    for checkpoint, setup in checkpoints.opened(flags, changes):
        tables[str(checkpoint)] = compared(*measure(setup, setup.initial_params(), flags))
    work = {
        name: getattr(flags, name) for name in ("config", "batches", "further", "prompts", "group", "sigma", "seed")
    }
    return {"machine": machine(), "work": work, "definitions": DEFINITIONS, "tables": tables}


def markdown(result: dict[str, Any]) -> str:
    """The header lines and a table a checkpoint."""
    lines = ["# The latent term's gradient and the reward's own"]
    lines += [f"- {line}" for line in (f"machine: {listed(result['machine'])}", f"work: {listed(result['work'])}")]
    lines += [f"- {line}" for line in result["definitions"]]
    head = ("Estimator", "Norm", "Noise", "Cosine", "Cosine of the means", "Share", "Noise along")
    count = result["work"]["batches"]
    for checkpoint, rows in result["tables"].items():
        cells = [
            [row["estimator"], f"{row['norm']:.3g}", f"{row['noise']:.1f}",
             f"{row['cosine']:+.3f} ± {row['cosine_se']:.3f}", f"{row['cosine_of_means']:+.3f}",
             f"{row['share']:+.3g} ± {row['noise_along'] / np.sqrt(count):.2g}", f"{row['noise_along']:.3g}"]
            for row in rows
        ]  # fmt: skip
        lines += ["", f"{checkpoints.name_of(Path(checkpoint))}:", "", *markdown_table(head, cells)]
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("gradients", "The surrogate's gradient beside the reward's own.")
    checkpoints.add_flags(parser)
    parser.add_argument("--batches", type=int, default=32, help="default: 32")
    parser.add_argument("--further", type=int, default=160, help="of the exact gradients alone; default: 160")
    parser.add_argument("--prompts", type=int, default=32, help="a batch; default: 32")
    parser.add_argument("--group", type=int, default=8, help="rollouts of each; default: 8")
    parser.add_argument("--passes", type=int, nargs="+", default=[2, 4, 16], help="values of K; default: 2 4 16")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[1e-2, 1.0], help="floors; default: 0.01 1")
    parser.add_argument("--sigma", type=float, help="additive noise of this size instead of dropout")
    parser.add_argument("--seed", type=int, default=0, help="of batches and noise; default: 0")
    flags = parser.parse_args(argv)
    check_flags(flags, batches=2, further=2, prompts=1, group=2, seed=0)
    if any(count < 1 for count in flags.passes) or any(epsilon <= 0 for epsilon in flags.epsilons):
        raise UserError("--passes, --epsilons: give numbers above 0")
    if flags.sigma is not None and not flags.sigma > 0:
        raise UserError(f"--sigma: {flags.sigma} is no size of noise; give a number above 0")
    checkpoints.check_paths(flags)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
