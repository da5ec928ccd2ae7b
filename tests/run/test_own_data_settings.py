"""Settings chosen from one's own problems: what each is, that each is said."""

import csv
import hashlib
import os
import random
from pathlib import Path

import pytest
from absl import logging

from asked import workdir
from data_sets import write_jsonl, write_set
from refused import refusal
from slpo_jax.architectures import REASONERS, architecture_of
from slpo_jax.cli.reasoner_commands import data
from slpo_jax.cli.train import train
from slpo_jax.config import Config
from slpo_jax.config.config_checks import check
from slpo_jax.config.overrides import merge_settings, values
from slpo_jax.data import dataset_rows, problems, record_readers
from slpo_jax.data.problems import load_problems
from slpo_jax.data.record_fields import FieldsConfig
from slpo_jax.errors import UserError
from slpo_jax.io import files
from slpo_jax.io.files import flatten
from slpo_jax.models import xla_cpu
from slpo_jax.rewards.reward import REWARDS, RewardEntry
from slpo_jax.run import own_data_settings, run_stages
from slpo_jax.run.automatic_settings import Measured, choices
from slpo_jax.run.experiment import build
from slpo_jax.run.own_data_settings import derived_settings
from slpo_jax.run.run_stages import check_stages
from slpo_jax.run.setup import assemble
from slpo_jax.run.sources import load_set
from small_run import start_all
from tiny_folder import tiny_folder

hash_file = hashlib.file_digest
# Of the paper's scale: none of them is taken over without a word.
OF_THE_PAPER = {
    "": "max_latents min_latents prompt_slots max_answer_tokens checkpoint_every",
    "imitate.": "batch_size micro_batches c_thought max_latent_stage cot_steps stage_steps final_steps final_latents "
    "optimizer.learning_rate optimizer.warmup_steps",
    "cold_start.": "batch_size micro_batches steps evaluate_every patience optimizer.name optimizer.learning_rate",
    "rl.": "batch_size micro_batches steps optimizer.name optimizer.learning_rate optimizer.warmup_steps",
    "evaluate.": "batch_size samples seeds",
}


def _table(path: Path, count: int = 40) -> str:
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "notes", "result"])
        for number in range(count):
            a, b, c = (draw.randint(1, 9) for _ in range(3))
            steps = (
                f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}" if number else ""
            )
            writer.writerow(
                [
                    f"Tom {number} has {a} pens, buys {b} and finds {c}.",
                    steps,
                    a + b + c,
                ]
            )
    return str(path)


FIELDS = {"question": "task", "steps": "notes", "answer": "result"}


def _chosen(train: str, valid: str = "", eval=None, fields=None, **given):
    """The config, and what was said of it, as `slpo train --train=TRAIN --config.KEY=VALUE` has them."""
    data = {"train": train, "valid": valid, "eval": eval or {}, "fields": fields or {}}
    layers = {"min_latents": 1, "data": data}, given
    return derived_settings(merge_settings(Config(), *layers), given)


@pytest.mark.slow
def test_a_smoke_test_asks_a_gym_for_few_problems(monkeypatch, tmp_path):
    """Before the settings are chosen from them; what the run itself would fail on is asked of the same few."""
    pytest.importorskip("reasoning_gym")
    found = []

    def runs(config, workdir, uncut):
        found.extend((config, uncut))
        raise InterruptedError

    monkeypatch.setattr(run_stages, "run_stages", runs)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which it changes
    with pytest.raises(InterruptedError):
        train(["--train=gym:chain_sum", "--smoke", f"--workdir={tmp_path / 'work'}"])
    config, uncut = found
    assert (config.data.gym.train_size, config.rl.steps, uncut.data) == (
        64,
        2,
        config.data,
    )
    assert uncut.rl.steps == 80


@pytest.mark.slow
def test_a_base_of_ours_on_several_devices_in_a_process_of_several(tmp_path):
    base = workdir("coconut_gpt2", tmp_path / "base")
    train = write_jsonl(tmp_path / "t.jsonl", [
        {"question": f"Tom has {n} pens . He buys {more} . How many now ?", "answer": f"{n + more}"}
        for n in range(10) for more in (2, 3, 4)
    ])  # fmt: skip
    flags = [
        f"--train={train}",
        f"--base={base}",
        "--smoke",
        "--config.cpu_devices=2",
        "--config.sharding.fsdp=2",
    ]
    (process,) = start_all(1, *flags, folder=tmp_path, output="it")
    process.join()
    said = (tmp_path / "it_0.stderr").read_text()
    assert process.exitcode == 0, said
    assert "devices: 2 x cpu" in said


WORDS = ["lempus", "rompus", "wumpus", "vumpus", "yumpus", "zumpus", "dumpus", "jompus"]


def _proofs(path: Path, count: int, *more: str) -> str:
    draw = random.Random(0)
    rows = {}
    while len(rows) < count:
        a, b, c = draw.sample([*WORDS, *more], 3)
        rows[f"Every {a} is a {b}. Tom is a {a}. Is he a {b} or {c}?"] = (
            f"Tom is a {b}."
        )
    return write_jsonl(
        path,
        [
            {"question": q, "steps": ["Tom is here."], "answer": a}
            for q, a in rows.items()
        ],
    )


def test_few_words_are_a_token_each(tmp_path, caplog):
    """Those of the training data; others of a set to evaluate on are counted."""
    few = [
        *WORDS,
        *["Every", "is", "a", "Tom", "Is", "he", "or", "here", ".", "?"],
    ]  # by hand
    test = _proofs(tmp_path / "test.jsonl", 60, "pimpus", "gimpus")
    source = _proofs(tmp_path / "set.jsonl", 260)
    config, lines = _chosen(source, f"{source}[valid]", {"test": test})
    assert config.tokenizer == "words"
    assert (
        f"tokenizer='words' (without a base model: random weights, one for each of the {len(few)} words"
        in lines[2]
    )
    settings = check(config)
    assert config.prompt_slots == (24,)  # 18 words and signs, a line break, the marker
    setup = assemble(settings)
    tokens = {token.lstrip("\u0120") for token in setup.template.tokenizer.get_vocab()}
    markers = {
        "<unk>",
        "<eos>",
        "<pad>",
        "<|start-latent|>",
        "<|end-latent|>",
        "<|latent|>",
    }
    assert tokens == {*few, *markers, "###", "\u010a"}
    with caplog.at_level("WARNING"):
        encoded = setup.test_set("test")
    unread = [
        any(word in line for word in ("pimpus", "gimpus"))
        for line in Path(test).read_text().splitlines()
    ]
    assert (
        f"test: {sum(unread)} of 60 problems have words that the tokenizer doesn't know, 2 in all: '"
        in caplog.text
    )
    unknown = setup.template.unknown_id
    assert [unknown in ids for ids in encoded.prompts] == unread
    smaller = _proofs(tmp_path / "smaller.jsonl", 150)
    assert _chosen(smaller)[0].tokenizer == "bytes"  # 7 to a word
    # However few problems there are to a word, where a kind's marks are words.
    setup = assemble(check(_chosen(smaller, reasoner="colar_gpt2")[0]))
    assert setup.config.tokenizer == "words"
    assert (
        setup.template.tokenizer.unk_token_id
        not in setup.template.tokenizer("Answer:").input_ids
    )
    with pytest.raises(UserError, match=r"'###' .*config\.tokenizer=words"):
        _chosen(smaller, reasoner="colar_gpt2", tokenizer="bytes")


def test_settings_are_the_data_s_and_all_of_them_are_said(tmp_path, monkeypatch):
    def asked():
        raise AssertionError("a device is asked before jax is set up")

    monkeypatch.setattr(xla_cpu, "on_cpu", asked)
    source = _table(tmp_path / "my.csv")
    config, lines = _chosen(source, fields=FIELDS)
    check(config)
    said = "\n".join(lines)
    for section, keys in OF_THE_PAPER.items():
        assert all(f" {section}{key}=" in said for key in keys.split()), section
    default = flatten(values(Config()))
    for key, value in flatten(values(config)).items():
        if default.get(key) != value and not key.startswith("data."):
            assert f"{key}={value!r}" in said, key
    assert not any("\n" in line for line in lines)
    # The lengths are those of the problems as the run is going to write them, by hand: a byte a token.
    problems = load_problems(source, fields=FieldsConfig(**FIELDS))
    assert (
        max(config.prompt_slots) - 8
        < max(len(p.question) for p in problems) + 2
        <= max(config.prompt_slots)
    )
    assert config.max_answer_tokens == len("### 27") + 1 + 2
    assert config.model.n_positions < 256


def test_a_tenth_each_is_set_apart(tmp_path):
    source = _table(tmp_path / "my.csv")
    config, lines = _chosen(source, fields=FIELDS)
    settings = check(config)
    parts = [load_set(settings, key, value) for key, value in (
        ("config.data.train", config.data.train), ("config.data.valid", config.data.valid),
        ("config.data.eval.test", config.data.eval["test"]),
    )]  # fmt: skip
    questions = [{problem.question for problem in part} for part in parts]
    assert list(map(len, questions)) == [32, 4, 4]
    assert len(set.union(*questions)) == 40
    assert (
        "no validation or test set was given; a tenth of the problems each is set apart"
        in lines[0]
    )
    # What is given stays as it is, and what a data set has is taken from it.
    other = _table(tmp_path / "other.csv", 45)
    config, _ = _chosen(other, source, {"mine": source}, FIELDS)
    assert (config.data.train, config.data.valid, dict(config.data.eval)) == (
        other,
        source,
        {"mine": source},
    )
    rows = [{"question": f"Q{n}?", "answer": str(n)} for n in range(10)]
    folder = write_set(tmp_path / "set", {"train": rows, "test": rows[:2]})
    data = _chosen(folder)[0].data
    assert (data.train, data.valid, data.eval["test"]) == (
        folder,
        f"{folder}[valid]",
        folder,
    )
    with pytest.raises(UserError, match=r"few.csv\[train\]: 9 .*10"):
        _chosen(_table(tmp_path / "few.csv", 9), fields=FIELDS)


def test_only_the_absence_of_a_split_is_one(tmp_path, monkeypatch):
    """Not a hub that is out of reach, nor a broken record: a tenth of the training data would become the test set."""
    records = [{"question": f"Q{n}?", "answer": str(n)} for n in range(20)]
    folder = write_set(
        tmp_path / "set",
        {"train": records, "test": [*records[:3], {"question": " ", "answer": "1"}]},
    )
    with pytest.raises(
        UserError,
        match=rf"config\.data\.eval\.test: {folder}, split test, row 4: .*question",
    ):
        _chosen(folder)
    part = f"{_table(tmp_path / 'my.csv', 120)}[train]"
    data = _chosen(part, fields=FIELDS)[0].data
    others = [part.replace("[train]", f"[{name}]") for name in ("valid", "test")]
    assert [data.train, data.valid, data.eval["test"]] == [part, *others]
    asked = []

    def splits(place, _):
        asked.append(place)
        raise UserError(f"{place}: the hub can't be reached")

    monkeypatch.setattr(dataset_rows, "_splits", splits)
    for given in ({"valid": part}, {"eval": {"test": part}}):
        with pytest.raises(UserError, match=r"^owner/name: .*hub"):
            _chosen("owner/name", **given)
    assert len(asked) == 2


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_a_source_is_read_encoded_and_warned_of_once(
    tokenizer, tmp_path, monkeypatch, warnings, capsys
):
    """Where settings are chosen and where the run opens its data; not where the file is another."""
    source = _table(tmp_path / "my.csv")
    reads = []
    records = []
    Path(source).write_text(
        Path(source).read_text()
        + "Tom has some pens.,,many\nHas Tom one?,,\nHas Tom two?,,\n"
    )
    read = record_readers.FILE_READERS[".csv"]
    hashed = []
    record = problems.read_record
    monkeypatch.setitem(
        record_readers.FILE_READERS,
        ".csv",
        lambda path: reads.append(path) or read(path),
    )
    monkeypatch.setattr(
        problems,
        "read_record",
        lambda where, *asked: records.append(where) or record(where, *asked),
    )
    monkeypatch.setattr(files, "_TICK", 0)
    monkeypatch.setattr(
        hashlib,
        "file_digest",
        lambda file, kind: hashed.append(file.name) or hash_file(file, kind),
    )
    config, _ = _chosen(source, fields=FIELDS, tokenizer=tokenizer)
    assert warnings == []
    experiment = build(check(config), tmp_path / "work")
    check_stages(experiment, uncut=experiment.config)
    assert (len(experiment.train), experiment.tests, len(experiment.valid)) == (
        32,
        ("test",),
        4,
    )
    assert [len(reads), len(records), hashed.count(source)] == [1, 43, 1]
    said = f"1 like {source}, line 81: answer 'many' is no number; 2 like {source}, line 82: no answer"
    said = f"{source}: left out 3 of 43 problems: {said}"
    assert [line for line in warnings if "left out" in line] == [said]
    table = Path(source).read_text()
    Path(source).write_text(table.replace("Tom 1 ", "Tim 1 "))  # of the same size
    before, again = (
        load_set(experiment.config, "config.data.eval.test", source) for _ in range(2)
    )
    assert before[1].question.startswith("Tim 1 ")
    assert before is again
    assert len(reads) == 2
    capsys.readouterr()
    data(
        [
            source,
            *(f"--config.data.fields.{role}={name}" for role, name in FIELDS.items()),
        ]
    )
    out, err = capsys.readouterr()
    assert f"\n  {said}\n" in out, "as the run has it"
    assert err == ""


def test_answers_that_are_no_numbers_are_compared_as_texts(tmp_path):
    config, lines = _chosen(_proofs(tmp_path / "set.jsonl", 20))
    assert check(config).prompt.answers == "texts"
    assert "answers are no numbers, 'Tom is a" in lines[1]
    rows = [
        {"question": f"Q{n}?", "answer": "1e999" if n == 3 else str(n)}
        for n in range(20)
    ]
    config, lines = _chosen(write_jsonl(tmp_path / "typo.jsonl", rows))
    assert (config.prompt.answers, config.max_answer_tokens) == ("auto", 9)
    assert "15 of 16 answers are numbers" in lines[1]


def _in_words(path: Path, steps: int = 3) -> str:
    """Problems in the words of the tokenizer synthetic:20, of up to so many steps."""
    rows = [
        {
            "question": f"Tom has {n % 9} pens . He buys 2 .",
            "steps": ["1 + 2 = 3"] * (1 + n % steps),
            "answer": "3",
        }
        for n in range(18)
    ]
    return write_jsonl(path, rows)


def test_lengths_are_measured_by_the_tokenizer_that_there_is(tmp_path):
    """The one that is given, or a base model's own, which brings its positions too."""
    tiny_folder(tmp_path / "base")
    source = _in_words(tmp_path / "set.jsonl", 1)
    found = {}
    for given in ({}, {"tokenizer": "synthetic:20"}, {"init": str(tmp_path / "base")}):
        config, _ = _chosen(source, **given)
        check(config)
        found[config.tokenizer] = (config.prompt_slots, config.max_answer_tokens)
    # 29 or 30 bytes, or 9 words, a line break and the marker; ### 3 <eos> and two more.
    assert found == {"bytes": ((32,), 8), "synthetic:20": ((16,), 5), "": ((16,), 5)}
    assert config.reasoner == "coconut_gpt2"
    assert config.rl.optimizer.learning_rate == Config().rl.optimizer.learning_rate


def test_steps_that_no_stage_imitates_may_be_of_any_kind(tmp_path):
    """Such as a verifier's target in a column that is called as steps are; the tokenizer knows numbers and + alone."""
    records = []
    for a in range(1, 7):
        for b in range(1, 7):
            target = f"${a + b}$"
            records.append(
                {"question": f"{a} + {b}", "solution": target, "answer": str(a + b)}
            )
    file = write_jsonl(tmp_path / "sums.jsonl", records)
    tokenizer = {"tokenizer": "chain:20"}
    _chosen(file, **tokenizer, stages=("rl", "evaluate"))
    with pytest.raises(UserError, match=r"^config\.data\.train: .*sums\.jsonl.*\$"):
        _chosen(file, **tokenizer)


def test_which_checkpoint_of_a_run_is_taken_is_said(tmp_path, monkeypatch, caplog):
    """The run is told that one alone; what else is odd about it, it says itself."""
    identify = own_data_settings.identify
    monkeypatch.setattr(
        own_data_settings,
        "newest_checkpoint",
        lambda source: logging.warning("taken") or source,
    )
    monkeypatch.setattr(
        own_data_settings,
        "identify",
        lambda *asked: logging.warning("odd") or identify(*asked),
    )
    tiny_folder(tmp_path / "base")
    with caplog.at_level("WARNING", logger="absl"):
        _chosen(_in_words(tmp_path / "set.jsonl", 1), init=str(tmp_path / "base"))
    assert caplog.messages == ["taken"]


def test_a_latent_reasoner_may_think_for_twice_as_long_as_it_is_published_to(tmp_path):
    from published import LATENTS, coconut_hugging_face  # need torch
    from published_bases import written

    init = written(coconut_hugging_face).settings["init"]
    config, _ = _chosen(_in_words(tmp_path / "set.jsonl", 1), init=init)
    assert (config.stages, config.max_latents) == (
        ("cold_start", "rl", "evaluate"),
        2 * LATENTS,
    )


MEASURED = Measured(
    7_000,
    [2] * 6_000 + [4] * 1_000,
    [40] * 90 + [200] * 10,
    [6, 9],
    [60],
    124_000_000,
    1024,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"imitate.c_thought": 2, "imitate.max_latent_stage": 4, "max_latents": 16, "min_latents": 4,
              "prompt_slots": (40, 200), "max_answer_tokens": 11, "imitate.batch_size": 32, "imitate.micro_batches": 1,
              "imitate.cot_steps": 5 * 7_000 // 32, "imitate.stage_steps": 2 * 7_000 // 32,
              "imitate.optimizer.learning_rate": 1e-4, "rl.steps": 2 * 7_000 // 32}),
        ({"steps": [9]}, {"imitate.max_latent_stage": 6, "max_latents": 24}),
        ({"steps": [0] * 99 + [1]}, {"imitate.cot_steps": 0, "imitate.stage_steps": 0, "imitate.max_latent_stage": 3}),
        ({"parameters": 0, "positions": 0}, {"imitate.c_thought": 1, "max_latents": 8, "model.n_layer": 4,
                                             "model.n_positions": 320, "imitate.cot_steps": 4_000}),
        ({"parameters": 1_200_000_000}, {"model.remat": True, "imitate.micro_batches": 4,
                                         "imitate.optimizer.learning_rate": 2e-5}),
        ({"written": [60, 900]}, {"imitate.max_tokens": 1024 - 16}),
        ({"latents": 12}, {"stages": ("cold_start", "rl", "evaluate"), "max_latents": 12, "min_latents": 3}),
        ({"problems": 40}, {"imitate.cot_steps": 5 * 7_000 // 32, "rl.steps": 20}),
        ({"steps": [2] * 40}, {"imitate.batch_size": 8, "imitate.cot_steps": 25, "imitate.stage_steps": 20,
                               "rl.steps": 2 * 7_000 // 8}),
    ],
)  # fmt: skip
def test_choices_go_by_lengths_and_sizes(changes, expected):
    found = {
        key: value
        for each in choices(Measured(**vars(MEASURED) | changes))
        for key, value in each.values.items()
    }
    assert {key: found[key] for key in expected} == expected
    assert ("imitate.batch_size" in found) == ("latents" not in changes)


# What flags set, and what follows from it by hand, of 32 problems to train on in batches of 8.
FOLLOWS = {
    "few steps of a stage": ({"rl.steps": 6}, {"rl.optimizer.warmup_steps": 0}),
    "few steps of a phase": (
        {"imitate.final_steps": 45},
        {"imitate.optimizer.warmup_steps": 4},
    ),
    "a batch": (
        {"imitate.batch_size": 4},
        {"imitate.cot_steps": 30 * 32 // 4, "imitate.stage_steps": 80},
    ),
    "a cold start's steps": ({"cold_start.steps": 8}, {"cold_start.evaluate_every": 2}),
    "latents": ({"max_latents": 1}, {"imitate.max_latent_stage": 1, "min_latents": 1}),
    "a stage of the curriculum": ({"imitate.max_latent_stage": 3}, {"max_latents": 6}),
    "a budget": ({"max_answer_tokens": 200}, {"model.n_positions": 256}),
    "a verifier of the host": (
        {"reward": "mine"},
        {"stages": ("imitate", "cold_start", "rl", "evaluate")},
    ),
    "no gate": (
        {"gate.enabled": False},
        {"stages": ("imitate", "rl", "evaluate"), "max_latents": 2},
    ),
    "no thought": (
        {"max_latents": 0},
        {"gate.enabled": False, "imitate.max_latent_stage": 0},
    ),
}


@pytest.mark.parametrize("case", FOLLOWS)
def test_flags_go_first_and_what_is_chosen_follows(case, tmp_path, monkeypatch):
    monkeypatch.setitem(REWARDS, "mine", RewardEntry(lambda completion: 1.0))
    given, follows = FOLLOWS[case]
    config, lines = _chosen(_table(tmp_path / "my.csv"), fields=FIELDS, **given)
    check(config)
    found = flatten(values(config))
    assert {key: found[key] for key in (given | follows)} == given | follows
    chosen = "\n".join(line for line in lines if line.startswith("chosen"))
    assert all(f" {key}=" not in chosen for key in given)
    assert lines[-1] == f"as given, not chosen: {next(iter(given))}"


@pytest.mark.parametrize(
    "reasoner", [name for name in REASONERS if name.endswith("gpt2")]
)
def test_settings_are_those_of_the_reasoner_that_is_given(reasoner, tmp_path):
    architecture = architecture_of(reasoner)
    given = {"reasoner": reasoner, "tokenizer": "synthetic:20"}
    config, _ = _chosen(_in_words(tmp_path / "set.jsonl"), **given)
    experiment = build(check(config), tmp_path / "work")
    check_stages(experiment)
    assert config.reasoner == reasoner
    assert config.gate.enabled == ("cold_start" in config.stages)
    assert experiment.recipe.name == architecture.default_recipe
    if not architecture.has_latents:
        assert config.max_latents == 0
        assert (
            config.max_answer_tokens == 3 * 6 + 3 + 2
        )  # three steps of 5 words and a line break, and ### 2 <eos>
    elif architecture.default_recipe == "colar":
        assert (config.latent_policy.name, config.max_latents) == (
            "colar",
            3 * 6 // 2,
        )  # at speed 2
    elif architecture.default_recipe == "adalr":
        assert (
            config.latent_policy.name,
            config.max_latents,
            config.imitate.adalr.latents_a_step,
        ) == ("adalr", 3, 1)
    else:
        assert (config.latent_policy.name, config.max_latents) == ("latent", 2 * 3)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ["--config.data.train=te.csv"],
            "--train=set.jsonl: config.data.train is given too; leave one of the two out",
        ),
        (
            ["--valid=va.csv", "--config.data.valid", "b.csv"],
            "--valid=va.csv: config.data.valid is given too; ",
        ),
        (["--base=gpt2", "--config.init=b"], "--base=gpt2: config.init is given too; "),
        (
            ["--test=te=a.csv", "--config.data.eval.te=b.csv"],
            "--test=te=a.csv: config.data.eval.te is given too; ",
        ),
        (
            ["--test=a/te.csv", "--test=b/te.csv"],
            "--test=b/te.csv: another set is called te too; ",
        ),
        (
            ["--config.data.train.limit=3"],
            "config.data.train.limit: unknown config key; ",
        ),
        (["--config.rl.steps.most=3"], "config.rl.steps.most: unknown config key; "),
        (["--smoke=3"], "argument --smoke: ignored explicit argument '3'; see --help"),
        (["--processes=x"], "argument --processes: invalid int value: 'x'; see --help"),
    ],
)
def test_a_flag_that_would_be_dropped_or_misread_is_a_line(flags, error, tmp_path):
    assert refusal("train", "--train=set.jsonl", *flags, folder=tmp_path).startswith(
        error
    )
