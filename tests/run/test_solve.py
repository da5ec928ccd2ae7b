"""Asking a checkpoint: against a slow oracle, the evaluation's samples, and what the command says."""

import io
import json
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import erf, expit, softmax

from asked import (
    ANSWER,
    QUESTION,
    RUN,
    T,
    assembled,
    contents,
    edit,
    run_params,
    workdir,
)
from refused import refusal
from slpo_jax.api.solver import Vote, load_solver, solve, vote
from slpo_jax.api.trained_reasoner import describe, describe_vote
from slpo_jax.checkpoints.identity import identify, newest_checkpoint
from slpo_jax.checkpoints.saved_config import config_of
from slpo_jax.cli import reasoner_commands as command
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.problem import Problem
from slpo_jax.data.templates import token_texts
from slpo_jax.evaluation.completions import thought_rows
from tiny import SlowReasoner


@pytest.fixture(
    scope="module",
    params=["coconut_gpt2", pytest.param("codi_gpt2", marks=pytest.mark.slow)],
)
def work(request, tmp_path_factory):
    return workdir(request.param, tmp_path_factory.mktemp(request.param) / "work")


@pytest.fixture(scope="module")
def solver(work):
    return load_solver(str(work))


def _slow(
    reasoner: str, threshold: float = 0.0, latents: int | None = None
) -> SimpleNamespace:
    """rho_t, the head's probabilities at the state that made h_t, and tokens, by projector and gate in numpy.

    One unpadded row, every step a fresh full forward of a plain GPT-2.
    """
    parts = assembled(reasoner)
    params = run_params(reasoner)
    template = parts.template
    slow = SlowReasoner(params["reasoner"], parts.reasoner.config)
    inputs = slow.embed(template.prompt(QUESTION))
    out = SimpleNamespace(stops=[], probabilities=[], tokens=[])
    while len(out.stops) < (T if latents is None else latents):
        hidden = slow.hidden(inputs)[-1:]
        out.probabilities.append(softmax(slow.logits(hidden)[0]))
        latent = (
            _project(params["reasoner"]["projector"], hidden)
            if "codi" in reasoner
            else hidden
        )
        inputs = np.concatenate([inputs, latent])
        gate = params["gate"]["out"]
        out.stops.append(
            float(expit(latent[0] @ gate["kernel"][:, 0] + gate["bias"][0]))
        )
        if latents is None and out.stops[-1] >= threshold:
            break
    while len(out.tokens) < ANSWER and template.eos_id not in out.tokens:
        written = slow.embed([*template.closing_ids, *out.tokens])
        logits = slow.logits(slow.hidden(np.concatenate([inputs, written]))[-1:])[0]
        logits[list(template.banned_ids)] = -np.inf
        out.tokens.append(int(logits.argmax()))
    return out


def _project(params, x):
    x = x @ params["fc_in"]["kernel"] + params["fc_in"]["bias"]
    x = x * 0.5 * (1 + erf(x / np.sqrt(2)))
    x = x @ params["fc_out"]["kernel"] + params["fc_out"]["bias"]
    x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    return (x * params["norm"]["scale"] + params["norm"]["bias"]).astype(np.float32)


# The checkpoint and flags of who is asked, what the oracle is told, and what is said of the thought.
ASKED = {
    "the gate": ("", {}, {}, "latents, until the gate's stop probability reached"),
    "a threshold never reached": ("", {"threshold": 1.0}, {"threshold": 1.0},
                                  "4 latents, the most; the gate's stop probability stayed below 1.0"),
    "more than the run had": ("checkpoints/cold_start", {"latents": T + 2}, {"latents": T + 2},
                              "6 latents, a fixed number"),
    "no thought at all": ("checkpoints/cold_start", {"latents": 0}, {"latents": 0}, "thought   none"),
    "imitation": ("checkpoints/imitate", {}, {"latents": 2}, "2 latents, a fixed number"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", ASKED)
def test_a_thought_is_what_the_slow_oracle_thinks(work, case):
    """Imitation thinks its own number, and has no gate."""
    place, flags, told, said = ASKED[case]
    solver = load_solver(str(work / place), **flags)
    tokenizer = solver.setup.template.tokenizer
    slow = _slow(
        **{"reasoner": solver.setup.config.reasoner, "threshold": solver.rule, **told}
    )
    assert case != "the gate" or 1 < len(slow.stops) < T, (
        "the gate's threshold must matter in this test"
    )
    solution = solve(solver, QUESTION)
    gated = case != "imitation"
    assert len(solution.latents) == len(slow.stops)
    for latent, stop, probability in zip(
        solution.latents, slow.stops, slow.probabilities, strict=True
    ):
        assert latent.stop_probability == (
            pytest.approx(stop, abs=1e-5) if gated else None
        )
        best = np.argsort(-probability)[:5]
        np.testing.assert_allclose(
            [p for _, p in latent.likeliest], probability[best], rtol=1e-3
        )
        names = [tokenizer.convert_ids_to_tokens(int(i)) for i in best]
        assert [text.strip(" ") for text, _ in latent.likeliest] == names
    assert solution.cut == (tokenizer.eos_token_id not in slow.tokens)
    if not solution.cut:
        assert (
            solution.text.split()
            == tokenizer.decode(slow.tokens, skip_special_tokens=True).split()
        )
    shown = describe(solver, solution)
    assert said in shown
    assert ("\ntruncated " in shown) == solution.cut
    assert ("stop" in shown.partition("thought")[2]) == (gated and len(slow.stops) > 0)
    if gated and slow.stops:
        rows = [row.split()[:2] for row in shown.splitlines()[-len(slow.stops) :]]
        assert rows == [[str(t), f"{rho:.2f}"] for t, rho in enumerate(slow.stops, 1)]
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.slow
def test_votes_are_the_evaluation_s_samples(solver):
    """70 rollouts, in two batches here, in one there."""
    setup = solver.setup
    samples = 70
    seed = 3
    found = vote(solver, QUESTION, samples, seed)
    problems = encode_problems(setup.template, [Problem(QUESTION, (), "5")])
    out = setup.evaluator.run(
        solver.params,
        problems,
        solver.stopping,
        solver.rule,
        seed=seed,
        samples=samples,
    )
    answers = [setup.reward.read(tokens).answer for tokens in out["tokens"]]
    assert dict(found.counts) == Counter(answers)
    assert len(found.counts) > 2, "the samples must differ in this test"
    assert [count for _, count in found.counts] == sorted(
        Counter(answers).values(), reverse=True
    )
    named = [answer for answer in answers if answer is not None]
    assert found.majority == max(dict.fromkeys(named), key=named.count)
    assert dict(vote(solver, QUESTION, samples, seed + 1).counts) != dict(found.counts)


@pytest.mark.slow
def test_thoughts_that_an_evaluation_keeps_are_those_of_whom_one_asks(solver):
    """Prompts of different lengths in one batch, each with its own number of latents."""
    setup = solver.setup
    questions = (QUESTION, "He buys 2 . How many now ?", "How many now ?")
    problems = encode_problems(
        setup.template, [Problem(question, (), "5") for question in questions]
    )
    seen = setup.evaluator.run(
        solver.params, problems, solver.stopping, solver.rule, probed=True
    )
    assert len(set(seen["latent_steps"])) > 1, "the numbers must differ in this test"
    texts = token_texts(setup.template, setup.reasoner.config.vocab_size)
    for found, question in zip(
        thought_rows(setup.reward, texts, seen, gated=True), questions, strict=True
    ):
        alone = solve(solver, question)
        assert found["text"] == alone.text
        for latent, own in zip(found["latents"], alone.latents, strict=True):
            assert latent["stop"] == pytest.approx(own.stop_probability, abs=1e-4)
            assert [text for text, _ in latent["likeliest"]] == [
                text for text, _ in own.likeliest
            ]
            assert [p for _, p in latent["likeliest"]] == pytest.approx(
                [p for _, p in own.likeliest], abs=1e-4
            )


@pytest.mark.slow
def test_a_cut_answer_says_so(work):
    short = load_solver(str(work), max_answer_tokens=1)
    solution = solve(short, QUESTION)
    found = vote(short, QUESTION, 3)
    assert (solution.cut, solution.answer) == (True, None)
    assert "truncated at 1 tokens" in describe(short, solution)
    assert f"no answer ({found.cut} truncated)" in describe_vote(short, found, 0)


def test_a_vote_without_answers_is_shown(solver):
    shown = describe_vote(
        solver, Vote([(None, 3), ("7", 2), ("-1.5", 1)], "7", 0), 4
    ).splitlines()
    assert shown[0] == "vote of 6 rollouts with dropout 0.3 (seed 4)"
    assert [line.split() for line in shown[1:]] == [
        ["3", "no", "answer"],
        ["2", "7", "<-", "majority"],
        ["1", "-1.5"],
    ]


def test_a_checkpoint_is_used_with_the_config_beside_it(work, tmp_path):
    """Of a stage's directory and of a step's in it; the workdir's, of its last command, is not asked."""
    shutil.copytree(work, tmp_path / "work")
    edit(tmp_path / "work" / "config.json", max_latents=9, log_every=77)
    edit(
        tmp_path / "work" / "checkpoints" / "cold_start" / "config.json", of_another=1
    )  # registered elsewhere, say
    for place in ("cold_start", "cold_start/0"):
        config = config_of(identify(str(tmp_path / "work" / "checkpoints" / place)))
        assert (config.max_latents, config.log_every, config.gate.enabled) == (
            T,
            10,
            True,
        )
        assert (config.dropout.rate, config.dropout.where) == (0.3, "all")
    assert (
        load_solver(str(work / "checkpoints" / "cold_start" / "0")).rule
        == RUN[config.reasoner]
    )
    (tmp_path / "work" / "checkpoints" / "slpo").mkdir()  # begun, without a checkpoint
    assert newest_checkpoint(str(tmp_path / "work")).endswith("cold_start")


# `slpo solve` as a command.


@pytest.mark.slow
def test_the_command_prints_what_the_functions_return(
    work, solver, monkeypatch, capsys
):
    before = contents(work)
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    command.solve([str(work), "--samples", "5", "-"])
    solution = solve(solver, QUESTION)
    found = vote(solver, QUESTION, 5)
    assert (
        capsys.readouterr().out
        == f"{describe(solver, solution)}\n\n{describe_vote(solver, found, 0)}\n"
    )
    assert contents(work) == before


@pytest.mark.slow
def test_the_command_s_json(work, solver, capsys):
    command.solve([str(work), "--samples=5", QUESTION, "--seed=2", "--json"])
    said = json.loads(capsys.readouterr().out)
    solution = solve(solver, QUESTION)
    found = vote(solver, QUESTION, 5, 2)
    assert (said["question"], said["answer"], said["text"]) == (
        QUESTION,
        solution.answer,
        solution.text,
    )
    assert (said["latent_steps"], said["stopping"], said["rule"]) == (
        len(solution.latents),
        "threshold",
        solver.rule,
    )
    assert said["latents"][0]["likeliest"][0][0] == solution.latents[0].likeliest[0][0]
    assert said["latents"][-1]["stop_probability"] == pytest.approx(
        solution.latents[-1].stop_probability, abs=1e-6
    )
    assert said["vote"]["majority"] == found.majority
    assert [
        (row["answer"], row["count"]) for row in said["vote"]["answers"]
    ] == found.counts
    assert (said["vote"]["samples"], said["vote"]["seed"]) == (5, 2)


def test_bytes_that_are_no_text(work):
    line = refusal("solve", "work", "Tom has \udcff .", folder=work.parent)
    assert line.startswith("question: 'Tom has \\udcff .'")
    assert "UTF-8" in line
