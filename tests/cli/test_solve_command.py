"""`slpo solve` as a command, in forks of a server that has imported the package."""

import functools
import hashlib
import io
import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
from asked import QUESTION, workdir
from refused import refusal

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
    sys.stdin = io.StringIO(stdin)
    from slpo_jax.cli.command import run_command
    from slpo_jax.cli.reasoner import solve

    run_command(solve, argv)


@functools.cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["slpo_jax.cli.reasoner", "slpo_jax.run.solver", "slpo_jax.data.tokenizer", "transformers"]
    )
    return context


@pytest.fixture
def ask(work, tmp_path):
    def ask(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        given = [str(work) if arg == "WORK" else arg for arg in argv]
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
    status, out, err = ask("WORK", "--samples", "5", "-", stdin=QUESTION + "\n")
    assert (status, err) == (0, "")
    solution, found = solve(solver, QUESTION), vote(solver, QUESTION, 5)
    assert out == f"{describe(solver, solution)}\n\n{describe_vote(solver, found, 0)}\n"
    assert _digest(work) == before


@pytest.mark.slow
def test_the_command_s_json(ask, solver):
    status, out, err = ask("WORK", "--samples=5", QUESTION, "--seed=2", "--json")
    assert (status, err) == (0, "")
    said, solution, found = json.loads(out), solve(solver, QUESTION), vote(solver, QUESTION, 5, 2)
    assert (said["question"], said["answer"], said["text"]) == (QUESTION, solution.answer, solution.text)
    assert (said["latent_steps"], said["stopping"], said["rule"]) == (len(solution.latents), "threshold", solver.rule)
    assert said["latents"][0]["nearest"][0][0] == solution.latents[0].nearest[0][0]
    assert said["latents"][-1]["stop_probability"] == pytest.approx(solution.latents[-1].stop_probability, abs=1e-6)
    assert said["vote"]["majority"] == found.majority
    assert [(row["answer"], row["count"]) for row in said["vote"]["answers"]] == found.counts
    assert (said["vote"]["samples"], said["vote"]["seed"]) == (5, 2)


def test_bytes_that_are_no_text(work):
    line = refusal("solve", "work", "Tom has \udcff .", folder=work.parent)
    assert line.startswith("question: 'Tom has \\udcff .'")
    assert "UTF-8" in line
