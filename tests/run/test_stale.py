"""Artifact x what changed: what is made again, what is kept, and what is refused; by models that answer at once.

A stage is bound to its settings, the bytes of its data and the start that it was trained from, and says what differs.
An evaluation, a choice and what is seen of thoughts are made again, each where something of its own has changed.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from slpo_jax.checkpoints.identity import identify
from slpo_jax.checkpoints.saved_config import config_of, stopping_of
from slpo_jax.config import Config, read_config
from slpo_jax.config.overrides import merge_settings, values
from slpo_jax.data.tokenizer import load_tokenizer
from slpo_jax.data.tokenizer_files import save_tokenizer
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluator import Evaluator
from slpo_jax.evaluation.report import write_report
from slpo_jax.io.files import flatten
from slpo_jax.io.orbax import params_digest, save_params
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.run import evaluate, judge, train_stage
from slpo_jax.run.experiment import Experiment, build, rows
from slpo_jax.run.provenance import (
    check_start,
    checkpoint_digest,
    ensure_manifest,
    evaluated_settings,
    settings_of,
)
from slpo_jax.run.run_stages import check_stages, run_stages
from slpo_jax.runtime.mesh import replicate
from slpo_jax.stages import CONTROL, EVALUATE, RL, SECTIONS
from slpo_jax.training.recipes import RECIPES
from small_run import load_config, write_problems

pytestmark = pytest.mark.usefixtures("cpu_devices")
STAGES = {"imitate": 1, "imitate_control": 2, "cold_start": 3, "slpo": 4}
ROWS = ("imitate", "imitate_fixed_tmax", "imitate_control", "cold_start", "slpo")
SETS = ("real", "made")
EVERYTHING = {f"{row} on {name}" for row in ROWS for name in SETS}
SLPO = {"slpo on real", "slpo on made"}


def _params(value):
    return {"reasoner": {"w": jnp.full(3, float(value))}, "gate": {"w": jnp.ones(2)}}


class Run:
    """A workdir whose checkpoints are one number each, which is how many latents they take."""

    def __init__(self, folder, stages=STAGES, like=None):
        """A new one with these stages, or a copy of another."""
        self.folder, self.work, self.limits, self.rules = (
            folder,
            folder / "work",
            set(),
            {},
        )
        if like is not None:
            shutil.copytree(like.folder, folder)
            return
        folder.mkdir()
        write_problems(folder)
        for stage, value in stages.items():
            self.train(stage, value)

    def config(self, **changes):
        config = load_config()
        config.data.update(
            train=str(self.folder / "train.jsonl"), valid=str(self.folder / "valid.txt")
        )
        config.data.eval.real = str(self.folder / "real.json")
        config.update_from_flattened_dict(changes)
        return config

    def experiment(self, **changes):
        return build(read_config(self.config(**changes)), self.work)

    def train(self, stage, value=1, **changes):
        experiment = self.experiment(**changes)
        folder = experiment.workdir.stage_folder(stage)
        shutil.rmtree(folder.path, ignore_errors=True)
        ensure_manifest(experiment.stage(stage))
        save_params(folder.path, _params(value))
        folder.finished.write_text("0\n")
        experiment.log.close()

    def edit(self, where, old, new, count=1):
        path = self.folder / where
        path.write_text(path.read_text().replace(old, new, count))

    def change_answer(self, place):
        problems = json.loads((self.folder / "real.json").read_text())
        problems[place]["answer"] = "17"
        (self.folder / "real.json").write_text(json.dumps(problems))

    def delete(self, *stages):
        for stage in stages:
            shutil.rmtree(self.work / "checkpoints" / stage)

    def fine(self, **changes):
        """Nothing is refused before the first stage."""
        check_stages(self.experiment(**changes))

    def error(self, key, said="", **changes):
        """A run is refused before its first stage by one line, which begins with a key, or a stage, and says this."""
        key = (
            rf"{re.escape(str(self.work))}/checkpoints/{key}"
            if key in STAGES
            else rf"config\.{re.escape(key)}"
        )
        with pytest.raises(UserError, match=f"^{key}: ") as raised:
            self.fine(**changes)
        assert "delete" in str(raised.value) or "set it back" in str(raised.value)
        assert said in str(raised.value)

    def evaluate(self, monkeypatch, report=False, interrupt="", **changes):
        """The labels of what was rolled out.

        Args:
            interrupt: a label; Ctrl-C when it begins.
        """
        seen = []

        def roll_out(
            _,
            params,
            problems,
            stopping,
            rule,
            *,
            label,
            samples=1,
            limit=0,
            probed=False,
            name="",
            **asked,
        ):
            seen.append(label.partition(",")[0])
            self.rules.setdefault(seen[-1], rule)
            assert name == seen[-1].partition(" on ")[2], (
                "each set has noise of its own"
            )
            if not probed:
                self.limits.add((seen[-1] == "validation", limit))
            if seen[-1] == interrupt:
                raise KeyboardInterrupt
            n = min(limit or len(problems), len(problems)) * samples
            value = int(params["reasoner"]["w"][0])
            found = {
                "tokens": np.zeros((n, 4), np.int32),
                "latent_steps": np.full(n, value, np.int32),
            }
            if probed:
                found |= {
                    "stop": np.full((n, 9), 0.25),
                    "likeliest_probability": np.ones((n, 9, 1)),
                }
                found["likeliest_token"] = np.full((n, 9, 1), 3)
            return found | (
                {"latents": np.ones((n, 3, 1), np.float32)}
                if asked.get("keep_latents")
                else {}
            )

        experiment = self.experiment(**{"stages": ("evaluate",)} | changes)
        with monkeypatch.context() as patch, contextlib.closing(experiment.log):
            patch.setattr(Evaluator, "run", roll_out)
            patch.setattr(Evaluator, "milliseconds", lambda *_: (1.0, 1))
            if not report:
                headline = {
                    "title": "",
                    "columns": [""],
                    "rows": [],
                    "caption": "",
                    "warnings": [],
                }
                patch.setattr(
                    evaluate,
                    "write_report",
                    lambda _: {"eval": {}, "headline": headline},
                )
            evaluate.evaluate(experiment, rows(experiment))
        return set(seen)

    def stopping(self, stage):
        """How the checkpoint stops for whoever asks it; three numbers don't say that they have a gate."""
        identity = identify(str(self.work / "checkpoints" / stage))
        return stopping_of(
            merge_settings(config_of(identity), {"gate.enabled": True}), identity
        )

    def records(self, row, name="real"):
        return self.work / "eval" / row / f"{name}.jsonl"

    def value(self, row, file="row.json"):
        return json.loads((self.work / "eval" / row / file).read_text())["value"]

    def files(self):
        found = (
            path
            for path in self.work.rglob("*")
            if path.is_file() and "tensorboard" not in path.parts
        )
        return {path: path.read_bytes() for path in found}


@pytest.fixture(autouse=True, scope="module")
def _models():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Experiment,
            "abstract_params",
            lambda self, *_: replicate(_params(0), self.mesh),
        )
        yield patch


@pytest.fixture(scope="module")
def trained(tmp_path_factory, _models):
    return Run(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, trained, _models):
    run = Run(tmp_path_factory.mktemp("evaluated") / "run", like=trained)
    assert run.evaluate(_models) == EVERYTHING | {"validation"}
    return run


@pytest.fixture
def run(tmp_path, trained):
    return Run(tmp_path / "run", like=trained)


@pytest.fixture
def finished(tmp_path, evaluated):
    return Run(tmp_path / "run", like=evaluated)


# What happens to a file, or to whatever lies in a workdir; tests/io/test_artifact.py has every kind of damage.


def _gone(where):
    return lambda run: os.unlink(run.folder / where)


RECORDS, MANIFEST = (
    f"work/eval/cold_start/real.{ending}" for ending in ("jsonl", "manifest")
)
WRONG = ('"correct": false', '"correct": true')
SPEED = {
    "evaluate.batch_size": 8, "evaluate.prompt_multiple": 10, "prompt_slots": (20, 25), "model.remat": True,
    "evaluate.datasets": ("made", "real"), "rl.steps": 77777, "rl.group": 2, "log_every": 3,
}  # fmt: skip
# What changed: to the files, to the config, and what is rolled out for it; "+" in the name: whatever else is, too; "="
# in the name: no file is another afterwards but for digests and manifests.
MADE_AGAIN = {
    "nothing =": (None, {}, set()),
    "speed": (None, SPEED, set()),
    "no thoughts asked for": (None, {"evaluate.probed": 0}, set()),
    "a setting +": (None, {"dropout.rate": 0.2}, EVERYTHING | {"validation"}),
    "a budget +": (None, {"evaluate.max_answer_tokens": 3}, EVERYTHING | {"validation"}),
    "of samples, which no choice is made by": (None, {"evaluate.samples": 3}, EVERYTHING),
    "another set by a name": (None, {"data.eval.made": "real"}, {f"{row} on made" for row in ROWS}),
    "thresholds": (None, {"evaluate.thresholds": (0.7, 0.8)},
                   {f"{row} on {name}" for row in ("cold_start", "slpo") for name in SETS} | {"validation"}),
    "trained again": (lambda run: run.train("slpo", 7, **{"rl.optimizer.learning_rate": 0.5}), {},
                      {"validation"} | SLPO),
    "saved again, the same digest": (lambda run: run.train("slpo", 4), {}, set()),
    "another objective": (lambda run: run.train("pathwise", 6), {},
                          {"validation", "pathwise on real", "pathwise on made"}),
    "a test file touched": (lambda run: os.utime(run.folder / "real.json", (1, 1)), {}, set()),
    "a test file changed": (lambda run: run.change_answer(2), {}, {f"{row} on real" for row in ROWS}),
    "beyond the limit": (lambda run: run.change_answer(7), {}, set()),
    "the validation file changed": (lambda run: run.edit("valid.txt", "2", "1"), {}, {"validation"}),
    "records edited =": (lambda run: run.edit(RECORDS, *WRONG), {}, {"cold_start on real"}),
    "records gone =": (_gone(RECORDS), {}, {"cold_start on real"}),
    "manifest edited =": (lambda run: run.edit(MANIFEST, '"seeds": 2', '"seeds": 1'), {}, {"cold_start on real"}),
    "manifest gone =": (_gone(MANIFEST), {}, {"cold_start on real"}),
    "thoughts gone =": (_gone("work/eval/slpo/made.thoughts.json"), {}, {"slpo on made"}),
    "digest edited =": (lambda run: run.edit("work/checkpoints/slpo.digest.json", '"value": "', '"value": "x'), {},
                        set()),
    "row gone =": (_gone("work/eval/slpo/row.json"), {}, {"validation"}),
}  # fmt: skip
SAID = {
    "another set by a name": ["config.data.eval.made"],
    "a test file changed": ["config.data.eval.real"],
}


@pytest.mark.parametrize("name", MADE_AGAIN)
def test_what_is_made_again_and_what_is_kept(finished, monkeypatch, name, warnings):
    """And of what is made again all is as it was, where the same is asked for; then nothing more is to be done.

    Of a set that has changed a line says so, once.
    """
    change, config, expected = MADE_AGAIN[name]
    config = {
        key: str(finished.folder / "real.json") if value == "real" else value
        for key, value in config.items()
    }
    before = finished.files()
    if change:
        change(finished)
    if not expected:
        read = (
            (lambda *_: _params(4))
            if "digest" in name
            or "evaluate.batch_size" in config  # whose milliseconds are another figure
            else (lambda *_: pytest.fail("read"))
        )
        monkeypatch.setattr(train_stage, "read_stage_params", read)
    done = finished.evaluate(monkeypatch, **config)
    assert done >= expected if "+" in name else done == expected
    said = [
        line.partition(": ")[0]
        for line in warnings
        if "has changed since its evaluation" in line
    ]
    assert said == SAID.get(name, [])
    assert finished.evaluate(monkeypatch, **config) == set()
    if "=" in name:
        others = {
            path.name
            for path, text in finished.files().items()
            if text != before.get(path)
        }
        assert all(name.endswith((".digest.json", ".manifest")) for name in others)


UNREAD = (
    RECORDS, MANIFEST, "work/eval/slpo/made.thoughts.json", "work/eval/slpo/row.json", "work/checkpoints",
    "work/checkpoints/slpo", "work/checkpoints/slpo/config.json", "work/checkpoints/slpo.digest.json",
    "work/checkpoints/slpo/rule.json", "work/checkpoints/slpo/0/params",
)  # fmt: skip


@pytest.mark.parametrize("where", UNREAD)
def test_what_can_not_be_read_is_said_and_nothing_is_made_again(
    finished, monkeypatch, unreadable, where
):
    before = finished.files()
    path = finished.folder / where
    with unreadable(path), pytest.raises(PermissionError, match=re.escape(str(path))):
        finished.evaluate(monkeypatch)
    assert finished.files() == before


@pytest.mark.parametrize(
    "where", ["work/eval/slpo/row.json", "work/checkpoints/slpo.digest.json"]
)
def test_what_the_first_process_alone_sees_is_one_line(
    finished, monkeypatch, second_process, where
):
    """A choice, a digest; a second one's could be another."""
    os.unlink(finished.folder / where)
    with (
        second_process(),
        pytest.raises(UserError, match=rf"^{finished.folder}/{where}: process 1 "),
    ):
        finished.evaluate(monkeypatch)


def test_what_nobody_can_make_again_unasked_is_one_line(finished, monkeypatch):
    """A row says which rule was chosen, and so does the checkpoint's file, which may be all that is there."""
    asked = {"work/eval/slpo/row.json": finished.evaluate,
             "work/checkpoints/cold_start/rule.json": lambda _: finished.stopping("cold_start")}  # fmt: skip
    for where, ask in asked.items():
        finished.edit(where, '"rule": 0', '"rule": 7')
        with pytest.raises(UserError, match=rf"^{finished.folder}/{where}: "):
            ask(monkeypatch)


def test_thoughts_are_of_the_problems_asked_for(finished, monkeypatch):
    thoughts = {row: finished.value(row, "real.thoughts.json") for row in ROWS}
    assert [len(problem["latents"]) for problem in thoughts["slpo"]] == [4] * 6
    stops = [
        {latent["stop"] for problem in thoughts[row] for latent in problem["latents"]}
        for row in ROWS
    ]
    assert stops == [
        {None},
        {None},
        {None},
        {0.25},
        {0.25},
    ]  # without a gate nothing stops
    finished.train("slpo", 5)
    assert finished.evaluate(monkeypatch, **{"evaluate.probed": 2}) == EVERYTHING | {
        "validation"
    }
    assert [
        len(problem["latents"])
        for problem in finished.value("slpo", "real.thoughts.json")
    ] == [5] * 2


@pytest.mark.slow
def test_what_else_is_asked_of_the_same_rollouts_is_evaluated_anew(
    finished, monkeypatch
):
    """Scorers, a search, and the reward model that both may ask; not how many are searched where nothing is."""
    value = [1.0]
    monkeypatch.setattr(judge, "read_judge", lambda *_: {"w": jnp.full(2, value[0])})
    assert finished.evaluate(monkeypatch, **{"evaluate.candidates": 5}) == set()
    for changes, model in (
        ({"evaluate.scorers": ()}, 1.0), ({"evaluate.scorers": ("self_certainty",)}, 1.0),
        ({"evaluate.scorers": ("latent_rm",)}, 1.0), ({"evaluate.scorers": ("latent_rm",)}, 2.0),
        ({"evaluate.beams": 2}, 2.0), ({"evaluate.beams": 3}, 2.0), ({"evaluate.beams": 3}, 4.0),
        ({"evaluate.beams": 3, "evaluate.candidates": 5}, 4.0),
        # A search has its seeds even where there are no samples.
        ({"evaluate.beams": 3, "evaluate.samples": 0, "evaluate.seeds": 1}, 4.0),
        ({"evaluate.beams": 3, "evaluate.samples": 0, "evaluate.seeds": 2}, 4.0),
    ):  # fmt: skip
        value[0] = model
        assert finished.evaluate(monkeypatch, **changes) == EVERYTHING, (changes, model)
        assert finished.evaluate(monkeypatch, **changes) == set()


def test_by_steps_a_problem_without_steps_has_all_latents(finished, monkeypatch):
    """Those of the set `real` have none; of `made` each has as many latents as steps, up to the row's."""
    finished.evaluate(monkeypatch, **{"evaluate.by_steps": True, "evaluate.samples": 3})
    steps = [
        len(each.steps) for each in finished.experiment().test_set("made").problems[:6]
    ]
    assert len(set(steps)) > 1
    assert finished.rules["imitate_fixed_tmax on real"] == [3] * 6
    assert finished.rules["imitate_fixed_tmax on made"] == [
        min(count, 3) for count in steps
    ]


def test_most_answers_cut_at_the_limit_is_said(finished, monkeypatch, warnings):
    """Four tokens of which none is an end; every set says so, and names the budget that is its own.

    Not so the validation that chooses a rule: a rule that cuts answers need not be the one that is chosen.
    """
    finished.train("slpo", 7)
    says = (
        "100% of the answers are truncated, and wrong whatever they say; raise config."
    )
    done = finished.evaluate(monkeypatch)
    cut = [line for line in warnings if "truncated" in line]
    assert "validation" in done
    assert sorted(cut) == sorted(
        f"{label}: {says}max_answer_tokens" for label in done - {"validation"}
    )
    warnings.clear()
    done = finished.evaluate(
        monkeypatch, **{"evaluate.max_answer_tokens": 4, "evaluate.seeds": 1}
    )
    assert {line for line in warnings if "truncated" in line} >= {
        f"{label}: {says}evaluate.max_answer_tokens" for label in done - {"validation"}
    }


def test_a_stage_s_validation_of_truncated_answers_says_so_once(
    finished, monkeypatch, warnings
):
    experiment = finished.experiment()
    count = experiment.config.evaluate.limit or len(experiment.valid)
    rollouts = {
        "tokens": np.zeros((count, 4), np.int32),
        "latent_steps": np.zeros(count, np.int32),
    }
    monkeypatch.setattr(Evaluator, "run", lambda *_, **__: rollouts)
    for _ in range(2):
        train_stage.evaluate_reasoner(experiment, {})
    assert [line for line in warnings if "truncated" in line] == [
        "validation: 100% of the answers are truncated, and wrong whatever they say; raise config.max_answer_tokens"
    ]


def test_choices_are_made_on_no_more_problems_than_are_evaluated(finished, monkeypatch):
    """And the sweep tells of how many of the 12 of the validation split."""
    for limit in (5, 99):
        finished.limits.clear()
        finished.evaluate(monkeypatch, **{"evaluate.limit": limit})
        assert finished.limits == {(True, limit), (False, limit)}
        found = {
            finished.value(row)["sweep"]["problems"]
            for row in ("imitate_control", "cold_start", "slpo")
        }
        assert found == {min(limit, 12)}


def test_other_end_tokens_of_the_same_parameters_are_evaluated_anew(
    finished, monkeypatch
):
    """A changed `generation_config.json`: neither the parameters nor the prompts tell."""

    def ended(self):
        return dataclasses.replace(self.checkpoint.template, more_eos_ids=(5,))

    monkeypatch.setattr(Experiment, "template", property(ended))
    assert finished.evaluate(monkeypatch) == EVERYTHING | {"validation"}


def test_every_part_of_the_parameters_counts():
    tree = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((2, 3), jnp.bfloat16)}}
    others = [
        tree | {"a": jnp.arange(4.0).at[3].add(1e-6)},
        tree | {"a": jnp.arange(4)},
        tree | {"a": jnp.arange(4.0).reshape(2, 2)},
        tree | {"b": {"d": tree["b"]["c"]}},
    ]
    assert len({params_digest(one) for one in [tree, *others]}) == len(others) + 1
    assert params_digest(tree) == params_digest(
        {"b": {"c": tree["b"]["c"] * 1}, "a": np.arange(4, dtype=np.float32)}
    )


def test_parameters_are_read_again_where_their_files_are_others_of_the_same_size(run):
    experiment = run.experiment()
    for value in (4, 5):
        found = checkpoint_digest(
            experiment.stage("slpo"), lambda value=value: _params(value)
        )
        assert found == params_digest(_params(4))
    path = next(
        path
        for path in (run.work / "checkpoints/slpo/0/params").rglob("*")
        if path.is_file()
    )
    path.write_bytes(bytes(len(path.read_bytes())))
    assert checkpoint_digest(
        experiment.stage("slpo"), lambda: _params(5)
    ) == params_digest(_params(5))
    experiment.log.close()


def _other_problems(run, monkeypatch):
    """Whose references are the same: a row that the command had no part of kept its old questions."""
    run.edit("real.json", "has 1 ", "has 9 ", -1)
    shutil.move(run.work / "checkpoints" / "slpo", run.folder / "slpo")
    run.evaluate(monkeypatch)
    shutil.move(run.folder / "slpo", run.work / "checkpoints" / "slpo")


def _interrupted(run, monkeypatch):
    """What it leaves is not taken for the new checkpoint's."""
    run.train("slpo", 7)
    with pytest.raises(KeyboardInterrupt):
        run.evaluate(monkeypatch, interrupt="slpo on real")


LEFT_OUT = {
    "its records were changed": lambda run, _: run.edit(
        "work/eval/slpo/real.jsonl", *WRONG
    ),
    "its records were changed or are gone": lambda run, _: os.unlink(
        run.records("slpo")
    ),
    "its evaluation was not finished": lambda run, _: os.unlink(
        run.records("slpo").with_suffix(".manifest")
    ),
    "it is of other problems": _other_problems,
    "it is of another checkpoint or setting": _interrupted,
}


@pytest.mark.parametrize("why", LEFT_OUT)
def test_what_is_not_as_its_row_says_is_left_out_of_the_report(
    finished, monkeypatch, why
):
    """Also of a set that no command asks for any more."""
    LEFT_OUT[why](finished, monkeypatch)
    found = write_report(finished.work)
    assert (set(found["eval"]["imitate"]), set(found["eval"]["slpo"])) == (
        {"real", "made"},
        {"made"},
    )
    assert any(f"slpo on real: left out, {why}" in note for note in found["notes"])
    assert finished.evaluate(monkeypatch) == {"slpo on real"}


def test_rows_of_a_checkpoint_that_is_gone_are_left_out(finished, monkeypatch):
    finished.delete("slpo")
    assert finished.evaluate(monkeypatch, report=True) == set()
    found = json.loads((finished.work / "report.json").read_text())
    assert tuple(found["eval"]) == ROWS[:-1]
    assert any(
        note.startswith("slpo: left out, its checkpoint is gone")
        for note in found["notes"]
    )
    shutil.rmtree(
        finished.work / "checkpoints"
    )  # what was evaluated can still be looked at
    assert tuple(write_report(finished.work)["eval"]) == ROWS


def test_the_report_counts_problems_whose_answers_can_not_be_compared(
    finished, monkeypatch
):
    path = finished.folder / "math.jsonl"
    problems = json.loads((finished.folder / "real.json").read_text())
    records = [
        {"problem": each["question"], "solution": "So.", "answer": str(each["answer"])}
        for each in problems
    ]
    records.insert(2, records[0] | {"answer": "x^2"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    finished.evaluate(monkeypatch, **{"data.eval.real": str(path)})
    found = write_report(finished.work)
    assert (
        "real: 1 problem(s) of its source are left out, as their answers can't be compared."
        in found["notes"]
    )


def test_one_rule_takes_the_place_of_a_choice(finished, monkeypatch):
    """In the row and in the report, but not for whoever asks the checkpoint."""
    stopping = finished.stopping
    finished.evaluate(
        monkeypatch, **{"evaluate.thresholds": (0.7, 0.6)}
    )  # as good as each other
    assert finished.value("slpo")["sweep"]["chosen"] == 0.6
    assert stopping("slpo") == ("threshold", 0.6)
    finished.evaluate(monkeypatch, report=True, **{"evaluate.thresholds": (0.2,)})
    assert set(
        json.loads((finished.work / "report.json").read_text())["thresholds"]
    ) == {"imitate_control"}
    assert stopping("slpo") == ("threshold", 0.6)
    assert finished.value("slpo")["rule"] == 0.2
    finished.evaluate(monkeypatch, **{"gate.enabled": False})
    assert stopping("slpo") == ("threshold", 0.6)
    finished.train("slpo", 7, **{"rl.optimizer.learning_rate": 0.5})
    assert stopping("slpo") == ("threshold", None)  # this one was not evaluated yet


@pytest.mark.parametrize(
    ("key", "value"), [("model.n_head", 1), ("reasoner", "codi_gpt2")]
)
def test_a_checkpoint_is_evaluated_as_the_model_that_it_is(evaluated, key, value):
    """Heads can't be told by any array's shape."""
    before = evaluated.files()
    experiment = evaluated.experiment(**{key: value, "stages": ("evaluate",)})
    with pytest.raises(UserError, match=rf"config\.{re.escape(key)}: .*{value}"):
        evaluate.prepare(experiment)
    experiment.log.close()
    assert evaluated.files() == before


def test_lost_latents_are_made_again(finished, monkeypatch):
    kept = {"evaluate.save_latents": True}
    assert finished.evaluate(monkeypatch, **kept) == EVERYTHING
    (finished.work / "eval" / "slpo" / "real.latents.npz").unlink()
    assert finished.evaluate(monkeypatch, **kept) == {"slpo on real"}
    assert finished.evaluate(monkeypatch) == set()
    finished.train("slpo", 7)
    assert finished.evaluate(monkeypatch) == {"validation"} | SLPO
    left = [
        path.parent.name for path in (finished.work / "eval").rglob("*.latents.npz")
    ]
    assert sorted(left) == sorted(ROWS[:-1] * 2)  # the old checkpoint's are gone


# Stages: what is refused before the first, and what may change.

EVALUATED = {"stages": ("evaluate",)}


def test_what_changes_no_number_may_change(trained):
    """As docs/configuration.md lists it."""
    micro = {"imitate.micro_batches": 2, "imitate.icot.tokens_per_epoch": 3}
    capacities = {"rl.capacities": ((0.5, 0.5), (1.0, 1.0))}
    for changes in (
        {},
        EVALUATED,
        micro,
        {"imitate.control": False},
        capacities,
        {"model.scan_layers": True},
    ):
        trained.fine(**changes)


@pytest.mark.parametrize(
    ("key", "file"), [("train", "train.jsonl"), ("valid", "valid.txt")]
)
def test_a_data_file_that_changed_under_its_name(run, key, file):
    path = run.folder / file
    before = path.read_bytes()
    path.write_bytes(before + before.splitlines(keepends=True)[0])
    run.error(
        f"data.{key}", f"{path} has changed since", max_answer_tokens=9
    )  # chosen from it, say
    run.fine(**EVALUATED)  # which trains nothing
    path.write_bytes(before)
    run.fine()


def _directory(folder):
    """Two configs, one of two files."""
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    made = folder / "set"
    for config, some in (("main", lines[:40]), ("main", lines[40:]), ("other", lines)):
        (made / config).mkdir(parents=True, exist_ok=True)
        (made / config / f"train-{len(some)}.jsonl").write_text("".join(some))
    named = "".join(
        f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("main", "other")
    )
    (made / "README.md").write_text(f"---\nconfigs:\n{named}---\n")


# A source in a folder, the file of it that is edited, and one that takes something else of the same bytes.
FORMS = {
    "a part": ("train.jsonl[train]", "train.jsonl", "train.jsonl"),
    "a config of a directory of several files": (
        "set:main",
        "set/main/train-40.jsonl",
        "set:other",
    ),
    "a split": ("set:main@train", "set/main/train-40.jsonl", "set:main@train+train"),
    "a part of a directory": (
        "set:main[train]",
        "set/main/train-40.jsonl",
        "set:main[valid]",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["train", "valid"])
def test_a_source_of_any_form_is_held_to_its_bytes(run, form, key):
    source, file, other = (str(run.folder / name) for name in FORMS[form])
    _directory(run.folder)
    run.delete(*STAGES)
    start = {"stages": ("imitate",), "imitate.control": False}
    run.train("imitate", **start, **{f"data.{key}": source})
    ensure = run.experiment(**start, **{f"data.{key}": source})
    ensure_manifest(ensure.stage("imitate"), write=False)
    with pytest.raises(UserError, match=rf"^config\.data\.{key}: "):
        ensure_manifest(
            run.experiment(**start, **{f"data.{key}": other}).stage("imitate"),
            write=False,
        )
    path = run.folder / file
    path.write_text(path.read_text().replace("1", "2", 1))  # of the same size
    with pytest.raises(
        UserError, match=rf"^config\.data\.\w+: {re.escape(str(run.folder))}"
    ):
        ensure_manifest(ensure.stage("imitate"), write=False)


def test_a_changed_file_is_named_before_settings_that_were_chosen_from_it(run):
    run.edit("train.jsonl", "1", "2")
    run.error("data.train", "has changed since", max_latents=2)


def test_a_tokenizer_that_changed_under_its_name(run):
    save_tokenizer(load_tokenizer("synthetic:20"), run.folder / "texts")
    texts = {
        "tokenizer": str(run.folder / "texts"),
        "stages": ("imitate",),
        "imitate.control": False,
    }
    run.delete(*STAGES)
    run.train("imitate", **texts)
    run.fine(**texts)
    run.edit("texts/tokenizer.json", '"Tom"', '"Tim"', -1)
    run.error("tokenizer", "texts has changed since", **texts)


@pytest.mark.slow
def test_words_of_the_training_data_are_the_same_command_s_once_all_is_trained(
    run, monkeypatch
):
    """Whatever is still to be evaluated, and where the training data are gone."""
    words = {"tokenizer": "words", "model.n_positions": 100, "prompt_slots": (40,)}
    run.delete(*STAGES)
    for stage, value in STAGES.items():
        run.train(stage, value, **words)
    run.fine(**words)
    every = {"stages": Config().stages, **words}
    assert run.evaluate(monkeypatch, **every) == EVERYTHING | {"validation"}
    assert run.experiment(**words).config.tokenizer == "words"
    assert run.evaluate(monkeypatch, **every) == set()
    assert run.evaluate(monkeypatch, **every, **{"evaluate.limit": 7}) == EVERYTHING | {
        "validation"
    }
    (run.folder / "train.jsonl").unlink()
    assert (
        run.evaluate(monkeypatch, **EVALUATED, **words, **{"evaluate.limit": 7})
        == set()
    )


def test_a_stage_trained_again_with_other_settings_unbinds_what_was_made_of_it(run):
    again = {"imitate.final_steps": 7, "imitate.control": False}
    run.delete("imitate_control")
    run.train("imitate", **again)
    for stages in (
        ("cold_start",),
        ("evaluate",),
        ("imitate", "cold_start", "rl", "evaluate"),
    ):
        run.error(
            "cold_start",
            "began from another imitate than is there now",
            stages=stages,
            **again,
        )
    run.train("cold_start", **again)
    # The objective's start is bound to its own start in turn.
    run.error("slpo", "began from another cold_start", **again)
    run.train("slpo", **again)
    run.fine(**again)


def test_a_stage_that_is_gone_counts_as_what_it_will_be_and_binds_nobody(tmp_path):
    """What was made of it is there."""
    run = Run(tmp_path / "new")  # with its data where it was
    run.delete("imitate")
    run.fine()
    run.fine(stages=("rl", "evaluate"))
    run.delete("imitate_control")
    changes = {"imitate.final_steps": 7, "imitate.control": False}
    run.error("cold_start", "began from another imitate", **changes)


def test_a_start_that_was_not_there_when_the_stage_began(run):
    run.delete("cold_start")
    run.train("slpo", stages=("rl",))
    inputs = json.loads((run.work / "checkpoints/slpo/inputs.json").read_text())
    assert inputs["start"]["stage"] == "imitate"
    run.train("cold_start")
    run.error("slpo", "began from imitate, and would now from cold_start")


def test_files_of_the_first_start_that_changed(run, tmp_path):
    init = tmp_path / "other" / "checkpoints" / "imitate"
    shutil.copytree(run.work / "checkpoints", init.parent)
    run.delete(*STAGES)
    changes = {"init": str(init), "stages": ("cold_start",)}
    assert run.experiment(**changes).stage("cold_start").start.name == ""
    run.train("cold_start", **changes)
    run.fine(**changes)
    shutil.rmtree(init / "0")
    save_params(init, _params(0))
    run.error("cold_start", "began from another config.init", **changes)
    with pytest.raises(UserError, match=r"config\.init"):
        check_start(run.experiment(**changes).stage("cold_start"))


@pytest.mark.parametrize("file", ["config.json", "inputs.json"])
@pytest.mark.parametrize(
    ("text", "said"), [(None, "no such file"), ('{"seed": ', "is no JSON .*")]
)
def test_facts_that_are_lost_or_damaged_name_the_folder_to_delete(
    run, file, text, said
):
    """Nothing else says what the checkpoint was trained with, and the next run would write down its own."""
    path = run.work / "checkpoints" / "cold_start" / file
    path.unlink() if text is None else path.write_text(text)
    for changes in ({}, EVALUATED):
        with pytest.raises(UserError, match=f"{file}: {said}.*; delete {path.parent}"):
            run.fine(**changes)


def _text(name="gumbel", **settings):
    changes = {
        "reasoner": "text_gpt2",
        "gate.enabled": False,
        "imitate.c_thought": 0,
        "dropout.rate": 0.0,
    }
    settings = {f"latent_policy.{name}.{key}": value for key, value in settings.items()}
    return (
        changes
        | {
            "imitate.control": False,
            "rl.objectives": ("exact",),
            "latent_policy.name": name,
        }
        | settings
    )


def test_imitation_is_bound_to_no_latent_policy_that_it_doesn_t_use(run):
    """A text's has no latents, so any latent policy may follow, but for one whose parameters are saved beside."""
    run.delete(*STAGES)
    imitation = {"stages": ("imitate",)}
    both = {"stages": ("imitate", "rl")}
    run.train("imitate", **_text(tau=0.5), **imitation)
    run.train("exact", **_text(tau=0.5), **both)
    run.fine(**_text(tau=0.5), **both)
    run.fine(**_text(tau=0.7), **imitation)
    run.fine(**_text("noisy_soft"), **imitation)
    run.error(
        "latent_policy.gumbel.tau", "stage exact was run with", **_text(tau=0.7), **both
    )
    run.error("latent_policy.name", **_text("hybrid"), **imitation)
    run.train("imitate", **_text("hybrid"), **imitation)
    run.error("latent_policy.hybrid.r_min", **_text("hybrid", r_min=0.9), **imitation)
    run.error("latent_policy.name", **_text(), **imitation)


def test_several_rewards_in_place_of_one_are_named(run):
    rewards = {"rewards": (("correct", 1.0), ("countdown", 0.5))}
    run.error(
        "rewards",
        '[["correct", 1.0], ["countdown", 0.5]], and config.reward="correct" is what',
        **rewards,
    )
    run.train("slpo", **rewards)
    run.error(
        "reward",
        'is "correct", and config.rewards=[["correct", 1.0], ["countdown", 0.5]] is what',
    )


def test_data_may_lie_elsewhere(run, tmp_path):
    """Files of the same bytes are the same data, wherever they are; a name of no file is what it says."""
    run.delete(*STAGES)
    start = {"stages": ("imitate",)}
    run.train("imitate", **start)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(run.folder / "train.jsonl", moved)
    run.fine(**start, **{"data.train": str(moved)})
    run.error("data.train", **start, **{"data.train": "synthetic:train"})


@pytest.mark.parametrize(
    ("name", "own", "key", "shared"),
    [
        ("learning_rate", 0.25, "rl.optimizer.learning_rate", 0.5),
        ("schedule", "cosine", "rl.optimizer.schedule", "linear"),
        ("steps", 3, "rl.steps", 2),  # more would go on
        ("temperature", 0.5, "rl.temperature", 0.75),
    ],
)
def test_an_objective_does_not_care_for_what_it_has_of_its_own(
    run, name, own, key, shared
):
    run.delete(*STAGES)
    text = _text() | {"stages": ("rl",)}
    mine = {f"objective.exact.{name}": own}
    changes = {key: shared}
    run.train("exact", **text)
    run.error(key, **text, **changes)
    run.train("exact", **text, **mine)
    run.fine(**text, **mine, **changes)
    run.error(f"objective.exact.{name}", **text, **changes)


def test_an_objective_after_another_depends_on_it(tmp_path):
    """On what it was trained with, whether it is there, unfinished, or to be trained again."""
    run = Run(tmp_path / "new", {"imitate": 1, "cold_start": 3, "slpo": 4})
    two = {
        "rl.objectives": ("slpo", "answer_only"),
        "objective.answer_only.after": "slpo",
        "stages": ("rl",),
    }
    experiment = run.experiment(**two)
    assert tuple(
        experiment.stage(name).start.name for name in two["rl.objectives"]
    ) == ("cold_start", "slpo")
    run.train("answer_only", **two)
    run.fine(**two)
    run.fine(**two | {"rl.objectives": ("answer_only",)})
    run.error(
        "objective.answer_only.after", **two | {"objective.answer_only.after": ""}
    )
    run.delete("slpo")
    run.fine(**two)
    run.fine(**EVALUATED)
    other = two | {"objective.slpo.learning_rate": 0.25}
    where = (
        rf"^{re.escape(str(run.work))}/checkpoints/answer_only: began from another slpo"
    )
    with pytest.raises(UserError, match=where):
        run.fine(**other)
    run.train("slpo", **other | {"rl.objectives": ("slpo",)})
    for changes in (other, EVALUATED):
        with pytest.raises(UserError, match=where):
            run.fine(**changes)


def test_a_refused_command_leaves_the_config_of_the_one_before(run):
    """Also where a stage's parameters or its longest problem decide."""
    run.delete(*STAGES)
    workdir = run.experiment().workdir
    workdir.config.write_text("before")
    wordy = {
        "question": "Tom has 1 pens . How many now ?",
        "steps": ["1 + 2 = 3"] * 7,
        "answer": "3",
    }
    (run.folder / "wordy.jsonl").write_text(json.dumps(wordy))

    def refused(key, **changes):
        with pytest.raises(UserError, match=f"^config.{key}: "):
            run_stages(read_config(run.config(**changes)), run.work)
        assert workdir.config.read_text() == "before"

    refused("model.n_positions", **{"data.train": str(run.folder / "wordy.jsonl")})
    run.train("imitate", **_text(), stages=("imitate",))
    for stages in (("rl",), ("evaluate",)):
        refused("latent_policy.name", **_text("hybrid"), stages=stages)
    refused("model.n_layer", **_text(), **{"model.n_layer": 2}, stages=("rl",))


# Of results: speed, memory and places alone; or what of it there is, told by what was done.
FREE = {
    "stages", "log_every", "checkpoint_every", "max_skipped_steps", "stuck_after", "cpu_devices", "sharding.fsdp",
    "model.remat", "model.scan_layers", "imitate.control", "imitate.no_thought", "rl.capacities", "rl.objectives",
    "evaluate.batch_size", "evaluate.prompt_multiple", "evaluate.datasets", "evaluate.limit", "evaluate.samples",
    "evaluate.seeds", "evaluate.thresholds", "evaluate.save_latents", "evaluate.probed", "evaluate.scorers",
    "evaluate.reward_model", "evaluate.beams", "evaluate.candidates", "trackers", "reward_processes", "reward_seconds",
    "rewards",  # which is bound as "reward", where it is one
}  # fmt: skip


def test_every_other_key_is_bound_to_a_stage_or_an_evaluation():
    config = Config()
    found = set(evaluated_settings(config))
    stages = [section for section in SECTIONS if section not in (RL, EVALUATE)]
    for stage in (*stages, CONTROL, *config.objective):
        found |= settings_of(config, stage).keys()
    others = [
        f"latent_policy.{name}"
        for name in LATENT_POLICIES
        if name != config.latent_policy.name
    ]
    others += [f"imitate.{name}" for name in RECIPES if name != "curriculum"]
    every = {
        key for key in flatten(values(config)) if not key.startswith(tuple(others))
    }
    splits = {key for key in every if key.endswith(".micro_batches")}
    assert every - found == FREE | splits
    icot = settings_of(merge_settings(config, {"imitate.recipe": "icot"}), "imitate")
    assert {
        key.split(".")[1] for key in icot if key.startswith("imitate.")
    } & RECIPES.keys() == {"icot"}
