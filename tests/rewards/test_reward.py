"""Completions read and compared: numbers by their decimals, boxes by what they mean, in records, Acc and rewards."""

import numpy as np
import pytest

from data_sets import write_jsonl
from refused import one_line
from slpo_jax.api.solver import Solution, Solver, count_votes
from slpo_jax.api.trained_reasoner import describe
from slpo_jax.config import read_config
from slpo_jax.data.batches import encode_problems
from slpo_jax.data.chat import PromptConfig, text_template
from slpo_jax.data.problem import Problem
from slpo_jax.data.tokenizer import byte_tokenizer, task_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.evaluation.completions import accuracy, record_rows
from slpo_jax.evaluation.records import arrays_of
from slpo_jax.evaluation.statistics import summarise
from slpo_jax.rewards.answers import parse_completion
from slpo_jax.rewards.reward import CORRECT, REWARDS, Reward, RewardEntry
from slpo_jax.run.provenance import evaluated_settings
from slpo_jax.run.setup import assemble
from slpo_jax.training.rollouts import make_batch
from small_run import load_config

SLOTS = 8
WORDS = ("+", "-", "Tom", "####", r"\boxed{", "}")


def _template(answers: str):
    tokenizer = task_tokenizer("synthetic", 30)
    template = text_template(tokenizer, PromptConfig(answers=answers))
    tokenizer.add_tokens([word for word in WORDS if word not in tokenizer.get_vocab()])
    return template


def _reward(template, name: str = CORRECT) -> Reward:
    return Reward(name, template.answer_style, template.token_bytes, template.eos_ids)


def _tokens(template, texts):
    """Rows of words; <eos> is written out where there is one."""
    rows = np.full((len(texts), SLOTS), template.pad_id, np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = template.tokenizer.convert_tokens_to_ids(text.split())
        row[: len(ids)] = ids
    return rows


def _done(tokens):
    return {"tokens": tokens, "latent_steps": np.arange(len(tokens))}


# Texts, what is read in them, and whether it is 7, the reference; None: no answer.
READ = {
    "auto": [
        ("#### 7 <eos>", "7", True), ("7 Tom <eos>", None, False), ("#### 8 <eos>", "8", False),
        ("#### 7", None, False),
    ],
    "last_number": [("#### 7 Tom <eos>", "7", True), ("7 8 <eos>", "8", False), ("Tom <eos>", None, False)],
    "texts": [
        ("Tom #### 7 <eos>", "7", True), ("#### Tom 7 <eos>", "Tom 7", False), ("7", None, False),
        ("#### <eos>", None, False),
    ],
    "boxed": [
        (r"\boxed{ 3 + 4 } Tom 8 <eos>", "3 + 4", True), (r"\boxed{ 7 } <eos>", "7", True), ("7 <eos>", None, False),
        (r"\boxed{ 7 } \boxed{ 8 } <eos>", "8", False), (r"\boxed{ 7 }", None, False),
        (r"\boxed{ 7 <eos>", None, False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("answers", READ)
def test_records_and_accuracy_go_by_what_answers_mean(answers):
    template = _template(answers)
    reward = _reward(template)
    texts = READ[answers]
    tokens = _tokens(template, [text for text, _, _ in texts])
    right = [hit for *_, hit in texts]
    problems = encode_problems(
        template, [Problem("Tom ?", ("3 + 4 = 7",), "7")] * len(texts)
    )
    done = _done(tokens)
    assert accuracy(reward, problems, done) == pytest.approx(np.mean(right))
    assert accuracy(reward, problems, _done(tokens[:1])) == 1.0
    rewards = reward.on_host(tokens, problems.problems)
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [float(hit) for hit in right]
    twice = _done(np.repeat(tokens, 2, axis=0)[::-1])
    for index, row in enumerate(
        record_rows(reward, problems, done, {5: done, 9: twice}, samples=1)
    ):
        text, answer, hit = texts[index]
        cut = "<eos>" not in text
        assert (row["reference"], row["answer"], row["correct"], row["cut"]) == (
            "7",
            answer,
            hit,
            cut,
        )
        other = texts[::-1][index // 2]
        assert [list(sample) for sample in row["samples"]] == [
            ["seed", "completion", "answer", "latent_steps", "cut", "correct"]
        ] * 2
        assert [tuple(sample.values())[2:] for sample in row["samples"]] == [
            (answer, index, cut, hit), (other[1], index, "<eos>" not in other[0], other[2])
        ]  # fmt: skip


# By the style, a reference, and what four rollouts say: of each the answer that it votes for.
VOTES = {
    "boxed": ("0.5", [r"\boxed{3}", r"\boxed{\frac12}", r"\boxed{3}", r"\boxed{0.5}", r"\boxed{\dfrac{1}{2}}"],
              ["3", r"\frac12", "3", r"\frac12", r"\frac12"]),
    "texts": ("TRUE", ["#### no", "#### True", "#### no.", "#### true", "#### TRUE ."],
              ["no", "True", "no", "True", "True"]),
    "choice": ("(B)", ["#### A 3", "(B)", "A: no", "B.", "so B"], ["A", "B", "A", "B", "B"]),
    "auto": ("0.5", ["#### 3", "#### 0.5", "#### 3", "#### 0.50", "#### 00.5"], ["3", "0.5", "3", "0.5", "0.5"]),
}  # fmt: skip


@pytest.mark.parametrize("answers", VOTES)
@pytest.mark.parametrize("judge", ["the reference", "a function"])
def test_votes_go_by_what_answers_mean_and_not_by_how_they_are_written(
    answers, judge, monkeypatch
):
    """Three halves win over two threes, whoever says what is right; the records keep what was written."""
    mine = RewardEntry(
        lambda completion: float("3" not in completion and "no" not in completion)
    )
    monkeypatch.setitem(REWARDS, "mine", mine)
    reference, texts, votes = VOTES[answers]
    template = text_template(byte_tokenizer(), PromptConfig(answers=answers))
    reward = _reward(template, CORRECT if judge == "the reference" else "mine")
    tokens = np.full((5, 30), template.pad_id, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        ids = [*template.tokenizer(text)["input_ids"], template.eos_id]
        row[: len(ids)] = ids
    problems = encode_problems(template, [Problem("?", (), reference)])
    done = _done(tokens)
    scored = done | {"likelihood": np.full(5, 0.5, np.float32)}
    (row,) = record_rows(reward, problems, _done(tokens[:1]), {5: scored}, samples=5)
    readings = [reward.read(each) for each in tokens]
    assert [sample["answer"] for sample in row["samples"]] == [
        reading.answer for reading in readings
    ]
    records = arrays_of([row])
    assert records.sample_answers[0, 0].tolist() == votes
    found = summarise(records)
    assert (
        found["maj@4"],
        found["maj@5"],
        found["vote@5_likelihood"],
        found["distinct_answers"],
    ) == (0, 1, 1, 2)
    assert count_votes(readings, reward.style).counts == [(votes[1], 3), (votes[0], 2)]
    assert count_votes(readings, reward.style).majority == votes[1]
    none = reward.read(tokens[0, :1] * 0 + template.eos_id)
    assert count_votes([none] * 4 + readings, reward.style).majority == votes[1], (
        "no answer is no vote"
    )


def _text_config(answers: str):
    config = load_config()
    config.update(reasoner="text_gpt2", max_latents=0, stages=("imitate", "evaluate"))
    config.gate.enabled = False
    config.prompt.answers = answers
    return config


def test_a_setup_verifies_on_the_host_what_no_jitted_step_can(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = ["2 - 1", "1 + 3", "2"]
    records = [
        {"problem": f"Tom has {n} pens . How many now ?", "answer": text}
        for n, text in enumerate(answers)
    ]
    write_jsonl(tmp_path / "train.jsonl", records)
    config = _text_config("boxed")
    config.max_answer_tokens = 8
    config.data.update(train="train.jsonl", valid="")
    setup = assemble(read_config(config))
    assert setup.reward.on_device is None
    assert [problem.answer for problem in setup.train.problems] == answers
    batch = make_batch(
        setup.train,
        0,
        seed=0,
        batch_size=4,
        prompt_slots=(20,),
        encode=setup.references,
    )
    assert batch.references.shape == (4, 0)
    tokens = _tokens(
        setup.template,
        [r"\boxed{ 1 } <eos>", r"\boxed{ 1 } <eos>", r"\boxed{ 2 } <eos>", "1 <eos>"],
    )
    asked = [setup.train.problems[index] for index in (0, 1, 2, 0)]
    assert setup.reward.on_host(tokens, asked).tolist() == [1.0, 0.0, 1.0, 0.0]
    solution = Solution("How many ?", None, "1", [], cut=False)
    solver = Solver(setup, None, "length", 0)
    assert "answer    none: the text has nothing in a \\boxed{}\n" in describe(
        solver, solution
    )
    cut_off = describe(solver, Solution("How many ?", None, r"\boxed{1}", [], cut=True))
    assert "answer    none: the text has no end" in cut_off


def test_references_that_their_own_text_does_not_earn_are_left_out_and_counted(
    tmp_path, warnings
):
    config = _text_config("texts")
    config.tokenizer = "bytes"
    config.max_answer_tokens = 40
    config.prompt_slots = (40,)
    config.model.update(n_positions=90)
    lost = ["5 # of", "C#", "C# developer"]
    kept = ["yes", "C#.", "#1", "5#3", "is it: 3"]
    both = [*kept[:1], *lost, *kept[1:], *lost[:1]]
    records = [
        {"problem": f"What is {n}?", "answer": text} for n, text in enumerate(both)
    ]
    config.data.update(train=write_jsonl(tmp_path / "train.jsonl", records), valid="")
    setup = assemble(read_config(config))
    assert [problem.answer for problem in setup.train.problems] == kept
    assert setup.train.problems.left_out == len(lost) + 1
    assert len(setup.train.prompts) == len(setup.train.answers) == len(kept)
    text = setup.template.answer_text(lost[0])
    read = parse_completion(text, setup.template.answer_style)
    said = (
        f"{text!r} is read as {read!r}"
        if read
        else f"{text!r} has no answer when it is read"
    )
    assert warnings[-1].endswith(
        f"left out {len(lost) + 1} of {len(both)} problems, whose own answers would be wrong: {said}"
    )
    one_line(
        lambda: setup.encode("problems", [Problem("What?", (), lost[0])] * 2),
        match="and no answer of the 2 is right itself",
    )
    judge = setup.reward.asking(lambda completion: 1.0)
    assert len(
        setup.encode(
            "problems", [Problem("What?", (), text) for text in both], judge=judge
        )
    ) == len(both)


def test_how_answers_are_read_is_part_of_an_evaluation():
    for answers in READ:
        assert (
            evaluated_settings(read_config(_text_config(answers)))["prompt.answers"]
            == answers
        )


def test_rollouts_are_evaluated_under_a_noise_of_their_own():
    """A rate given for evaluation is that of its rollouts, and stands in what their results depend on."""
    found = {}
    for rate in (None, 0.1, 0.0):
        config = _text_config("auto")
        config.dropout.rate, config.evaluate.dropout = 0.1, rate
        found[rate] = evaluated_settings(read_config(config))
        setup = assemble(read_config(config))
        assert setup.evaluator.policy.config.dropout_rate == (
            0.1 if rate is None else rate
        )
        assert setup.policy.config.dropout_rate == 0.1
    assert found[None] == found[0.1]
    assert found[0.0]["evaluate.dropout"] == 0.0


def test_a_function_is_asked_on_the_host_of_what_ended(monkeypatch):
    """In evaluation what earns 1 or more is right; a cut completion earns nothing, unasked."""
    earned = {"7": 0.5, "8": 1, "9": np.float32(2), "10": True}
    monkeypatch.setitem(
        REWARDS, "mine", RewardEntry(lambda completion: earned[completion.split()[-1]])
    )
    template = _template("last_number")
    reward = _reward(template, "mine")
    assert reward.on_device is None
    tokens = _tokens(template, ["7 <eos>", "8 <eos>", "9 <eos>", "10 <eos>", "11"])
    asked = [Problem("Tom ?", (), "7")] * len(tokens)
    assert reward.on_host(tokens, asked).tolist() == [0.5, 1.0, 2.0, 1.0, 0.0]
    readings = [reward.read(row) for row in tokens]
    assert reward.right(readings, asked) == [False, True, True, True, False]
    for value in ("1", [1.0]):
        earned["7"] = value
        with pytest.raises(UserError, match=r"^config\.reward: mine .*'Tom \?'"):
            reward.on_host(tokens[:1], asked[:1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_what_is_not_finite_leaves_a_completion_unjudged(monkeypatch, value):
    """The others of its batch keep their verdicts."""
    earned = {"7": value, "8": 1.0}
    monkeypatch.setitem(
        REWARDS, "mine", RewardEntry(lambda completion: earned[completion])
    )
    template = _template("last_number")
    reward = _reward(template, "mine")
    tokens = _tokens(template, ["7 <eos>", "8 <eos>"])
    verdicts = reward.judge(
        [reward.read(row) for row in tokens], [Problem("Tom ?", (), "7")] * 2
    )
    assert verdicts.failed.tolist() == verdicts.unjudged.tolist() == [True, False]
    assert verdicts.total.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_a_completion_is_the_text_that_its_tokenizer_decodes(kind):
    template = _template("last_number")
    if kind == "bytes":
        template = text_template(byte_tokenizer(), PromptConfig())
    text = "Tom 7" if kind == "words" else " Tom\u00eb 7"
    ids = template.tokenizer(text)["input_ids"]
    reading = _reward(template).read(np.array([*ids, template.eos_id], np.int32))
    assert reading.text == template.tokenizer.decode(ids) == text
