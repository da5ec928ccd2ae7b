"""The public names: what they give is what the run's own files say, and nothing is imported before it is used."""

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import jax
import numpy as np
import pandas as pd
import pytest

import slpo_jax as slpo
from asked import QUESTION, contents, workdir
from eval_files import problem
from slpo_jax.api.conversion import export_checkpoint
from slpo_jax.cli import commands
from slpo_jax.config import registry
from slpo_jax.config.config_checks import check
from slpo_jax.config.registry import list_shipped
from slpo_jax.data.generated import ChainConfig
from slpo_jax.data.problems import load_problems
from slpo_jax.io import files
from slpo_jax.io.artifact import write_checksums
from slpo_jax.rewards.reward import REWARDS, RewardEntry
from slpo_jax.run.run_stages import run_stages
from small_run import load_config


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory):
    return slpo.load(workdir("coconut_gpt2", tmp_path_factory.mktemp("api") / "work"))


def test_importing_the_package_imports_nothing_else():
    heavy = "{name.partition('.')[0] for name in sys.modules} & {'jax', 'numpy', 'absl', 'transformers', 'matplotlib'}"
    code = f"import sys, slpo_jax as slpo; print({heavy} or slpo.__version__, sorted(dir(slpo)) > [])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{slpo.__version__} True\n"


def test_every_public_name_is_there():
    assert all(getattr(slpo, name).__doc__ for name in slpo.__all__)
    assert {name for name in vars(registry) if name.startswith("register_")} < set(
        slpo.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = slpo.nothing


def test_the_files_of_parameters_are_hashed_once(reasoner, monkeypatch):
    """However often `load` looks whether they are damaged."""
    hashed = Counter()
    read = hashlib.file_digest

    def count(file, kind):
        hashed[Path(file.name)] += 1
        return read(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", count)
    files._hash_file.cache_clear()
    monkeypatch.setattr(files, "_TICK", 0)
    slpo.load(reasoner.source)
    assert any("params" in path.parts for path in hashed)
    assert {*hashed.values()} == {1}
    slpo.load(reasoner.source)
    assert {*hashed.values()} == {1}


@pytest.mark.slow
def test_a_list_is_solved_as_its_questions_alone(reasoner):
    questions = [
        QUESTION,
        QUESTION.replace("5", "4") + " How many ?",
        QUESTION.replace("3", "2"),
    ]
    alone = [reasoner.solve(question, samples=2, seed=1) for question in questions]
    together = reasoner.solve(questions, samples=2, seed=1)
    assert [(each.answer, each.text, each.votes) for each in together] == [
        (each.answer, each.text, each.votes) for each in alone
    ]
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.latents, other.latents, strict=True):
            np.testing.assert_allclose(a.vector, b.vector, rtol=1e-4, atol=1e-5)
            assert a.stop_probability == pytest.approx(b.stop_probability, abs=1e-5)
            assert [token for token, _ in a.likeliest] == [
                token for token, _ in b.likeliest
            ]
            assert a.vector.shape == (reasoner.config.model.n_embd,)
    assert f"question  {questions[1]}\n" in str(together[1])
    assert "vote of 2 rollouts" in str(together[1])
    with pytest.raises(slpo.UserError, match=r"question: "):
        reasoner.solve([])


@pytest.mark.slow
def test_a_pure_function_solves_in_one_s_own_jit_and_as_an_export(reasoner):
    """What `solve` says, from arrays alone."""
    questions = [QUESTION, "How many ?"]
    tokens, valid = reasoner.prompts(questions)
    ids = reasoner.solver.setup.template.prompts(questions)
    assert [row[real].tolist() for row, real in zip(tokens, valid, strict=True)] == ids
    function = jax.jit(reasoner.solve_function())
    exported = jax.export.export(function)(reasoner.params, tokens, valid)
    for found in (
        function(reasoner.params, tokens, valid),
        exported.call(reasoner.params, tokens, valid),
    ):
        for row, solution in enumerate(reasoner.solve(questions)):
            assert found["lengths"][row] == len(solution.latents)
            vectors = np.stack([latent.vector for latent in solution.latents])
            np.testing.assert_allclose(
                found["latents"][row, : len(vectors)], vectors, rtol=1e-4, atol=1e-5
            )
            stops = [latent.stop_probability for latent in solution.latents]
            np.testing.assert_allclose(
                found["stop"][row, : len(stops)], stops, atol=1e-5
            )
            text = reasoner.tokenizer.decode(
                found["tokens"][row], skip_special_tokens=True
            )
            assert text.split() == solution.text.split()


def test_a_reasoner_comes_back_from_a_pickle(reasoner, monkeypatch, tmp_path):
    fixed = slpo.load(reasoner.source, latents=2)
    written = pickle.dumps(fixed)
    monkeypatch.chdir(tmp_path)
    read = pickle.loads(written)
    assert repr(read) == repr(fixed)
    for ours, theirs in zip(
        jax.tree.leaves(read.params), jax.tree.leaves(fixed.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_line_break_behind_a_question_is_no_part_of_it(reasoner):
    """It is the file's, or the shell's."""
    first = reasoner.solve(QUESTION)
    second = reasoner.solve(f"{QUESTION}\r\n")
    np.testing.assert_array_equal(first.latents[0].vector, second.latents[0].vector)


def test_questions_come_as_a_list_a_tuple_an_array_or_a_column(reasoner):
    questions = [QUESTION, "How many ?"]
    expected = [solution.text for solution in reasoner.solve(questions)]
    for given in (tuple(questions), np.array(questions), pd.Series(questions)):
        assert [solution.text for solution in reasoner.solve(given)] == expected


@pytest.mark.slow
def test_problems_in_every_form_are_the_same(reasoner, tmp_path):
    """Of files and of what else tests/data/test_given.py reads."""
    records = [{"question": QUESTION, "answer": n, "steps": []} for n in range(4)]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    found = [
        reasoner.evaluate(problems, samples=3, seed=2)
        for problems in (records, path, slpo.read(path))
    ]
    first = found[0]
    assert all(each.records == first.records for each in found)
    assert first.summary["n"] == 4
    right = [row["correct"] for row in first.records]
    assert first.summary["acc"] == np.mean(right)
    assert len(first.to_pandas()) == 4
    assert f"Acc     {100 * np.mean(right):.1f}" in str(first)
    assert len(first.plot(found[1]).axes[0].lines) == 2
    assert reasoner.evaluate(path, samples=0, limit=2).records == [
        {**row, "samples": []} for row in first.records[:2]
    ]
    assert first.compare(found[1])["acc"] == (0.0, 0.0, 0.0)
    with pytest.raises(slpo.UserError, match="no samples"):
        reasoner.evaluate(path, samples=0).plot()


def test_a_comparison_prints_a_table_in_percent():
    """The difference in points with its interval; values stay fractions, and labels differ."""
    after = slpo.Evaluation(
        [problem(i, i != 1, [[1, i < 2]], 2 + i) for i in range(4)], label="slpo"
    )
    before = slpo.Evaluation(
        [problem(i, i == 0, [[0, 0]], 3) for i in range(4)], label="slpo"
    )
    found = after.compare(before)
    assert found["pass@1"].difference == 0.75
    title, *lines = [re.split(r"  +", line.strip()) for line in str(found).splitlines()]
    assert title == ["difference", "95 % from", "to"]
    by_name = {line[0]: line[1:] for line in lines}
    assert (by_name["Acc"][0], by_name["P@1"][0]) == ("+50.00", "+75.00")
    assert by_name["#L"] == [
        "+0.50",
        *(f"{value:+.2f}" for value in found["latent_steps"][1:]),
    ]
    legend = after.plot(before).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["slpo (1)", "slpo (2)"]


def test_evaluations_of_other_questions_are_not_compared():
    """Whatever their answers."""
    first, other = (
        slpo.Evaluation([problem(0, True, [[1, 0]]) | {"question": text}])
        for text in ("2 + 6", "9 - 1")
    )
    assert first.compare(first)["acc"] == (0.0, 0.0, 0.0)
    with pytest.raises(slpo.UserError, match=r"compare: "):
        first.compare(other)
    first, other = (
        slpo.Evaluation([problem(0, True, hits)])
        for hits in ([[1, 0], [0, 1]], [[1, 0]])
    )
    with pytest.raises(slpo.UserError, match="samples or seeds"):
        first.compare(other)
    with pytest.raises(slpo.UserError, match=r"compare: 3"):
        first.compare(3)
    with pytest.raises(slpo.UserError, match=r"compare: .*foo.*acc"):
        first.compare(first)["foo"]


def test_a_curve_without_matplotlib_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(slpo.UserError, match=r"plot: .*slpo_jax\[plot\]"):
        slpo.Evaluation([problem(0, True, [[1, 0]])]).plot()


@pytest.mark.slow
def test_a_reward_of_one_s_own_says_what_is_right(reasoner):
    asked = [{"question": QUESTION, "answer": "pens"}]
    seen = []

    def long_enough(question, answer, completion):
        seen.append((question, answer))
        return float(len(completion) > 1)

    found = reasoner.evaluate(asked, samples=2, reward=long_enough)
    assert set(seen) <= {(QUESTION, "pens")}
    cut = found.records[0]["cut"]
    assert found.records[0]["correct"] == (
        not cut and len(found.records[0]["completion"]) > 1
    )
    with pytest.raises(slpo.UserError, match=r"reward: 'nothing'.*correct"):
        reasoner.evaluate(asked, reward="nothing")

    # One that applies to no problem leaves all of them wrong; one that always fails is refused.
    def inapplicable(completion):
        return None

    none = reasoner.evaluate(asked, samples=0, reward=inapplicable)
    assert [record["correct"] for record in none.records] == [False]

    def failing(completion):
        return 1 / 0

    with pytest.raises(
        slpo.UserError, match=r"reward: failing fails on the answers of the first 1 "
    ):
        reasoner.evaluate(asked, samples=0, reward=failing)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.solve(None), "question: None is neither a text nor a list"),
        (lambda r: r.solve([QUESTION, 5]), "neither a text nor a list"),
        (lambda r: r.solve({QUESTION: 1}), "neither a text nor a list"),
        (
            lambda r: r.solve(QUESTION, samples=-1),
            "samples: -1 is not valid; give a whole number from 0",
        ),
        (lambda r: r.solve(QUESTION, samples=2, seed=2**70), "seed: .* is not valid"),
        (lambda r: r.evaluate([], limit=1.5), "limit: 1.5 is not valid"),
        (
            lambda r: r.evaluate(None),
            "problems: NoneType holds no records; give a file, ",
        ),
        (
            lambda r: slpo.load(r.source, treshold=0.5),
            "treshold: is no argument; give some of threshold, latents, ",
        ),
        (lambda r: slpo.load(r.source, threshold=5), "threshold: 5 is not valid"),
        (
            lambda r: slpo.load(r.source, explain=True),
            "explain: .* with config.imitate.recipe=simcot",
        ),
        (lambda r: slpo.load(None), "checkpoint: None is not valid; give a path"),
        (
            lambda r: slpo.load(""),
            r"^\.: has no weights; .* or of a run a stage that is finished$",
        ),
        (lambda r: r.export(5), "folder: 5 is not valid; give a path"),
        (
            lambda r: slpo.load(r.source, speed=3),
            "speed: changes nothing of .*; leave it out",
        ),
        (lambda r: slpo.load(r.source, base="gpt2"), "base: changes nothing of "),
        (
            lambda r: slpo.load(r.source, lora_alpha=32.0),
            "lora_alpha: changes nothing of ",
        ),
    ],
)
def test_a_wrong_value_is_a_line_that_names_the_argument(reasoner, call, message):
    with pytest.raises(slpo.UserError, match=message) as error:
        call(reasoner)
    assert "--" not in str(error.value)


@pytest.mark.slow
def test_questions_longer_than_the_run_s_are_evaluated(reasoner, caplog):
    most = max(reasoner.solver.setup.prompt_slots)
    longer = " ".join([QUESTION] * 2)
    assert len(reasoner.solver.setup.template.prompt(longer)) > most
    found = reasoner.evaluate(
        [
            {"id": 1, "question": each, "answer": 5}
            for each in (longer, QUESTION, " ".join([QUESTION] * 40))
        ],
        samples=1,
    )
    assert [row["question"] for row in found.records] == [longer, QUESTION]
    assert found.records[0]["completion"].strip() == reasoner.solve(longer).text.strip()
    assert "left out 1 of 3" in caplog.text
    assert "problems: not used: id" in caplog.text


def test_an_export_overwrites_what_it_wrote_and_else_only_when_asked(
    reasoner, tmp_path
):
    folder = tmp_path / "exported"
    reasoner.export(folder)
    written = contents(folder)
    slpo.load(reasoner.source, latents=2).export(
        folder
    )  # of other settings, and with no gate to go by
    assert contents(folder).keys() == written.keys()
    said = json.loads(contents(folder)["generation_config.json"])
    assert (said["max_latents"], said["stop_threshold"], said["gate_layers"]) == (
        2,
        None,
        [],
    )
    export_checkpoint(Path(reasoner.source), folder)
    assert contents(folder) == written
    refused = "exported: exists and is not empty; give another directory"
    changes = [
        lambda: (folder / "README.md").write_text("mine"),
        lambda: (folder / "model.safetensors").write_bytes(
            written["model.safetensors"][:-1] + b"\x01"
        ),
        lambda: (
            (folder / "notes").mkdir()
            or (folder / "notes" / "a.txt").write_text("mine")
        ),
        lambda: (folder / "chat_template.jinja").unlink(),
    ]
    for change in changes:
        change()
        before = contents(folder)
        with pytest.raises(slpo.UserError, match=f"{refused}, or overwrite=True$"):
            reasoner.export(folder)
        with pytest.raises(slpo.UserError, match=f"{refused}$"):
            export_checkpoint(Path(reasoner.source), folder)
        assert contents(folder) == before
        reasoner.export(folder, overwrite=True)
        found = contents(folder)
        assert found.pop("notes/a.txt", b"mine") == b"mine"
        assert found == written
        shutil.rmtree(folder / "notes", ignore_errors=True)
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_an_export_leaves_nothing_of_the_one_before_it(reasoner, tmp_path):
    reasoner.export(tmp_path / "exported")
    (tmp_path / "exported" / "decoder.safetensors").write_text("of a thought in words")
    write_checksums(tmp_path / "exported")
    reasoner.export(tmp_path / "exported")
    assert not (tmp_path / "exported" / "decoder.safetensors").exists()


def test_a_run_is_not_overwritten_by_an_export(reasoner, tmp_path):
    shutil.copytree(Path(reasoner.source).parents[1], tmp_path / "work")
    before = contents(tmp_path / "work")
    for folder in (
        "work",
        "work/checkpoints",
        "work/checkpoints/cold_start",
        "work/checkpoints/cold_start/0",
    ):
        for overwrite in (False, True):
            with pytest.raises(slpo.UserError, match=f"{folder}: is a run's folder"):
                reasoner.export(tmp_path / folder, overwrite=overwrite)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(slpo.UserError, match="file: "):
        reasoner.export(tmp_path / "file", overwrite=True)
    assert contents(tmp_path / "work") == before


@pytest.mark.slow
def test_an_export_is_the_reasoner_as_it_was_loaded(reasoner, tmp_path):
    assert reasoner.export(tmp_path / "api") == tmp_path / "api"
    export_checkpoint(Path(reasoner.source), tmp_path / "command")
    ours = contents(tmp_path / "api")
    theirs = contents(tmp_path / "command")
    assert ours.keys() == theirs.keys()
    differ = [file for file, text in ours.items() if text != theirs[file]]
    assert sorted(differ) == [
        "README.md",
        "checksums.json",
    ]  # the title is the folder's name
    for name, how in {
        "other": {"threshold": 0.9, "max_answer_tokens": 3},
        "fixed": {"latents": 2},
    }.items():
        changed = slpo.load(reasoner.source, **how)
        changed.export(tmp_path / name)
        again = slpo.load(tmp_path / name)
        assert (again.solver.stopping, again.solver.rule) == (
            changed.solver.stopping,
            changed.solver.rule,
        )
        before = changed.solve(QUESTION)
        after = again.solve(QUESTION)
        assert (after.answer, after.text, len(after.latents)) == (
            before.answer,
            before.text,
            len(before.latents),
        )


@pytest.mark.parametrize(
    "given", [{"train": 3}, {"valid": [4]}, {"eval": {"mine": {"a": 1}}}]
)
def test_what_holds_no_records_is_a_line_and_leaves_nothing(given, tmp_path):
    key = "mine" if "eval" in given else next(iter(given))
    with pytest.raises(
        slpo.UserError,
        match=rf"^{key}: .*; (expected question|give a file, a list of dicts)",
    ):
        slpo.train("quickstart", **given, workdir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"config": 3},
        {"eval": 3},
        {"workdir": 3},
        {"config": {3: 4}},
        {"eval": {3: "a"}},
    ],
)
def test_a_wrong_argument_of_a_run_is_a_line(given):
    (key,) = given
    with pytest.raises(slpo.UserError, match=rf"^{key}: {{?3"):
        slpo.train("quickstart", **given)


@pytest.mark.slow
def test_a_run_from_python_is_the_command_s(tmp_path):
    config = load_config()
    config.stages = ("imitate", "evaluate")
    config.gate.enabled = False
    run = slpo.train(
        config,
        workdir=tmp_path / "api",
        config={"seed": 5},
        eval={"mine": "synthetic:test"},
    )
    config.seed = 5
    config.data.eval = {"mine": "synthetic:test"}
    run_stages(check(config), tmp_path / "command")
    assert (tmp_path / "api" / "config.json").read_text() == (
        tmp_path / "command" / "config.json"
    ).read_text()
    assert list(run) == ["imitate", "imitate_control"]
    command = json.loads((tmp_path / "command" / "report.json").read_text())
    # All but the milliseconds that an answer took.
    for report in (run.report, command):
        for sets in report["eval"].values():
            assert sets["mine"].pop("milliseconds") > 0
    assert run.report["eval"] == command["eval"]
    assert run["imitate"].source == str(tmp_path / "api" / "checkpoints" / "imitate")
    with pytest.raises(slpo.UserError, match=r"'slpo'.*imitate, imitate_control"):
        run["slpo"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "slpo data FILE"),
        (["--version"], slpo.__version__),
        (["configs"], "quickstart"),
        (["configs", "quickstart"], "def get_config"),
    ],
)
def test_the_command(arguments, said, capsys):
    with contextlib.suppress(SystemExit):
        commands._run(arguments)
    assert said in capsys.readouterr().out


def test_every_shipped_config_says_what_it_is():
    assert {"quickstart", "coconut_gpt2"} <= list_shipped().keys()
    assert all(list_shipped().values())


RECORDS = [{"question": f"{n} + {n}", "steps": [f"{n} + {n} = {2 * n}"], "answer": 2 * n, "kind": n % 3}
           for n in range(40)]  # fmt: skip


@pytest.mark.parametrize("form", ["records", "problems", "pandas", "datasets"])
def test_a_run_takes_records_for_its_problems(form, tmp_path, monkeypatch):
    """The run's config names the files in which they are then, with their columns."""
    seen = []
    monkeypatch.setattr(
        "slpo_jax.run.run_stages.run_stages",
        lambda config, *_: seen.append(config.data),
    )
    make = {
        "records": list,
        "problems": slpo.read,
        "pandas": pd.DataFrame,
        "datasets": datasets.Dataset.from_list,
    }
    train, valid, test = (
        make[form](RECORDS[part]) for part in (slice(24), slice(24, 32), slice(32, 40))
    )
    slpo.train(
        "quickstart", train=train, valid=valid, eval={"mine": test}, workdir=tmp_path
    )
    (data,) = seen
    written = {
        data.train: RECORDS[:24],
        data.valid: RECORDS[24:32],
        data.eval["mine"]: RECORDS[32:],
    }
    columns = frozenset({"kind"})
    for source, records in written.items():
        assert load_problems(source, columns=columns) == load_problems(
            records, columns=columns
        )


def test_a_dict_of_splits_gives_the_sets_that_are_not_given(
    tmp_path, monkeypatch, capsys
):
    seen = []
    monkeypatch.setattr(
        "slpo_jax.run.run_stages.run_stages",
        lambda config, *_: seen.append(config.data),
    )
    parts = {"train": RECORDS[:24], "validation": RECORDS[24:32], "test": RECORDS[32:]}
    splits = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(part) for name, part in parts.items()}
    )
    slpo.train("quickstart", train=splits, workdir=tmp_path / "all")
    slpo.train(
        "quickstart",
        train=splits,
        valid=pd.DataFrame(RECORDS[:3]),
        eval={"mine": splits},
        workdir=tmp_path / "some",
    )
    read = []
    for data in seen:
        sources = (data.train, data.valid, *data.eval.values())
        read.append([len(load_problems(source)) for source in sources])
    assert read == [[24, 8, 8], [24, 3, 8]]
    assert (
        "splits train, validation, test of train, validation, test"
        in capsys.readouterr().err
    )


def test_nothing_is_written_where_a_set_has_no_name_of_a_file(tmp_path):
    with pytest.raises(slpo.UserError, match=r"^eval: .*'a/b' is to be the name of"):
        slpo.train(train=RECORDS, eval={"a/b": RECORDS}, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_other_records(tmp_path, monkeypatch):
    monkeypatch.setattr("slpo_jax.run.run_stages.run_stages", lambda *_: None)
    run = slpo.train(
        "quickstart", train=RECORDS, eval={"mine": RECORDS}, workdir=tmp_path
    )
    path = run.workdir / "data" / "train.jsonl"
    before = path.read_text()
    (tmp_path / "checkpoints" / "imitate" / "5").mkdir(parents=True)
    slpo.train(
        "quickstart", train=RECORDS, eval={"mine": RECORDS[1:]}, workdir=tmp_path
    )  # other tests may be asked
    with pytest.raises(
        slpo.UserError, match=r"^train: the records are not those that .* began with"
    ):
        slpo.train("quickstart", train=RECORDS[1:], workdir=tmp_path)
    assert path.read_text() == before


def test_a_path_that_is_not_utf8_is_a_line(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9")
    with pytest.raises(
        slpo.UserError, match=r"is not UTF-8, as a checkpoint's has to be"
    ):
        slpo.load(path)
    with pytest.raises(slpo.UserError, match=r"^--workdir=.* is not UTF-8"):
        slpo.train(load_config(), workdir=path)
    with pytest.raises(slpo.UserError, match=r"is not UTF-8"), files.whole_folder(path):
        pass


@pytest.mark.slow
def test_the_sets_of_a_run_are_read_as_the_run_does(tmp_path):
    """And written to a file from which the same problems are read."""
    data = {"eval": {"made": "chain:test"}, "chain": {"modulus": 7}}
    folder = workdir("coconut_gpt2", tmp_path / "work", data=data)
    run = slpo.load(folder)
    problems = run.problems("made")
    expected = load_problems("chain:test", ChainConfig(modulus=7))
    assert problems == expected != load_problems("chain:test")
    assert "made with config.data.chain: modulus=7" in str(problems)
    assert run.problems("chain:test") == expected
    with pytest.raises(slpo.UserError, match=r"^source: 'test' .* \(it has made\)"):
        run.problems("test")
    assert "made with the defaults of config.data.chain" in str(slpo.read("chain:test"))
    commands._run(["data", str(folder), "made", f"--out={tmp_path}/made.jsonl"])
    assert load_problems(f"{tmp_path}/made.jsonl") == expected
    with pytest.raises(slpo.UserError, match=r"is a run; name one of its sets too"):
        commands._run(["data", str(folder)])
    with pytest.raises(slpo.UserError, match=r"end it in \.jsonl"):
        commands._run(["data", str(folder), "made", f"--out={tmp_path}/made.txt"])


def test_a_run_takes_a_function_as_its_reward(tmp_path, monkeypatch):
    """It goes by its name, beside no other reward."""
    seen = []
    monkeypatch.setattr(
        "slpo_jax.run.run_stages.run_stages",
        lambda config, *_: seen.append(config.weighted),
    )
    how = {"train": "synthetic:train", "workdir": tmp_path / "work"}

    def near(completion):
        return 1.0

    monkeypatch.setitem(REWARDS, "near", RewardEntry(near))  # and taken back in the end
    del REWARDS["near"]  # what is there at a first registration is ours
    for reward in (near, "near"):
        slpo.train("quickstart", **how, reward=reward)
    slpo.train(
        "quickstart", **how, config={"rewards": (("near", 0.5), ("correct", 1.0))}
    )
    assert seen == [(("near", 1.0),)] * 2 + [(("near", 0.5), ("correct", 1.0))]
    with pytest.raises(slpo.UserError, match=r"^reward: "):
        slpo.train(
            "quickstart", **how, reward=near, config={"rewards": (("near", 0.5),)}
        )
    with pytest.raises(slpo.UserError, match=r"^config\.reward: 3"):
        slpo.train("quickstart", **how, reward=3)
    with pytest.raises(slpo.UserError, match=r"^reward: a lambda"):
        slpo.train("quickstart", **how, reward=lambda completion: 1.0)
