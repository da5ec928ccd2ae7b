"""`python -m benchmarks.words WORKDIR STAGE..`: how often a kept decoder's words are the step of their latent.

Of runs such as `slpo train arithmetic --config.imitate.recipe=simcot --config.imitate.control=False
--config.imitate.simcot.keep=True`, on the first 500 problems of synthetic:test, in six latents; prints JSON, a line a
stage. A table in docs/methods.md is the mean of three seeds, whose imitation ended after 4,000 steps.
"""

import json
import sys

import numpy as np

import slpo_jax
from slpo_jax.run.sources import load_set


def shares(checkpoint: str, count: int = 500, latents: int = 6) -> dict[str, float]:
    """Accuracy and, of all latents, the share of those whose words are exactly right.

    Args:
        checkpoint: WORKDIR/checkpoints/STAGE.
        count: problems.
        latents: of each thought; those beyond a problem's steps are spare, and stand for its answer.
    """
    reasoner = slpo_jax.load(checkpoint, explain=True, latents=latents)
    problems = load_set(reasoner.config, "problems", "synthetic:test")[:count]
    rows = []
    for problem, solution in zip(problems, reasoner.solve([each.question for each in problems]), strict=True):
        wanted = [*problem.steps, *[f"### {problem.answer}"] * latents]
        for place, latent in enumerate(solution.latents):
            rows.append((solution.answer == problem.answer, place < len(problem.steps), latent.words == wanted[place]))
    right, step, hit = np.array(rows).T
    return {
        "acc": float(right.reshape(count, latents)[:, 0].mean()),
        "steps": float(hit[step].mean()),
        "steps where the answer is right": float(hit[step & right].mean()),
        "steps where it is wrong": float(hit[step & ~right].mean()),
        "spare latents": float(hit[~step].mean()),
    }


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps({name: shares(f"{sys.argv[1]}/checkpoints/{name}")}), flush=True)
