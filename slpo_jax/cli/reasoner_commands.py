"""The commands that ask, measure and convert reasoners, or look at problems; --help shows their docstrings."""

import argparse
import codecs
import dataclasses
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from slpo_jax.api.load_options import LoadOptions
from slpo_jax.cli.command import CommandParser, take_keys
from slpo_jax.errors import UserError
from slpo_jax.io.files import to_json
from slpo_jax.io.workdir import Workdir

if TYPE_CHECKING:
    from slpo_jax.api.solver import Solution
    from slpo_jax.api.trained_reasoner import TrainedReasoner
    from slpo_jax.checkpoints.checkpoint import Checkpoint

# Imports that take seconds wait until they are needed: --help comes at once.

_OURS = "WORKDIR/checkpoints/STAGE, WORKDIR for its newest, or what `slpo import` wrote"
_THEIRS = "a Hugging Face directory or hub id, or a torch, safetensors or GGUF file"
_VALUES = {str: "NAME", int: "N", float: "X"}  # the names of flags' values in --help


def solve(arguments: list[str]) -> None:
    """Ask a reasoner, and watch it think: slpo solve RUN "question".

    Prints the answer, and for each latent the gate's stop probability and the likeliest tokens: those that the model's
    output head makes most probable at the hidden state that the latent was made of (for CODI, the state before the
    projector), and what SIM-CoT's decoder says of it, where that was kept. With --samples, rollouts under the noise of
    the run's evaluation vote. Nothing is written.

    Examples:
        slpo solve runs/quickstart "7 * 3 + 9 * 7 + 2"
        slpo solve runs/quickstart --samples=16 "7 * 3 + 9 * 7 + 2"
        echo "7 * 3 + 9 * 7 + 2" | slpo solve runs/quickstart --json -
    """
    parser = _make_asker("solve", solve.__doc__, samples=0)
    _add_options(parser, ["explain"])
    parser.add_argument(
        "question",
        nargs="*",
        metavar="QUESTION",
        help="in quotes, or - for standard input",
    )
    flags = parser.read(arguments)

    question = " ".join(flags.question)
    if question == "-":
        # In the C locale, Python reads ASCII.
        stdin = sys.stdin
        if (
            isinstance(stdin, io.TextIOWrapper)
            and codecs.lookup(stdin.encoding).name == "ascii"
        ):
            stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        question = stdin.read()
    if not question.strip():
        raise UserError(
            'question: not given; write it in quotes, or "-" to read it from standard input'
        )
    reasoner = _load(flags)
    solution = reasoner.solve(question.strip(), flags.samples, flags.seed)
    if flags.json:
        values = as_json(reasoner, solution, flags.seed)
        print(to_json(values, ensure_ascii=False))
    else:
        print(solution)


def as_json(
    reasoner: "TrainedReasoner", solution: "Solution", seed: int
) -> dict[str, Any]:
    """Return a solution, its vote and its reasoner as one JSON object."""
    solver = reasoner.solver
    latents = []
    for latent in solution.latents:
        facts: dict[str, Any] = {
            "stop_probability": latent.stop_probability,
            "likeliest": latent.likeliest,
        }
        if solver.reads:
            facts["words"] = latent.words
        latents.append(facts)

    config = reasoner.config
    votes = solution.votes
    vote = None
    if votes:
        counts = [{"answer": text, "count": count} for text, count in votes.counts]
        vote = {
            "samples": sum(count for _, count in votes.counts),
            "seed": seed,
            "dropout_rate": config.dropout.rate,
            "answers": counts,
            "majority": votes.majority,
            "cut": votes.cut,
        }
    return {
        "checkpoint": config.init,
        "reasoner": config.reasoner,
        "stopping": solver.stopping,
        "rule": solver.rule,
        "question": solution.question,
        "answer": solution.answer,
        "text": solution.text,
        "cut": solution.cut,
        "latents": latents,
        "latent_steps": len(solution.latents),
        "vote": vote,
    }


def evaluate(arguments: list[str]) -> None:
    """Measure how often a reasoner is right: slpo eval RUN PROBLEMS.

    Prints Acc, the share of right answers without noise, and Pass@k of --samples rollouts with the noise of the run's
    evaluation, each with its standard error over problems.

    Examples:
        slpo eval runs/quickstart chain:test --limit=100
        slpo eval runs/quickstart/checkpoints/imitate my_test.csv --samples=64
        slpo eval ModalityDance/latent-tts-coconut openai/gsm8k --latents=6 --out=records.jsonl
    """
    parser = _make_asker("eval", evaluate.__doc__, samples=16)
    parser.add_argument(
        "problems",
        metavar="PROBLEMS",
        help="a file, a hub id, a generated set, or a set of the run",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=0,
        metavar="N",
        help="only the first problems; 0 is all",
    )
    parser.add_argument(
        "--reward",
        metavar="NAME",
        help="one that --register registers; default: the run's",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="a .jsonl file to write the records to"
    )
    flags = parser.read(arguments)
    evaluation = _load(flags).evaluate(
        flags.problems, flags.samples, flags.seed, flags.reward, flags.limit
    )
    if flags.out:
        from slpo_jax.evaluation.records import write_records

        write_records(flags.out, evaluation.records)
    print(to_json(evaluation.summary) if flags.json else evaluation)


def export(arguments: list[str]) -> None:
    """Write a reasoner for transformers: slpo export SRC DST.

    DST becomes a directory that `transformers.AutoModelForCausalLM.from_pretrained` opens and, with
    trust_remote_code=True, thinks with: its README.md has the lines. `reasoner.safetensors` beside the model has the
    gate (`gate.*`) and CODI's projector (`projector.{1,3,4}.*`, as in its published layout), `reasoner.json` the rest.

    Examples:
        slpo export runs/quickstart exported
        slpo export runs/quickstart/checkpoints/imitate exported_imitate
        slpo export runs/simcot exported_simcot --explain
    """
    from slpo_jax.api.conversion import export_checkpoint

    parser = _make_converter("export", export.__doc__, _OURS, ("explain",))
    flags = parser.read(arguments)
    checkpoint = export_checkpoint(flags.source, flags.target, **_options(flags))
    _say_converted("exported", flags.target, checkpoint)


def import_(arguments: list[str]) -> None:
    """Make a published reasoner one of ours: slpo import SRC DST.

    DST becomes an Orbax checkpoint that `--config.init=DST` takes. A base model gets the reasoner's tokens; a gate is
    imported if there is one. `slpo solve`, `eval` and `train --config.init=` open SRC without this command, too.

    Examples:
        slpo import ModalityDance/latent-tts-coconut coconut
        slpo import zen-E/CODI-gpt2 codi --base=openai-community/gpt2 --lora_alpha=32
        slpo import openai-community/gpt2 start --reasoner=coconut_gpt2
    """
    from slpo_jax.api.conversion import import_checkpoint

    options = ("reasoner", "base", "tokenizer", "lora_alpha", "explain")
    parser = _make_converter("import", import_.__doc__, _THEIRS, options)
    flags = parser.read(arguments)
    checkpoint = import_checkpoint(flags.source, flags.target, **_options(flags))
    _say_converted("imported", flags.target, checkpoint)


def data(arguments: list[str]) -> None:
    """See how problems are understood, before anything is trained: slpo data PROBLEMS, or slpo data RUN SET.

    Prints how many there are, how many are left out and why, which fields are the question, the answer and the steps,
    which are not used, and the first problems as prompt, steps and answer. --config.data.fields.question=NAME (and
    answer, steps) names a field that can't be told. With a run, its own settings are used.

    Examples:
        slpo data my_problems.csv
        slpo data openai/gsm8k --limit=1
        slpo data my_problems.jsonl --config.data.fields.question=title
        slpo data runs/quickstart test --out=test.jsonl
    """
    arguments, fields = take_keys(arguments, "config.data.fields")
    parser = CommandParser("data", data.__doc__)
    parser.add_argument(
        "problems",
        metavar="PROBLEMS",
        help="a file, a directory, a hub id, a generated set; or a run",
    )
    parser.add_argument(
        "set",
        nargs="?",
        metavar="SET",
        help="of that run: test, train, valid, or another source",
    )
    parser.add_argument(
        "--answers",
        default="",
        metavar="STYLE",
        help="how they are read; default: as the data say",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=3,
        metavar="N",
        help="how many are shown; default: 3",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="a new .jsonl file to write the problems to"
    )
    flags = parser.read(arguments)
    if flags.limit < 0:
        raise UserError(
            f"--limit: {flags.limit} is not valid; give a whole number, 0 or more"
        )
    from slpo_jax.data.record_files import check_name, write_problems
    from slpo_jax.run.sources import problem_lines

    # Read the problems, as a run does or as a new one would.
    if flags.out:
        check_name(flags.out)
        # It may be what the problems are read from, by whatever name.
        if Path(flags.out).expanduser().exists():
            raise UserError(f"--out: {flags.out} exists; give another name")
    if flags.set is None:
        from slpo_jax.api.training import read

        if Workdir(Path(flags.problems).expanduser()).checkpoints.is_dir():
            raise UserError(
                f"{flags.problems}: is a run; name one of its sets too: slpo data {flags.problems} SET"
            )

        # What is written keeps all columns, and problems without an answer.
        problems = read(
            flags.problems, flags.answers, fields, with_columns=bool(flags.out)
        )
    else:
        from slpo_jax.api.trained_reasoner import load

        if flags.answers or fields:
            raise UserError(
                "--answers: a run has its own way to read answers and fields; leave these flags out"
            )
        problems = load(flags.problems).problems(flags.set)

    print(problems)
    for line in problem_lines(problems[: flags.limit]):
        print(line)
    if flags.out:
        write_problems(flags.out, problems)
        print(f"written: {flags.out}, {len(problems):,} problems")


def _make_asker(name: str, about: str | None, samples: int) -> CommandParser:
    """Make the parser of a command that asks a checkpoint; `samples` is the default of --samples."""
    parser = CommandParser(name, about)
    parser.add_argument(
        "checkpoint",
        metavar="RUN",
        help="a workdir, WORKDIR/checkpoints/STAGE, a directory, a hub id",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=samples,
        metavar="N",
        help=f"noisy rollouts; default: {samples}",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of that noise"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead"
    )
    names = [name for name in get_type_hints(LoadOptions) if name != "explain"]
    _add_options(parser, names)
    return parser


def _make_converter(
    name: str, about: str | None, source: str, options: tuple[str, ...]
) -> CommandParser:
    """Make the parser of a command that converts a checkpoint."""
    parser = CommandParser(name, about)
    parser.add_argument("source", metavar="SRC", help=source)
    parser.add_argument("target", metavar="DST", help="a new folder")
    _add_options(parser, options)
    return parser


def _add_options(parser: CommandParser, names: list[str] | tuple[str, ...]) -> None:
    """Add a flag for each of these fields of `LoadOptions`, which checks their values."""
    hints = get_type_hints(LoadOptions)
    for field in dataclasses.fields(LoadOptions):
        if field.name not in names:
            continue
        flag = f"--{field.name}"
        about = field.metadata["about"]
        types = get_args(hints[field.name]) or (hints[field.name],)
        if bool in types:
            parser.add_argument(flag, action="store_true", help=about)
            continue
        kind = next((kind for kind in (int, float) if kind in types), str)
        parser.add_argument(
            flag, default=field.default, type=kind, metavar=_VALUES[kind], help=about
        )


def _load(flags: argparse.Namespace) -> "TrainedReasoner":
    from slpo_jax.api.trained_reasoner import load

    return load(flags.checkpoint, **_options(flags))


def _options(flags: argparse.Namespace) -> dict[str, Any]:
    """Pick the values of the flags that are fields of `LoadOptions`."""
    names = get_type_hints(LoadOptions)
    return {name: value for name, value in vars(flags).items() if name in names}


def _say_converted(verb: str, target: str, checkpoint: "Checkpoint") -> None:
    """Print what was converted, as a line."""
    description = checkpoint.description
    model = description.model
    name = f"{description.architecture.name}_{model.model_type}"
    size = f"{model.n_layer} x {model.n_embd}"
    gate = "a trained gate" if description.gate_trained else "a random gate"
    if description.gate is None:
        gate = "no gate"
    source = checkpoint.opened.source if checkpoint.opened else ""
    print(f"{verb}: {target}, from {source}: {name}, {size}, with {gate}")
