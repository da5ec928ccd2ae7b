"""`slpo solve RUN "question"`, or `python -m slpo_jax.cli.solve --checkpoint=RUN "question"`: ask, and watch it think.

Prints the answer, the number of latents, and for each latent the gate's stop probability and the nearest vocabulary
tokens: those that the model's own output head makes most probable at the hidden state that the latent was made of. For
COCONUT that is the latent itself; for CODI it is the state before the projector, as in CODI's paper. With --samples=N
it also draws N rollouts under the noise of the run's evaluation, MC-dropout or the latent policy's own, and lets them
vote. --explain says each latent in words, with the decoder of SIM-CoT where that was kept. "-" for the question reads
it from standard input. Nothing is written.
"""

import codecs
import io
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from slpo_jax.cli import reasoner_flags
from slpo_jax.cli.command import run_command, with_first
from slpo_jax.config.naming import FLAGS, naming
from slpo_jax.errors import UserError
from slpo_jax.io.files import to_json

if TYPE_CHECKING:
    from slpo_jax.api.reasoner import TrainedReasoner
    from slpo_jax.run.solver import Solution


def as_json(reasoner: "TrainedReasoner", solution: "Solution", seed: int) -> dict[str, Any]:
    """All of it as one JSON object."""
    config, solver, found = reasoner.config, reasoner.solver, solution.votes
    voted = found and {
        "samples": sum(count for _, count in found.counts),
        "seed": seed,
        "dropout_rate": config.dropout.rate,
        "answers": [{"answer": answer, "count": count} for answer, count in found.counts],
        "majority": found.majority,
        "cut": found.cut,
    }
    facts = {"checkpoint": config.init, "reasoner": config.reasoner, "stopping": solver.stopping, "rule": solver.rule}
    shown = ("stop_probability", "nearest", *(["words"] if solver.reads else []))
    latents = [{name: getattr(each, name) for name in shown} for each in solution.latents]
    said = {"question": solution.question, "answer": solution.answer, "text": solution.text, "cut": solution.cut}
    return facts | said | {"latents": latents, "latent_steps": len(latents), "vote": voted}


def main(argv: list[str]) -> None:
    """The command, after its flags are parsed."""
    values, argv = flags.FLAGS, with_first("checkpoint", argv)
    if len(argv) < 2 and values.checkpoint:
        raise UserError('question: not given; write it in quotes, or "-" to read it from standard input')
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    question = sys.stdin.read() if argv[1:] == ["-"] else " ".join(argv[1:])
    if not question.strip() and values.checkpoint:
        raise UserError('question: is empty; write it in quotes, or "-" to read it from standard input')
    with naming(FLAGS):
        reasoner = reasoner_flags.load_requested()
        solution = reasoner.solve(question.strip(), values.samples, values.seed)
    if values.json:
        print(to_json(as_json(reasoner, solution, values.seed), ensure_ascii=False))
        return
    print(solution)


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    reasoner_flags.define_flags(samples=0, explain=True)
    flags.adopt_module_key_flags(reasoner_flags)
    run_command(main, goes_on=False)


if __name__ == "__main__":
    run()
