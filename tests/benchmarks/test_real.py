"""The run of a real model on a real card: what it is given, what it tells, and its whole path in small."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import carry
from benchmarks import real, real_plan
from slpo_jax.config.config_checks import check
from slpo_jax.errors import UserError
from slpo_jax.io import artifact
from slpo_jax.io.workdir import Workdir
from slpo_jax.stages import COLD_START, USUAL

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = (
    "He has {a}+{b}=<<{a}+{b}={c}>>{c} apples.\nThen {c}+1=<<{c}+1={d}>>{d}.\n#### {d}"
)


@pytest.fixture
def data(tmp_path) -> Path:
    """Small files in the layouts of the real ones; the training file."""
    folder = tmp_path / "data"
    folder.mkdir()
    made = [
        dict(
            a=a,
            b=b,
            c=a + b,
            d=a + b + 1,
        )
        for a in range(1, 6)
        for b in range(1, 7)
    ]
    asked = [
        "Tom has {a} apples and buys {b} and 1. How many now?".format_map(each)
        for each in made
    ]
    rows = [
        {"question": asked[i], "answer": SOLUTION.format_map(each)}
        for i, each in enumerate(made)
    ]
    (folder / real_plan.TRAIN).write_text(
        "".join(json.dumps(row) + "\n" for row in rows[:24])
    )
    (folder / real_plan.VALID).write_text(json.dumps(rows[24:26]))
    stepped = [{"question": asked[i], "steps": ["<<{c}+1={d}>>".format_map(made[i])], "answer": str(made[i]["d"])}
               for i in (26, 27)]  # fmt: skip
    (folder / "gsm_test.json").write_text(json.dumps(stepped))
    (folder / "multiarith.json").write_text(
        json.dumps(
            [
                {
                    "question": f" {asked[28]} ",
                    "answer": "11",
                }
            ]
        )
    )
    svamp = {"Body": "Tom has apples.", "Question": "How many?"}
    (folder / "svamp.json").write_text(
        json.dumps(
            [
                svamp
                | {
                    "ID": str(i),
                    "Answer": float(i),
                }
                for i in (7, 8)
            ]
        )
    )
    return folder / real_plan.TRAIN


def test_weights_in_parts_are_put_together(tmp_path):
    """Of the real file's size there are two, which a transfer of 64 MiB takes beside 12 MiB of other things."""
    assert -(-98_362_432 // carry.PART) == 2
    assert carry.PART + 12 * 2**20 <= 64 * 2**20
    whole = bytes(range(256)) * 5
    (tmp_path / "model.gguf").write_bytes(whole)
    said = carry.prepare(tmp_path / "model.gguf", [], tmp_path / "parts", part=500)
    assert "1,280 bytes of weights in 3 parts" in said
    sizes = [
        (tmp_path / "parts" / f"weights.{number}").stat().st_size
        for number in (1, 2, 3)
    ]
    assert (max(sizes) <= 500, sum(sizes)) == (True, 1280)
    joined = carry.join_weights(tmp_path / "parts", tmp_path / "made" / "whole")
    assert joined.read_bytes() == whole
    for number in (1, 2, 3):  # what is whole is not made again
        (tmp_path / "parts" / f"weights.{number}").unlink()
    assert carry.join_weights(tmp_path / "parts", joined).read_bytes() == whole


def _edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda folder: (folder / "weights.2").unlink(), r"weights\.2: no such file; bring all 3 parts"),
        (lambda folder: (folder / "weights.2").write_bytes(b"x" * 427), r"weights\.2: its digest is not that in"),
        (lambda folder: (folder / carry.MANIFEST).unlink(), r"weights\.json: no such file; make it with launch/carry"),
        (lambda folder: _edit(folder / carry.MANIFEST, '"sha256": "', '"sha256": "0'), "its parts together have not"),
    ],
)  # fmt: skip
def test_weights_that_are_not_what_they_were(damage, fault, tmp_path):
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 5)
    carry.prepare(tmp_path / "model.gguf", [], tmp_path / "parts", part=500)
    damage(tmp_path / "parts")
    with pytest.raises(UserError, match=fault):
        carry.join_weights(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("command", "place"), [(real.main, "--workdir"), (carry.main, "--folder")]
)
def test_a_missing_data_file_is_named(command, place, data, tmp_path, capsys):
    missing = data.parent / real_plan.SETS["svamp"]
    missing.unlink()
    try:
        status = command(
            [
                f"--train={data}",
                f"--weights={data.parent}",
                f"{place}={tmp_path}",
            ]
        )
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith(
        f"error: --train: {missing}: no such file; give GSM8K's gsm8k_train.jsonl, and"
    )


@pytest.mark.parametrize("task", real_plan.TASKS)
@pytest.mark.parametrize(
    ("tiny", "parts"),
    [
        (False, 1),
        (False, 32),
        (True, 1),
    ],
)
def test_its_configs_can_be_run(task, tiny, parts, tmp_path):
    given = {"init": "" if tiny else "m.gguf", "train": "a", "valid": "b", "tests": "c", "tiny": tiny, "task": task,
             "workdir": str(tmp_path)}  # fmt: skip
    imitated = tmp_path / "imitation/checkpoints/imitate"
    imitated.mkdir(parents=True)
    (imitated / "finished").write_text("3\n")
    asked = [
        json.dumps(given | {"micro_batches": parts, "part": part})
        for part in real_plan.PARTS[task]
    ]
    *first, config = [check(real_plan.get_config(each)) for each in asked]
    assert [each.stages for each in (*first, config)] == {
        "gsm8k": [USUAL], "countdown": [("imitate", "evaluate"), ("rl", "evaluate")]
    }[task]  # fmt: skip
    counted = [stage for part in real_plan.PARTS[task].values() for stage in part]
    assert counted == [
        stage for stage in USUAL if stage != COLD_START or task == "gsm8k"
    ]
    assert (
        len(config.prompt_slots)
        == len(config.rl.capacities)
        == len(config.evaluate.thresholds)
        == 1
    )
    assert config.rl.objectives == tuple(real_plan.OBJECTIVES[task])
    assert config.evaluate.batch_size * parts in (32, 1024)
    assert config.evaluate.samples == 16


def test_sets_are_joined_and_parted(data, tmp_path):
    """Every line goes where its problem came from; an evaluation that is not finished goes nowhere."""
    spans = real_plan.join_sets(data.parent, tmp_path / "tests.jsonl")
    assert spans == {
        "tests": {
            "gsm8k": (0, 2),
            "multiarith": (2, 3),
            "svamp": (3, 5),
        }
    }
    joined = [
        json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()
    ]
    assert [row["answer"] for row in joined] == ["9", "10", "11", "7", "8"]
    assert "steps" in joined[0]
    assert "steps" not in joined[3]
    assert real_plan.join_sets(data.parent, tmp_path / "few.jsonl", most=1)["tests"][
        "svamp"
    ] == (2, 3)
    workdir = Workdir(tmp_path / "work")
    apart = Workdir(tmp_path / "apart")
    for row in ("whole", "begun"):
        files = workdir.set_files(real_plan.TESTS, row)
        files.folder.mkdir(parents=True)
        files.records.write_text("".join(f'{{"index": {i}}}\n' for i in range(5)))
        workdir.row_facts(row).write_text('{"a": 1}')
    whole = workdir.set_files(real_plan.TESTS, "whole")
    artifact.write(
        whole.manifest, {"set": "tests", "problems": 5}, files=[whole.records]
    )
    assert real_plan.part_sets([workdir], apart, spans) == 1
    assert not apart.row("begun").exists()
    found = {
        name: apart.set_files(name, "whole").records.read_text()
        for name in spans["tests"]
    }
    assert found == {"gsm8k": '{"index": 0}\n{"index": 1}\n', "multiarith": '{"index": 2}\n',
                     "svamp": '{"index": 3}\n{"index": 4}\n'}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("task", "compiled", "rows", "counts", "tables"), [
    ("gsm8k", 12, {"imitate", "cold_start"}, {"gsm8k": 2, "multiarith": 1, "svamp": 2},
     {"minus control", "minus cold gate"}),
    ("countdown", 8, {"imitate", "imitate_control"}, {"numbers_3": 8, "numbers_4": 8},
     {"minus SFT, as many steps more", "minus SFT", "minus answer_only"}),
])  # fmt: skip
def test_a_killed_run_goes_on(task, compiled, rows, counts, tables, tmp_path, data):
    """The whole path with weights in parts: killed within an objective, all is there after a second call.

    What was compiled first is what the run asks for: nothing of size is compiled after it.
    """
    from tiny_gguf import fields_of, llama_config, tensors_of, write_gguf

    small = llama_config(max_position_embeddings=512, num_hidden_layers=1)
    write_gguf(tmp_path / "small.gguf", fields_of(small), tensors_of(small))
    carry.prepare(tmp_path / "small.gguf", [], tmp_path / "parts", part=50_000)
    work = tmp_path / "work"
    cache = tmp_path / "xla"
    command = [sys.executable, "-m", "benchmarks.real", "--tiny", f"--task={task}", "--seconds=900",
               f"--workdir={work}", f"--train={data}", f"--weights={tmp_path / 'parts'}",
               f"--out={tmp_path / 'out'}"]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }

    def programs() -> set[str]:
        return {
            path.name
            for what in ("train_step", "local")
            for path in cache.glob(f"jit_{what}*-cache")
        }

    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        first: set[str] = set()
        while process.poll() is None:
            time.sleep(0.1)
            known = work / "programs.json"
            if not first and known.exists() and json.loads(known.read_text())["what"]:
                first = programs()
            if (work / "metrics.jsonl").exists() and '"slpo"' in (
                work / "metrics.jsonl"
            ).read_text():
                os.killpg(process.pid, signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert "under way" in (tmp_path / "out/page.md").read_text()
    assert len(first) == compiled
    imitated = (
        real_plan.folder_of(work, task, next(iter(real_plan.PARTS[task])))
        .stage_folder("imitate")
        .finished
    )
    before = imitated.stat().st_mtime_ns
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + (work / "run.log").read_text()[-2000:]
    assert imitated.stat().st_mtime_ns == before
    assert programs() == first
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "metrics.jsonl", "page.md", "real_gpu.json", "report.json", "report.md"
    }  # fmt: skip
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert set(report["eval"]) == rows | {*real_plan.OBJECTIVES[task]}
    assert {
        name: figures["n"] for name, figures in report["eval"]["slpo"].items()
    } == counts
    found = json.loads((tmp_path / "out/real_gpu.json").read_text())
    assert {"command", "commit", "machine", "date", "seeds"} < found.keys()
    assert {*found["tables"]} == {"programs", "right answers", "by minutes"} | tables
    assert "all is there" in done.stdout
