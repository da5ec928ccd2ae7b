"""What is evaluated again and what is kept, by stages whose models answer at once; and rows of another run."""

import dataclasses
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from small_run import load_config, write_problems

from slpo_jax.checkpoints.decode_settings import config_of, stopping_of
from slpo_jax.checkpoints.detect import identify
from slpo_jax.config import read_config
from slpo_jax.config.sections import changed
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluate import Completions, Evaluator
from slpo_jax.evaluation.report import write_report
from slpo_jax.io.mesh import replicate
from slpo_jax.io.orbax import save_params
from slpo_jax.run import evaluate
from slpo_jax.run.experiment import Experiment, build
from slpo_jax.run.provenance import ensure_manifest, params_digest

pytestmark = pytest.mark.usefixtures("cpu_devices")
STAGES = {"imitate": 1, "imitate_control": 2, "cold_start": 3, "slpo": 4}
ROWS = ("imitate", "imitate_fixed_tmax", "imitate_control", "cold_start", "slpo")
SETS = ("real", "made")
EVERYTHING = {f"{row} on {name}" for row in ROWS for name in SETS}


def _params(value):
    return {"reasoner": {"w": jnp.full(3, float(value))}, "gate": {"w": jnp.ones(2)}}


class Run:
    """A workdir whose checkpoints are one number each, which is how many latents they take."""

    def __init__(self, folder, stages=STAGES, like=None):
        """A new one with these stages, or a copy of another."""
        self.folder, self.work, self.limits = folder, folder / "work", set()
        if like is not None:
            shutil.copytree(like.folder, folder)
            return
        folder.mkdir()
        write_problems(folder)
        for stage, value in stages.items():
            self.train(stage, value)

    def config(self, **changes):
        config = load_config()
        config.data.update(train=str(self.folder / "train.jsonl"), valid=str(self.folder / "valid.txt"))
        config.data.eval.real = str(self.folder / "real.json")
        config.stages = ("evaluate",)
        config.update_from_flattened_dict(changes)
        return config

    def train(self, stage, value, **changes):
        experiment = build(read_config(self.config(**changes)), self.work)
        folder = experiment.workdir.stage(stage)
        shutil.rmtree(folder.path, ignore_errors=True)
        ensure_manifest(experiment, stage)
        save_params(folder.path, _params(value))
        folder.finished.write_text("0\n")
        experiment.log.close()

    def evaluate(self, monkeypatch, report=False, interrupt="", **changes):
        """The labels of what was rolled out.

        Args:
            interrupt: a label; Ctrl-C when it begins.
        """
        seen = []

        def roll_out(
            _, params, problems, stopping, rule, seed=None, samples=1, limit=0, keep_latents=False, probed=False,
            label="", cache=None, name="",
        ):  # fmt: skip
            seen.append(label.partition(",")[0])
            assert name == seen[-1].partition(" on ")[2], "each set has noise of its own"
            if not probed:
                self.limits.add((seen[-1] == "validation", limit))
            if seen[-1] == interrupt:
                raise KeyboardInterrupt
            n, value = min(limit or len(problems), len(problems)) * samples, int(params["reasoner"]["w"][0])
            values = {"tokens": np.zeros((n, 4), np.int32), "latent_steps": np.full(n, value, np.int32)}
            if probed:
                values |= {"stop": np.full((n, 9), 0.25), "nearest_probability": np.ones((n, 9, 1))}
                values["nearest_token"] = np.full((n, 9, 1), 3)
            return Completions(values | ({"latents": np.ones((n, 3, 1), np.float32)} if keep_latents else {}))

        experiment = build(read_config(self.config(**changes)), self.work)
        with monkeypatch.context() as patch:
            patch.setattr(Evaluator, "run", roll_out)
            if not report:
                patch.setattr(evaluate, "write_report", lambda _: None)
            try:
                evaluate.run_evaluate(experiment)
            finally:
                experiment.log.close()
        return set(seen)

    def records(self, row, name="real"):
        return self.work / "eval" / row / f"{name}.jsonl"

    def latents_of(self, row, name="real"):
        return {json.loads(line)["latent_steps"] for line in self.records(row, name).read_text().splitlines()}


@pytest.fixture(autouse=True, scope="module")
def _models():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "abstract_params", lambda self, stored: replicate(_params(0), self.mesh))
        yield patch


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, _models):
    run = Run(tmp_path_factory.mktemp("evaluated") / "run")
    assert run.evaluate(_models) == EVERYTHING | {"validation"}
    return run


@pytest.fixture
def finished(tmp_path, evaluated):
    return Run(tmp_path / "run", like=evaluated)


def test_what_is_current_is_neither_evaluated_nor_read(finished, monkeypatch):
    def read(*_):
        raise AssertionError("a checkpoint was read")

    before = {path: path.read_bytes() for path in finished.work.rglob("*") if path.is_file()}
    monkeypatch.setattr(evaluate, "stage_params", read)
    assert finished.evaluate(monkeypatch) == set()
    after = {path: path.read_bytes() for path in finished.work.rglob("*") if path.is_file()}
    assert {path for path in after if after[path] != before.get(path) and "tensorboard" not in path.parts} == set()


def test_thoughts_are_watched_where_they_are_not_known(finished, monkeypatch):
    """Of as many problems as are asked for, and without evaluating anything else."""

    def thoughts(row, name="real"):
        return json.loads((finished.work / "eval" / row / f"{name}.thoughts.json").read_text())["problems"]

    assert [len(problem["latents"]) for problem in thoughts("slpo")] == [4] * 6
    stops = [{latent["stop"] for problem in thoughts(row) for latent in problem["latents"]} for row in ROWS]
    assert stops == [{None}, {None}, {None}, {0.25}, {0.25}]  # without a gate nothing stops
    (finished.work / "eval" / "slpo" / "made.thoughts.json").unlink()
    before = finished.records("slpo", "made").stat().st_mtime_ns
    assert finished.evaluate(monkeypatch) == {"slpo on made"}
    assert finished.records("slpo", "made").stat().st_mtime_ns == before
    assert finished.evaluate(monkeypatch, **{"evaluate.probed": 2}) == EVERYTHING
    assert len(thoughts("slpo", "made")) == 2
    assert finished.evaluate(monkeypatch, **{"evaluate.probed": 0}) == set()
    finished.train("slpo", 5)
    finished.evaluate(monkeypatch, **{"evaluate.probed": 2})
    assert [len(problem["latents"]) for problem in thoughts("slpo")] == [5] * 2


def test_most_answers_cut_at_the_limit_is_said(finished, monkeypatch, warnings):
    """Four tokens of which none is an end; validation and every set say so, and name the budget that is theirs."""
    finished.train("slpo", 7)
    done = finished.evaluate(monkeypatch)
    says = "100% of the answers are cut at the limit, and wrong whatever they say; raise config."
    assert {line for line in warnings if "cut" in line} == {f"{label}: {says}max_answer_tokens" for label in done}
    assert all(json.loads(line)["cut"] is True for line in finished.records("slpo").read_text().splitlines())
    warnings.clear()
    done = finished.evaluate(monkeypatch, **{"evaluate.max_answer_tokens": 4, "evaluate.seeds": 1})
    assert {line for line in warnings if "cut" in line} >= {
        f"{label}: {says}evaluate.max_answer_tokens" for label in done
    }


@pytest.mark.parametrize(("limit", "problems"), [(5, 5), (0, 12), (99, 12)])
def test_choices_are_made_on_no_more_problems_than_are_evaluated(finished, monkeypatch, limit, problems):
    """And the sweep tells of how many of the 12 of the validation split."""
    finished.evaluate(monkeypatch, **{"evaluate.limit": limit})
    assert finished.limits == {(True, limit), (False, limit)}
    found = json.loads((finished.work / "thresholds.json").read_text())
    assert {sweep["problems"] for sweep in found.values()} == {problems}


def test_other_end_tokens_of_the_same_parameters_are_evaluated_anew(finished, monkeypatch):
    """A changed `generation_config.json`: neither the parameters nor the prompts tell."""

    def ended(self):
        return dataclasses.replace(self.checkpoint.template, more_eos_ids=(5,))

    monkeypatch.setattr(Experiment, "template", property(ended))
    assert finished.evaluate(monkeypatch) == EVERYTHING | {"validation"}
    assert finished.evaluate(monkeypatch) == set()


def test_results_whose_noise_was_the_same_on_every_set_are_made_again(finished, monkeypatch):
    for name in SETS:
        path = finished.records("slpo", name).with_suffix(".manifest")
        manifest = json.loads(path.read_text())
        assert manifest.pop("name") == name
        path.write_text(json.dumps(manifest))
    assert finished.evaluate(monkeypatch) == {"slpo on real", "slpo on made"}


def test_two_names_of_one_set_are_two_evaluations(finished, monkeypatch):
    """Their noise differs, so neither is taken for the other."""
    twin = {"data.eval.made": str(finished.folder / "real.json")}
    assert finished.evaluate(monkeypatch, **twin) == {f"{row} on made" for row in ROWS}


def test_a_stage_that_was_trained_again_is_evaluated_anew(finished, monkeypatch):
    """With the same number of steps: nothing but the parameters tells."""
    finished.train("slpo", 7, **{"rl.optimizer.learning_rate": 0.5})
    assert finished.evaluate(monkeypatch) == {"validation", "slpo on real", "slpo on made"}
    assert finished.latents_of("slpo") == finished.latents_of("slpo", "made") == {7}
    assert {json.loads(line)["latent_steps"] for line in finished.records("").read_text().splitlines()} == {7}
    assert finished.latents_of("imitate") == {1}


def test_the_same_parameters_saved_again_are_the_same_checkpoint(finished, monkeypatch):
    finished.train("slpo", 4)
    assert finished.evaluate(monkeypatch) == set()


@pytest.mark.parametrize("damage", [None, "", '{"digest": "x"}', "[]"])
def test_a_digest_that_is_lost_or_damaged_is_made_again(finished, monkeypatch, damage):
    for path in (finished.work / "checkpoints").glob("*.digest.json"):
        path.unlink()
        if damage is not None:
            path.write_text(damage)
    assert finished.evaluate(monkeypatch) == set()
    kept = json.loads((finished.work / "checkpoints" / "slpo.digest.json").read_text())
    assert kept["digest"] == params_digest(_params(4))


def test_every_part_of_the_parameters_counts():
    tree = {"a": jnp.arange(4.0), "b": {"c": jnp.ones((2, 3), jnp.bfloat16)}}
    others = [
        tree | {"a": jnp.arange(4.0).at[3].add(1e-6)},
        tree | {"a": jnp.arange(4)},
        tree | {"a": jnp.arange(4.0).reshape(2, 2)},
        tree | {"b": {"d": tree["b"]["c"]}},
        tree | {"b": {"c": tree["b"]["c"].at[0, 0].set(2)}},
    ]
    assert len({params_digest(one) for one in [tree, *others]}) == len(others) + 1
    assert params_digest(tree) == params_digest({"b": {"c": tree["b"]["c"] * 1}, "a": np.arange(4, dtype=np.float32)})


def test_a_test_file_that_changed_is_evaluated_anew(finished, monkeypatch):
    path = finished.folder / "real.json"
    problems = json.loads(path.read_text())
    os.utime(path, (1, 1))
    assert finished.evaluate(monkeypatch) == set()
    problems[2]["answer"] = "17"
    path.write_text(json.dumps(problems))
    assert finished.evaluate(monkeypatch) == {f"{row} on real" for row in ROWS}
    assert json.loads(finished.records("slpo").read_text().splitlines()[2])["reference"] == "17"
    problems[7]["answer"] = "18"  # beyond config.evaluate.limit
    path.write_text(json.dumps(problems))
    assert finished.evaluate(monkeypatch) == set()


def test_a_validation_file_that_changed_is_chosen_on_anew(finished, monkeypatch):
    path = finished.folder / "valid.txt"
    path.write_text(path.read_text().replace("2", "1", 1))
    assert finished.evaluate(monkeypatch) == {"validation"}
    assert finished.evaluate(monkeypatch) == set()
    (finished.work / "thresholds.json").unlink()
    assert finished.evaluate(monkeypatch) == {"validation"}
    assert {"imitate_control", "cold_start", "slpo"} == json.loads(
        (finished.work / "thresholds.json").read_text()
    ).keys()


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


def _edit(path):
    path.write_text(path.read_text().replace('"correct": false', '"correct": true', 1))


@pytest.mark.parametrize("damage", [os.unlink, _truncate, _edit])
@pytest.mark.parametrize("ending", ["jsonl", "manifest"])
def test_damaged_results_are_made_again(finished, monkeypatch, damage, ending):
    whole = finished.records("cold_start").read_bytes()
    damage(finished.work / "eval" / "cold_start" / f"real.{ending}")
    done = finished.evaluate(monkeypatch)
    if (damage, ending) != (_edit, "manifest"):  # which has no such text
        assert done == {"cold_start on real"}
    assert finished.records("cold_start").read_bytes() == whole
    assert finished.evaluate(monkeypatch) == set()


def test_what_an_interrupted_evaluation_leaves_is_not_taken_for_the_new_checkpoint_s(finished, monkeypatch):
    finished.train("slpo", 7)
    with pytest.raises(KeyboardInterrupt):
        finished.evaluate(monkeypatch, interrupt="slpo on real")
    for _ in range(2):  # nor is what lost its manifest in another way
        found = write_report(finished.work)
        assert set(found["eval"]["slpo"]) == {"made"}
        assert found["eval"]["slpo"]["made"]["latent_steps"] == 7
        shutil.copy(finished.records("imitate", "real"), finished.records("slpo", "real"))
    assert any("slpo on real: left out, it is of another checkpoint or setting" in note for note in found["notes"])
    assert finished.evaluate(monkeypatch) == {"slpo on real"}


def test_records_that_were_changed_are_left_out(finished):
    """Also those of a set that no command asks for any more."""
    _edit(finished.records("slpo", "made"))
    found = write_report(finished.work)
    assert set(found["eval"]["slpo"]) == {"real"}
    assert any("slpo on made: left out, its records were changed" in note for note in found["notes"])


def test_rows_of_a_checkpoint_that_is_gone_are_left_out(finished, monkeypatch):
    shutil.rmtree(finished.work / "checkpoints" / "slpo")
    assert finished.evaluate(monkeypatch, report=True) == set()
    found = json.loads((finished.work / "report.json").read_text())
    assert tuple(found["eval"]) == ROWS[:-1]
    assert any(note.startswith("slpo: left out, its checkpoint is gone") for note in found["notes"])
    shutil.rmtree(finished.work / "checkpoints")  # what was evaluated can still be looked at
    assert tuple(write_report(finished.work)["eval"]) == ROWS


def test_the_report_counts_problems_whose_answers_can_not_be_compared(finished, monkeypatch):
    path = finished.folder / "math.jsonl"
    problems = json.loads((finished.folder / "real.json").read_text())
    records = [{"problem": each["question"], "solution": "So.", "answer": str(each["answer"])} for each in problems]
    records.insert(2, records[0] | {"answer": "x^2"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    finished.evaluate(monkeypatch, **{"data.eval.real": str(path)})
    found = write_report(finished.work)
    assert "real: 1 problem(s) of its source are left out, as their answers can't be compared." in found["notes"]


def test_rows_on_other_problems_are_left_out(finished, monkeypatch):
    """Whose references are the same: a row that the command had no part of kept its old questions."""
    path = finished.folder / "real.json"
    path.write_text(path.read_text().replace("has 1 ", "has 9 "))
    shutil.move(finished.work / "checkpoints" / "slpo", finished.folder / "slpo")
    finished.evaluate(monkeypatch)
    shutil.move(finished.folder / "slpo", finished.work / "checkpoints" / "slpo")
    found = write_report(finished.work)
    assert (set(found["eval"]["imitate"]), set(found["eval"]["slpo"])) == ({"real", "made"}, {"made"})
    assert any("slpo on real: left out, it is of other problems" in note for note in found["notes"])


def test_one_rule_takes_the_place_of_a_choice(finished, monkeypatch, caplog):
    """In thresholds.json and in the report, but not for whoever asks the checkpoint."""

    def stopping(stage):
        identity = identify(str(finished.work / "checkpoints" / stage))
        # These checkpoints of three numbers don't say that they have a gate.
        return stopping_of(changed(config_of(identity), {"gate.enabled": True}), identity)

    finished.evaluate(monkeypatch, **{"evaluate.thresholds": (0.6, 0.7)})  # as good as each other
    assert json.loads((finished.work / "thresholds.json").read_text())["slpo"]["chosen"] == 0.6
    assert stopping("slpo") == ("threshold", 0.6)
    assert "not used as it was made" not in caplog.text
    finished.evaluate(monkeypatch, report=True, **{"evaluate.thresholds": (0.2,)})
    assert set(json.loads((finished.work / "thresholds.json").read_text())) == {"imitate_control"}
    assert set(json.loads((finished.work / "report.json").read_text())["thresholds"]) == {"imitate_control"}
    assert stopping("slpo") == ("threshold", 0.6)
    (line,) = [line for line in caplog.messages if "not used as it was made" in line]
    assert line.startswith(f"{finished.work}: ")
    assert "config.evaluate.thresholds=(0.2,) and not (0.6,) of slpo" in line
    assert json.loads((finished.work / "eval" / "slpo" / "row.json").read_text())["rule"] == 0.2
    finished.evaluate(monkeypatch, **{"gate.enabled": False})
    assert stopping("slpo") == ("threshold", 0.6)
    finished.train("slpo", 7, **{"rl.optimizer.learning_rate": 0.5})
    assert stopping("slpo") == ("threshold", 0.5)  # this one was not evaluated yet
    finished.evaluate(monkeypatch, **{"evaluate.thresholds": (0.2,)})
    assert stopping("slpo") == ("threshold", 0.2)


@pytest.mark.parametrize(
    ("key", "value"), [("model.n_head", 1), ("gate.hidden", 7), ("reasoner", "codi_gpt2"), ("model.n_layer", 2)]
)
def test_a_checkpoint_is_evaluated_as_the_model_that_it_is(finished, key, value):
    """Heads can't be told by any array's shape."""
    before = {path: path.read_bytes() for path in finished.work.rglob("*") if path.is_file()}
    experiment = build(read_config(finished.config(**{key: value})), finished.work)
    with pytest.raises(UserError, match=rf"config\.{key.replace('.', '[.]')}: is {value}, but the checkpoint of .*has"):
        evaluate.check_evaluation(experiment)
    experiment.log.close()
    after = {path: path.read_bytes() for path in finished.work.rglob("*") if path.is_file()}
    assert {p for p in after if "tensorboard" not in p.parts and after[p] != before.get(p)} == set()


@pytest.mark.parametrize("text", ['{"slpo": 3}', '{"slpo": []}', '{"slpo": {"chosen": "x"}}', '{"slpo": {"0.5": 1}}'])
def test_a_damaged_choice_is_one_line(finished, monkeypatch, text):
    path = finished.work / "thresholds.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"thresholds\.json: 'slpo' holds no choice; delete the file"):
        finished.evaluate(monkeypatch)


def test_lost_latents_are_made_again(finished, monkeypatch):
    kept = {"evaluate.save_latents": True}
    assert finished.evaluate(monkeypatch, **kept) == EVERYTHING
    (finished.work / "eval" / "slpo" / "real.latents.npz").unlink()
    assert finished.evaluate(monkeypatch, **kept) == {"slpo on real"}
    assert finished.evaluate(monkeypatch) == set()
    finished.train("slpo", 7)
    assert finished.evaluate(monkeypatch) == {"validation", "slpo on real", "slpo on made"}
    left = [path.parent.name for path in (finished.work / "eval").rglob("*.latents.npz")]
    assert sorted(left) == sorted(ROWS[:-1] * 2)  # the old checkpoint's are gone


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1}, {"dropout.rate": 0.2}, {"max_latents": 2}, {"evaluate.samples": 3}, {"evaluate.samples": 0},
        {"evaluate.seeds": 1}, {"evaluate.limit": 5}, {"evaluate.max_answer_tokens": 3}, {"model.dtype": "bfloat16"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_settings_that_matter(finished, monkeypatch, change):
    assert finished.evaluate(monkeypatch, **change) >= EVERYTHING
    assert finished.evaluate(monkeypatch, **change) == set()


def test_settings_that_change_speed_alone(finished, monkeypatch):
    change = {
        "evaluate.batch_size": 8, "evaluate.prompt_multiple": 10, "prompt_slots": (20, 25), "model.remat": True,
        "evaluate.datasets": ("made", "real"), "rl.steps": 77777, "rl.group": 2, "log_every": 3,
    }  # fmt: skip
    assert finished.evaluate(monkeypatch, **change) == set()


def test_another_choice_of_thresholds(finished, monkeypatch):
    gated = {f"{row} on {name}" for row in ("cold_start", "slpo") for name in SETS}
    done = finished.evaluate(monkeypatch, **{"evaluate.thresholds": (0.7, 0.8)})
    assert done == gated | {"validation"}
    assert finished.evaluate(monkeypatch, **{"evaluate.thresholds": (0.7, 0.9)}) == {"validation"}  # 0.7 again


def test_the_report_says_what_was_trained(finished, monkeypatch):
    """Whatever the last command was given, and not what is not of this checkpoint any more."""
    finished.train("slpo", 7, **{"rl.optimizer.learning_rate": 0.25})
    finished.evaluate(monkeypatch, report=True, **{"rl.steps": 77777, "evaluate.datasets": ("real",)})
    report = json.loads((finished.work / "report.json").read_text())
    assert report["settings"]["slpo"]["rl.steps"] == 6
    assert report["settings"]["slpo"]["rl.optimizer.learning_rate"] == 0.25
    assert "77777" not in (finished.work / "report.json").read_text()
    assert "slpo on made: left out, it is of another checkpoint" in (finished.work / "report.md").read_text()
    assert list(report["eval"]["slpo"]) == ["real"]
    assert set(report["eval"]["cold_start"]) == {"real", "made"}


def test_objectives_are_found_by_what_they_say(finished, monkeypatch):
    finished.train("pathwise", 6)
    assert finished.evaluate(monkeypatch) == {"validation", "pathwise on real", "pathwise on made"}
    row = json.loads((finished.work / "eval" / "pathwise" / "row.json").read_text())
    assert row["baselines"] == ["slpo", "cold_start", "imitate_control", "best_fixed"]
    assert (row["gated"], row["stage"], row["label"]) == (True, "pathwise", "pathwise")
    assert (finished.work / "eval" / "real.jsonl").read_bytes() == finished.records("pathwise").read_bytes()


@pytest.fixture
def ablation(tmp_path):
    return Run(tmp_path / "ablation", {"slpo": 8})


def test_rows_of_another_run(finished, ablation, monkeypatch):
    """All but those that the run has itself; as they are, and gone again where they are no longer asked for."""
    shared = {"evaluate.rows_from": str(finished.work)}
    shutil.copy(finished.folder / "real.json", ablation.folder)
    assert ablation.evaluate(monkeypatch, report=True, **shared) == {"validation", "slpo on real", "slpo on made"}
    report = json.loads((ablation.work / "report.json").read_text())
    assert tuple(report["eval"]) == ROWS
    assert {name: row["source"] for name, row in report["rows"].items() if row["source"]} == dict.fromkeys(
        ROWS[:-1], str(finished.work)
    )
    assert {(e["a"], e["b"]) for e in report["differences"]} >= {("slpo", "cold_start"), ("slpo", "best_fixed")}
    assert ablation.latents_of("slpo") == {8}
    for row in ROWS[:-1]:
        assert ablation.records(row).read_bytes() == finished.records(row).read_bytes()
    assert f"Taken from {finished.work}: {', '.join(ROWS[:-1])}." in (ablation.work / "report.md").read_text()
    assert ablation.evaluate(monkeypatch, **shared) == set()
    assert ablation.evaluate(monkeypatch) == set()
    assert [path.name for path in (ablation.work / "eval").iterdir() if path.is_dir()] == ["slpo"]


def _other_problems(_, ablation):
    (ablation.folder / "real.json").write_text((ablation.folder / "real.json").read_text().replace("3.0", "4.0"))


def _damaged(finished, _):
    _edit(finished.records("imitate"))


def _not_evaluated(finished, _):
    finished.records("imitate", "made").unlink()


@pytest.mark.parametrize(
    ("spoil", "change", "expected"),
    [
        (_other_problems, {}, r"config\.data\.eval\.real: these 6 problems are not the 6 that .*row imitate was"),
        (None, {"evaluate.limit": 5}, r"config\.data\.eval\.made: these 5 problems are not the 6"),
        (None, {"evaluate.samples": 1}, r"config\.evaluate\.samples: is 1, but 2 in .*row imitate"),
        (None, {"dropout.rate": 0.2}, r"config\.evaluate\.dropout: is 0\.2, but 0\.3 in .*row imitate"),
        (None, {"evaluate.seeds": 1}, r"config\.evaluate\.seeds: is 1, but 2 in"),
        (None, {"evaluate.max_answer_tokens": 3}, r"config\.evaluate\.max_answer_tokens: is 3, but 4 in"),
        (None, {"evaluate.temperature": 0.7}, r"config\.evaluate\.temperature: is 0.7, but 0.0 in"),
        (_damaged, {}, r"config\.evaluate\.rows_from: .*real\.jsonl is not what"),
        (_not_evaluated, {}, r"config\.evaluate\.rows_from: .*row imitate was not evaluated on made"),
        (None, {"evaluate.rows_from": "nowhere"}, r"config\.evaluate\.rows_from: nowhere has no eval/ROW/row\.json"),
    ],
)
def test_rows_that_can_not_be_compared(finished, ablation, monkeypatch, spoil, change, expected):
    """Known before the first stage, and nothing is rolled out."""
    if spoil:
        spoil(finished, ablation)
    change = {"evaluate.rows_from": str(finished.work)} | change
    experiment = build(read_config(ablation.config(**change)), ablation.work)
    monkeypatch.setattr(Evaluator, "run", None)
    for look in (evaluate.check_evaluation, evaluate.run_evaluate):
        with pytest.raises(UserError, match=expected) as caught:
            look(experiment)
        assert "\n" not in str(caught.value)
    experiment.log.close()


def test_a_run_takes_no_rows_from_itself(finished, monkeypatch):
    with pytest.raises(UserError, match=r"config\.evaluate\.rows_from: .* is this run itself"):
        finished.evaluate(monkeypatch, **{"evaluate.rows_from": str(finished.work)})
