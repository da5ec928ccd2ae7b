"""Asking a checkpoint: against a slow oracle, and against the evaluation's samples."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from asked import ANSWER, QUESTION, RUN, T, assembled, run_params, workdir
from scipy.special import erf, expit, softmax
from tiny import SlowReasoner

from slpo_jax.checkpoints.decode_settings import config_of
from slpo_jax.checkpoints.detect import identify, newest_checkpoint
from slpo_jax.checkpoints.export import export_checkpoint
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.problem import Problem
from slpo_jax.data.templates import token_texts
from slpo_jax.errors import UserError
from slpo_jax.evaluation.completions import thought_rows
from slpo_jax.run.solution_summary import describe, describe_vote
from slpo_jax.run.solver import Vote, load_solver, solve, vote


@pytest.fixture(scope="module", params=["coconut_gpt2", pytest.param("codi_gpt2", marks=pytest.mark.slow)])
def work(request, tmp_path_factory):
    return workdir(request.param, tmp_path_factory.mktemp(request.param) / "work")


@pytest.fixture(scope="module")
def solver(work):
    return load_solver(str(work))


@dataclass
class _Slow:
    """What the oracle saw: rho_t, and the head's probabilities at the state that made h_t."""

    stops: list
    probabilities: list
    tokens: list


def _slow(reasoner: str, threshold: float, latents: int | None = None) -> _Slow:
    """One unpadded row, every step a fresh full forward of a plain GPT-2, projector and gate in numpy."""
    parts, params = assembled(reasoner), run_params(reasoner)
    template = parts.template
    slow = SlowReasoner(params["reasoner"], parts.reasoner.config)
    inputs, out = slow.embed(template.prompt(QUESTION)), _Slow([], [], [])
    while len(out.stops) < (T if latents is None else latents):
        hidden = slow.hidden(inputs)[-1:]
        out.probabilities.append(softmax(slow.logits(hidden)[0]))
        latent = _project(params["reasoner"]["projector"], hidden) if "codi" in reasoner else hidden
        inputs = np.concatenate([inputs, latent])
        gate = params["gate"]["out"]
        out.stops.append(float(expit(latent[0] @ gate["kernel"][:, 0] + gate["bias"][0])))
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


def _assert_seen(solution, slow: _Slow, tokenizer, gated: bool = True):
    assert len(solution.latents) == len(slow.stops)
    for latent, stop, probability in zip(solution.latents, slow.stops, slow.probabilities, strict=True):
        if gated:
            assert latent.stop_probability == pytest.approx(stop, abs=1e-5)
        best = np.argsort(-probability)[:5]
        np.testing.assert_allclose([p for _, p in latent.nearest], probability[best], rtol=1e-3)
        assert [text.strip(" ") for text, _ in latent.nearest] == [
            tokenizer.convert_ids_to_tokens(int(i)) for i in best
        ]
    if tokenizer.eos_token_id in slow.tokens:
        assert solution.text.split() == tokenizer.decode(slow.tokens, skip_special_tokens=True).split()


@pytest.mark.slow
def test_a_thought_is_what_the_slow_oracle_thinks(solver):
    name = solver.setup.config.reasoner
    slow = _slow(name, RUN[name])
    assert 1 < len(slow.stops) < T, "the gate's threshold must matter in this test"
    solution = solve(solver, QUESTION)
    _assert_seen(solution, slow, solver.setup.template.tokenizer)
    shown = describe(solver, solution)
    assert f"{len(slow.stops)} latents, until the gate's stop probability reached {RUN[name]}" in shown
    rows = shown.splitlines()[-len(slow.stops) :]
    assert [row.split()[:2] for row in rows] == [[str(t), f"{rho:.2f}"] for t, rho in enumerate(slow.stops, 1)]
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.slow
def test_a_threshold_that_is_never_reached(work):
    high = load_solver(str(work), threshold=1.0)
    solution = solve(high, QUESTION)
    assert len(solution.latents) == T
    assert "4 latents, the most; the gate's stop probability stayed below 1.0" in describe(high, solution)


@pytest.mark.slow
def test_a_fixed_number_may_be_more_than_the_run_had(work):
    longer = load_solver(str(work / "checkpoints" / "cold_start"), latents=T + 2)
    name = longer.setup.config.reasoner
    solution = solve(longer, QUESTION)
    _assert_seen(solution, _slow(name, 0.0, T + 2), longer.setup.template.tokenizer)
    assert "6 latents, a fixed number" in describe(longer, solution)


@pytest.mark.slow
def test_no_thought_at_all(work):
    silent = load_solver(str(work / "checkpoints" / "cold_start"), latents=0)
    name = silent.setup.config.reasoner
    solution = solve(silent, QUESTION)
    assert solution.latents == []
    _assert_seen(solution, _slow(name, 0.0, 0), silent.setup.template.tokenizer)
    assert "thought   none" in describe(silent, solution)


@pytest.mark.slow
def test_imitation_thinks_its_own_number_and_has_no_gate(work):
    imitated = load_solver(str(work / "checkpoints" / "imitate"))
    assert (imitated.stopping, imitated.rule) == ("length", 2)
    solution = solve(imitated, QUESTION)
    assert [latent.stop_probability for latent in solution.latents] == [None, None]
    _assert_seen(
        solution, _slow(imitated.setup.config.reasoner, 0.0, 2), imitated.setup.template.tokenizer, gated=False
    )
    assert "stop" not in describe(imitated, solution)


@pytest.mark.slow
def test_votes_are_the_evaluation_s_samples(solver):
    """70 rollouts, in two batches here, in one there."""
    setup, samples, seed = solver.setup, 70, 3
    found = vote(solver, QUESTION, samples, seed)
    problem = Problem(QUESTION, (), "5")
    problems = EncodedProblems((problem,), [setup.template.prompt(QUESTION)], [[]], [[]], setup.template)
    out = setup.evaluator.run(solver.params, problems, solver.stopping, solver.rule, seed, samples)
    answers = [setup.reward.read(tokens).answer for tokens in out.tokens]
    assert dict(found.counts) == Counter(answers)
    assert len(found.counts) > 2, "the samples must differ in this test"
    assert [count for _, count in found.counts] == sorted(Counter(answers).values(), reverse=True)
    named = [answer for answer in answers if answer is not None]
    assert found.majority == max(dict.fromkeys(named), key=named.count)
    assert dict(vote(solver, QUESTION, samples, seed + 1).counts) != dict(found.counts)


@pytest.mark.slow
def test_thoughts_that_an_evaluation_keeps_are_those_of_whom_one_asks(solver):
    """Prompts of different lengths in one batch, each with its own number of latents."""
    setup, questions = solver.setup, (QUESTION, "He buys 2 . How many now ?", "How many now ?")
    prompts = setup.template.prompts(questions)
    problems = [Problem(question, (), "5") for question in questions]
    empty = [[] for _ in questions]
    encoded = EncodedProblems(tuple(problems), prompts, empty, empty, setup.template)
    seen = setup.evaluator.run(solver.params, encoded, solver.stopping, solver.rule, probed=True)
    assert len(set(seen.latent_steps)) > 1, "the numbers must differ in this test"
    texts = token_texts(setup.template, setup.reasoner.config.vocab_size)
    for found, question in zip(thought_rows(setup.reward, texts, seen, gated=True), questions, strict=True):
        alone = solve(solver, question)
        assert found["text"] == alone.text
        assert [latent["stop"] for latent in found["latents"]] == pytest.approx(
            [latent.stop_probability for latent in alone.latents], abs=1e-4
        )
        for latent, own in zip(found["latents"], alone.latents, strict=True):
            assert [text for text, _ in latent["nearest"]] == [text for text, _ in own.nearest]
            assert [p for _, p in latent["nearest"]] == pytest.approx([p for _, p in own.nearest], abs=1e-4)


@pytest.mark.slow
def test_a_cut_answer_says_so(work):
    """The oracle goes on where one token is too few; with the whole budget it depends on whether it wrote an end."""
    name = RUN.keys() & {load_solver(str(work)).setup.config.reasoner}
    slow = _slow(*name, RUN[min(name)])
    eos = assembled(*name).template.eos_id
    assert slow.tokens[0] != eos
    short = load_solver(str(work), max_answer_tokens=1)
    solution, found = solve(short, QUESTION), vote(short, QUESTION, 3)
    assert (solution.cut, solution.answer) == (True, None)
    assert "cut       at 1 tokens" in describe(short, solution)
    assert f"no answer ({found.cut} cut off)" in describe_vote(short, found, 0)
    whole = load_solver(str(work))
    solution = solve(whole, QUESTION)
    assert solution.cut == (eos not in slow.tokens)
    assert ("\ncut " in describe(whole, solution)) == solution.cut


def test_a_vote_without_answers_is_shown(solver):
    shown = describe_vote(solver, Vote([(None, 3), ("7", 2), ("-1.5", 1)], "7", 0), 4).splitlines()
    assert shown[0] == "vote of 6 rollouts with dropout 0.3 (seed 4)"
    assert [line.split() for line in shown[1:]] == [["3", "no", "answer"], ["2", "7", "<-", "majority"], ["1", "-1.5"]]


@pytest.mark.slow
def test_an_export_is_asked_like_the_checkpoint(work, solver, tmp_path):
    export_checkpoint(work / "checkpoints" / "cold_start", tmp_path / "exported")
    same = load_solver(str(tmp_path / "exported"))
    assert same.setup.config.reasoner == solver.setup.config.reasoner
    assert (same.setup.config.max_latents, same.rule, same.setup.config.max_answer_tokens) == (T, solver.rule, ANSWER)
    ours, theirs = solve(solver, QUESTION), solve(same, QUESTION)
    assert (theirs.answer, theirs.text) == (ours.answer, ours.text)
    np.testing.assert_allclose(
        [latent.stop_probability for latent in theirs.latents],
        [latent.stop_probability for latent in ours.latents],
        atol=1e-6,
    )


def test_settings_of_the_stage_go_before_those_of_the_workdir(work, tmp_path):
    config = config_of(identify(newest_checkpoint(str(work))))
    assert config.init == str(work / "checkpoints" / "cold_start")
    assert (config.max_latents, config.seed, config.prompt_slots) == (T, 7, (16, 20))
    assert (config.dropout.rate, config.dropout.where) == (0.3, "all")
    assert config.gate.enabled
    in_words = config_of(identify(newest_checkpoint(str(work))), "text_gpt2")
    assert (in_words.max_latents, in_words.gate.enabled) == (T, False)  # as its run thought, if in words
    folder, facts = work / "config.json", json.loads((work / "config.json").read_text())
    before = folder.read_text()
    try:
        folder.write_text(json.dumps(facts | {"max_latents": 9, "log_every": 77, "of_another_version": 1}))
        config = config_of(identify(newest_checkpoint(str(work))))
        assert (config.max_latents, config.log_every) == (T, 77)
        folder.write_text(json.dumps(facts | {"log_every": "often"}))
        with pytest.raises(UserError, match=r"config.json: key log_every.*mend"):
            config_of(identify(newest_checkpoint(str(work))))
    finally:
        folder.write_text(before)


def test_a_step_s_directory_is_its_stage(work):
    solver = load_solver(str(work / "checkpoints" / "cold_start" / "0"))
    assert (solver.stopping, solver.rule) == ("threshold", RUN[solver.setup.config.reasoner])


def test_the_newest_stage_of_a_workdir(work):
    newer = work / "checkpoints" / "slpo"
    newer.mkdir()  # begun, without a checkpoint
    try:
        assert newest_checkpoint(str(work)).endswith("cold_start")
        (newer / "5" / "params").mkdir(parents=True)
        assert newest_checkpoint(str(work)) == str(newer)
    finally:
        for folder in (newer / "5" / "params", newer / "5", newer):
            folder.rmdir()


def test_a_latent_policy_that_is_not_known_here_is_one_line(work, tmp_path):
    shutil.copytree(work, tmp_path / "other")
    for path in (tmp_path / "other").rglob("config.json"):
        facts = json.loads(path.read_text())
        facts["latent_policy"] = {"name": "tokens", "tokens": {}}
        path.write_text(json.dumps(facts))
    with pytest.raises(
        UserError, match=r"key latent_policy\.name: 'tokens' is not valid; give one of latent, additive"
    ):
        load_solver(str(tmp_path / "other"))
