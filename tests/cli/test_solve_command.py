"""`slpo solve` as a command."""

import io
import json

import pytest

from asked import QUESTION, contents, workdir
from refused import refusal
from slpo_jax.cli import reasoner
from slpo_jax.run.solution_summary import describe, describe_vote
from slpo_jax.run.solver import load_solver, solve, vote


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return workdir("coconut_gpt2", tmp_path_factory.mktemp("asked") / "work")


@pytest.fixture(scope="module")
def solver(work):
    return load_solver(str(work))


@pytest.mark.slow
def test_the_command_prints_what_the_functions_return(work, solver, monkeypatch, capsys):
    before = contents(work)
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    reasoner.solve([str(work), "--samples", "5", "-"])
    solution, found = solve(solver, QUESTION), vote(solver, QUESTION, 5)
    assert capsys.readouterr() == (f"{describe(solver, solution)}\n\n{describe_vote(solver, found, 0)}\n", "")
    assert contents(work) == before


@pytest.mark.slow
def test_the_command_s_json(work, solver, capsys):
    reasoner.solve([str(work), "--samples=5", QUESTION, "--seed=2", "--json"])
    said = json.loads(capsys.readouterr().out)
    solution, found = solve(solver, QUESTION), vote(solver, QUESTION, 5, 2)
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
