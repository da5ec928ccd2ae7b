"""`python -m slpo_jax.solve --checkpoint=DIR "question"`: ask a trained reasoner, and watch it think.

Prints the answer, the number of latents, and for each latent the gate's stop probability and the nearest vocabulary
tokens: those that the model's own output head makes most probable at the hidden state that the latent was made of. For
COCONUT that is the latent itself; for CODI it is the state before the projector, as in CODI's paper. With --samples=N
it also draws N rollouts under the noise of the run's evaluation, MC-dropout or the thinker's own, and lets them vote.
"-" for the question reads it from standard input. Nothing is written.
"""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from slpo_jax.errors import UserError
from slpo_jax.run.command import in_flags, run_command, set_up_jax

if TYPE_CHECKING:
    from slpo_jax.run.solver import Solution, Solver, Vote

# Flags by the config's keys.
_FLAGS = {name: f"--{name}" for name in ("base", "tokenizer", "reasoner", "lora_alpha", "max_answer_tokens")}
_FLAGS |= {"init": "--checkpoint", "max_latents": "--latents", "thinker.name": "--thinker"}
_FLAGS |= {f"prompt.{name}": f"--{name}" for name in ("instruction", "answers")}


def describe(solver: "Solver", solution: "Solution") -> str:
    """A solution for a terminal of 100 columns."""
    indent = "\n" + " " * 10
    lines = [
        f"from      {solver.setup.config.init}",
        f"question  {indent.join(solution.question.strip().splitlines())}",
        f"answer    {_missing(solver, solution) if solution.answer is None else solution.answer}",
        f"text      {indent.join(solution.text.strip().splitlines()) or 'nothing'}",
        f"thought   {_ending(solver, solution)}",
    ]
    if solution.cut:
        most = solver.setup.evaluator.policy.config.answer_slots
        lines.insert(4, f"cut       at {most} tokens, before it ended; --max_answer_tokens={2 * most} lets it go on")
    if solver.drawn_thinker:
        name = solver.setup.config.thinker.name
        lines.append(f"untrained {name}'s own parameters are those that training would begin with")
    if not solution.latents:
        return "\n".join(lines)
    lines.append("")
    gated = solver.setup.config.gate.enabled
    lines.append(f"latent  {'stop  ' if gated else ''}nearest tokens of the hidden state that made it, and probability")
    cells = [[(_short(token), p) for token, p in latent.nearest] for latent in solution.latents]
    width = max((len(token) for row in cells for token, _ in row), default=0)
    for step, (latent, row) in enumerate(zip(solution.latents, cells, strict=True), 1):
        stop = "" if latent.stop_probability is None else f"{latent.stop_probability:.2f}  "
        lines.append(f"{step:6}  {stop}" + "  ".join(f"{token:<{width}} {_rounded(p):<5}" for token, p in row).rstrip())
    return "\n".join(lines)


def _missing(solver: "Solver", solution: "Solution") -> str:
    """Why there is no answer."""
    style = solver.setup.template.answer_style
    if solution.cut:
        return "none: the text has no end, so what it says last may be cut off"
    what = {"boxed": r"nothing in a \boxed{}", "after_mark": "no number after its last #"}.get(style)
    what = what or "no number, or its last is a part of something else"
    if style == "after_mark" and "#" not in solution.text:
        what = "no # before a number"
        if not solver.setup.origin.kind.has_latents:
            what += "; --answers=last_number reads one without"
    return f"none: the text has {what}"


def _ending(solver: "Solver", solution: "Solution") -> str:
    steps, thinker = len(solution.latents), solver.setup.policy.thinker
    if not steps:
        return "in words alone" if not solver.setup.origin.kind.has_latents else "none, a fixed number"
    thought = f"{steps} latent{'s' if steps > 1 else ''}"
    if solver.stopping == "length" and steps < solver.rule:
        end = getattr(solver.setup.config.thinker.chosen, "end_text", "")
        ends = [repr(end)] * bool(end) + ["an end token"] * (thinker.says is not None)
        return f"{thought} of at most {solver.rule}, until {' or '.join(ends)} came"
    if solver.stopping == "length":
        return f"{thought}, a fixed number"
    if (solution.latents[-1].stop_probability or 0.0) >= solver.rule:
        return f"{thought}, until the gate's stop probability reached {solver.rule}"
    return f"{thought}, the most; the gate's stop probability stayed below {solver.rule}"


def _rounded(probability: float) -> str:
    return f"{probability:.2f}" if probability >= 0.01 else f"{probability:.0e}"


def _short(token: str) -> str:
    """A token in at most 9 visible characters."""
    text = repr(token.strip(" ") or token)[1:-1]
    return text if len(text) <= 9 else text[:8] + "…"


def describe_vote(solver: "Solver", found: "Vote", seed: int) -> str:
    """A vote for a terminal."""
    total = sum(count for _, count in found.counts)
    noise = f"dropout {solver.setup.policy.config.dropout_rate}"
    if (name := solver.setup.config.thinker.name) != "latent":
        noise += f" and the thinker {name}"
    lines = [f"vote of {total} rollouts with {noise} (seed {seed})"]
    for answer, count in found.counts:
        mark = "  <- majority" if answer is not None and answer == found.majority else ""
        cut = f" ({found.cut} cut off)" if answer is None and found.cut else ""
        lines.append(f"{count:6}  {'no answer' if answer is None else answer}{cut}{mark}")
    return "\n".join(lines)


def as_json(solver: "Solver", solution: "Solution", found: "Vote | None", seed: int) -> dict[str, Any]:
    """All of it as one JSON object."""
    config = solver.setup.config
    voted = found and {
        "samples": sum(count for _, count in found.counts),
        "seed": seed,
        "dropout_rate": config.dropout.rate,
        "answers": [{"answer": answer, "count": count} for answer, count in found.counts],
        "majority": found.majority,
        "cut": found.cut,
    }
    facts = {"checkpoint": config.init, "reasoner": config.reasoner, "stopping": solver.stopping, "rule": solver.rule}
    facts["untrained_thinker"] = solver.drawn_thinker
    return facts | dataclasses.asdict(solution) | {"latent_steps": len(solution.latents), "vote": voted}


def _define_flags() -> None:
    """Not on import: other commands have flags of the same names."""
    flags.DEFINE_string(
        "checkpoint", None, "WORKDIR, WORKDIR/checkpoints/STAGE, a Hugging Face directory, hub id, file."
    )
    flags.DEFINE_integer("samples", 0, "Rollouts that vote, under the noise of the run's evaluation.", lower_bound=0)
    flags.DEFINE_float("threshold", None, "Of the gate; default: the one chosen in the run, or 0.5.", 0.0, 1.0)
    flags.DEFINE_integer("latents", None, "A fixed number of latents, instead of the gate.", lower_bound=0)
    flags.DEFINE_integer("max_answer_tokens", None, "Default: the run's, or 16.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the noise of --samples.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_string("reasoner", None, "Such as coconut_gpt2; default: what the checkpoint says.")
    flags.DEFINE_string("thinker", "", "Of a thought's steps, such as soft; default: the run's.")
    flags.DEFINE_string("instruction", "", "After the question, to a text reasoner; default: the run's.")
    flags.DEFINE_enum(
        "answers", None, ["auto", "last_number", "boxed"], "How a text reasoner's answer is read; default: the run's."
    )
    flags.DEFINE_string("base", "", "Base model's directory or hub id, for a file without config and tokenizer.")
    flags.DEFINE_string("tokenizer", "", "Directory or hub id; default: the checkpoint's or the base's.")
    flags.DEFINE_float("lora_alpha", None, "Scale of LoRA adapters times their rank (CODI's published: 32).")
    flags.DEFINE_bool("json", False, "Print one JSON object instead.")


def main(argv: list[str]) -> None:
    """The command, after its flags are parsed."""
    values = flags.FLAGS
    if not values.checkpoint:
        raise UserError("--checkpoint: not given; give WORKDIR, WORKDIR/checkpoints/STAGE or a Hugging Face directory")
    if len(argv) < 2:
        raise UserError('question: not given; write it in quotes, or "-" to read it from standard input')
    question = sys.stdin.read() if argv[1:] == ["-"] else " ".join(argv[1:])
    if not question.strip():
        raise UserError('question: is empty; write it in quotes, or "-" to read it from standard input')
    set_up_jax()
    from slpo_jax.run.solver import load_solver, solve, vote  # takes seconds, for which --help need not wait

    try:
        solver = load_solver(
            values.checkpoint, values.threshold, values.latents, values.max_answer_tokens,
            reasoner=values.reasoner or "", base=values.base, tokenizer=values.tokenizer, lora_alpha=values.lora_alpha,
            thinker=values.thinker, instruction=values.instruction, answers=values.answers or "",
        )  # fmt: skip
        solution = solve(solver, question.strip())
        found = vote(solver, question.strip(), values.samples, values.seed) if values.samples else None
    except UserError as error:  # its keys are the config's; here they are flags
        raise UserError(in_flags(str(error), _FLAGS)) from error
    if values.json:
        print(json.dumps(as_json(solver, solution, found, values.seed), ensure_ascii=False))
        return
    print(describe(solver, solution))
    if found is not None:
        print("\n" + describe_vote(solver, found, values.seed))


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    _define_flags()
    run_command(main, goes_on=False)


if __name__ == "__main__":
    run()
