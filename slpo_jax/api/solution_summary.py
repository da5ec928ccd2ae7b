"""A solution and a vote for a terminal of 100 columns."""

from slpo_jax.api.solver import Solution, Solver, Vote
from slpo_jax.config.config import ends_at
from slpo_jax.policy.latent_policies import LatentPolicyConfig
from slpo_jax.rewards.answers import STYLES


def describe(solver: Solver, solution: Solution) -> str:
    """A solution for a terminal of 100 columns."""
    indent, style = "\n" + " " * 10, STYLES[solver.setup.template.answer_style]
    none = f"none: the text has {'no end, so what it says last may be truncated' if solution.cut else style.none}"
    lines = [
        f"from      {solver.setup.config.init}",
        f"question  {indent.join(solution.question.strip().splitlines())}",
        f"answer    {none if solution.answer is None else solution.answer}",
        f"text      {indent.join(solution.text.strip().splitlines()) or 'nothing'}",
        f"thought   {_ending(solver, solution)}",
    ]
    if solution.cut:
        most = solver.setup.evaluator.policy.config.answer_slots
        lines.insert(4, f"truncated at {most} tokens, before it ended; --max_answer_tokens={2 * most} lets it go on")
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
        if latent.words is not None:
            lines.append(f"        says  {' / '.join(latent.words.splitlines()) or 'nothing'}")
    return "\n".join(lines)


def _ending(solver: Solver, solution: Solution) -> str:
    steps, latent_policy = len(solution.latents), solver.setup.policy.latent_policy
    if not steps:
        return "in words alone" if not solver.setup.checkpoint.architecture.has_latents else "none, a fixed number"
    thought = f"{steps} latent{'s' if steps > 1 else ''}"
    if solver.stopping == "length" and steps < solver.rule:
        end = ends_at(solver.setup.config)
        ends = [repr(end)] * bool(end) + ["an end token"] * (latent_policy.says is not None)
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


def describe_vote(solver: Solver, votes: Vote, seed: int) -> str:
    """A vote for a terminal."""
    total = sum(count for _, count in votes.counts)
    noise = f"dropout {solver.setup.policy.config.dropout_rate}"
    if (name := solver.setup.config.latent_policy.name) != LatentPolicyConfig.name:
        noise += f" and the latent policy {name}"
    lines = [f"vote of {total} rollouts with {noise} (seed {seed})"]
    for answer, count in votes.counts:
        mark = "  <- majority" if answer is not None and answer == votes.majority else ""
        cut = f" ({votes.cut} truncated)" if answer is None and votes.cut else ""
        lines.append(f"{count:6}  {'no answer' if answer is None else answer}{cut}{mark}")
    return "\n".join(lines)
