"""`python -m slpo_jax.cli.solve` as a command, in forks of a server that has imported the package."""

import functools
import hashlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from asked import QUESTION, workdir

from slpo_jax.run.solution_summary import describe, describe_vote
from slpo_jax.run.solver import load_solver, solve, vote


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return workdir("coconut_gpt2", tmp_path_factory.mktemp("asked") / "work")


@pytest.fixture(scope="module")
def solver(work):
    return load_solver(str(work))


def _child(argv: list[str], stdin: str, output: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv, sys.stdin = ["solve", *argv], io.StringIO(stdin)
    from slpo_jax.cli import solve as command

    command.run()


@functools.cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["slpo_jax.cli.solve", "slpo_jax.run.solver", "slpo_jax.data.tokenizer", "transformers"]
    )
    return context


@pytest.fixture
def ask(work, tmp_path):
    def ask(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        given = [str(work) if arg == "WORK" else arg.replace("=WORK", f"={work}") for arg in argv]
        process = _server().Process(target=_child, args=(given, stdin, str(tmp_path / "out")))
        process.start()
        process.join(300)
        return (process.exitcode, *((tmp_path / f"out.{name}").read_text() for name in ("stdout", "stderr")))

    return ask


def _digest(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_the_command_prints_what_the_functions_return(ask, work, solver):
    before = _digest(work)
    status, out, err = ask("--checkpoint=WORK", "--samples", "5", "-", stdin=QUESTION + "\n")
    assert (status, err) == (0, "")
    solution, found = solve(solver, QUESTION), vote(solver, QUESTION, 5)
    assert out == f"{describe(solver, solution)}\n\n{describe_vote(solver, found, 0)}\n"
    assert _digest(work) == before


@pytest.mark.slow
def test_the_command_s_json(ask, solver):
    status, out, err = ask(QUESTION, "--checkpoint=WORK", "--samples=5", "--seed=2", "--json")
    assert (status, err) == (0, "")
    said, solution, found = json.loads(out), solve(solver, QUESTION), vote(solver, QUESTION, 5, 2)
    assert (said["question"], said["answer"], said["text"]) == (QUESTION, solution.answer, solution.text)
    assert (said["latent_steps"], said["stopping"], said["rule"]) == (len(solution.latents), "threshold", solver.rule)
    assert said["latents"][0]["nearest"][0][0] == solution.latents[0].nearest[0][0]
    assert said["latents"][-1]["stop_probability"] == pytest.approx(solution.latents[-1].stop_probability, abs=1e-6)
    assert said["vote"]["majority"] == found.majority
    assert [(row["answer"], row["count"]) for row in said["vote"]["answers"]] == found.counts
    assert (said["vote"]["samples"], said["vote"]["seed"]) == (5, 2)


ERRORS = {
    "no checkpoint": ([QUESTION], "--checkpoint: not given", "WORKDIR"),
    "no question": (["--checkpoint=WORK"], "question: not given", "standard input"),
    "an empty question": (["--checkpoint=WORK", " "], "question: is empty", "quotes"),
    "nowhere": (
        ["--checkpoint=./nowhere", QUESTION],
        "--checkpoint: ./nowhere is no file",
        "WORKDIR/checkpoints/STAGE",
    ),
    "an unknown word": (["--checkpoint=WORK", "Tom has zebras ."], "zebras", "--tokenizer"),
    "bytes that are no text": (["--checkpoint=WORK", "Tom has \udcff ."], "question: 'Tom has \\udcff .'", "UTF-8"),
    "a long question": (["--checkpoint=WORK", "Tom has 1 pens . " * 8], "question: has ", "positions for 33"),
    "too many latents": (["--checkpoint=WORK", "--latents=50", QUESTION], "--latents: 50 latents", "lower it"),
    "too many tokens": (
        ["--checkpoint=WORK", "--latents=0", "--max_answer_tokens=99", QUESTION],
        "--max_answer_tokens: 99",
        "lower it",
    ),
    "a latent policy without a thought": (
        ["--checkpoint=WORK", "--latents=0", "--latent_policy=soft", QUESTION],
        "--latents: 0",
        "--latents=4",
    ),
    "a seed too large": (["--checkpoint=WORK", "--samples=2", "--seed=4294967296", QUESTION], "4294967295", "--help"),
    "an update of no size": (["--checkpoint=WORK", "--lora_alpha=-3", QUESTION], "--lora_alpha: -3", "above 0"),
    "gate and number": (["--checkpoint=WORK", "--latents=2", "--threshold=0.5", QUESTION], "--threshold", "--latents"),
    "no gate": (["--checkpoint=WORK/checkpoints/imitate", "--threshold=0.5", QUESTION], "--threshold", "--latents"),
    "another reasoner": (
        ["--checkpoint=WORK", "--reasoner=codi_llama", QUESTION],
        "--reasoner: is codi_llama",
        "_gpt2",
    ),
    "answers of its own": (["--checkpoint=WORK", "--answers=boxed", QUESTION], "--answers: coconut_gpt2", "text_llama"),
    "answers in no known way": (["--checkpoint=WORK", "--answers=maths", QUESTION], "--answers=maths", "last_number"),
    "an unknown flag": (["--chekpoint=WORK", QUESTION], "chekpoint", "--help"),
    "a word for a number": (["--checkpoint=WORK", "--samples=many", QUESTION], "--samples=many", "non-negative"),
    "a speed between two": (["--checkpoint=WORK", "--speed=2.5", QUESTION], "--speed=2.5: is not", "[1, 5]; see"),
    "a config's key": (
        ["--checkpoint=WORK", "--config.prompt.speed=6", QUESTION],
        "--config.prompt.speed: is a config's key",
        "give --speed, an integer in the range [1, 5]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_one_line(ask, work, case):
    argv, names, remedy = ERRORS[case]
    before = _digest(work)
    status, out, err = ask(*argv)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert names in line
    assert remedy in line
    assert "config.init" not in line
    assert len(line) < 400
    assert _digest(work) == before


def test_ctrl_c_promises_nothing():
    """There is nothing that the same command would go on from."""
    program = (
        "from slpo_jax.cli import solve\ndef main(_):\n    raise KeyboardInterrupt\nsolve.main = main\nsolve.run()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split("\n")) == (130, ["", "interrupted", ""])
