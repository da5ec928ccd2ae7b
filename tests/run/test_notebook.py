"""The notebook from top to bottom on a tiny model: once it trains one, once it loads one."""

import json
import os
import re
import runpy
from pathlib import Path

import pytest
from asked import QUESTION, RUN, workdir

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "notebooks" / "slpo_colab.ipynb"
TINY = dict(cot=0, stage=0, final=2, gate=1, slpo=1)


# The quick start's config with less to compile: one phase of the curriculum, one capacity.
SMALLER = """
import configs.quickstart


def smaller(of=configs.quickstart.get_config):
    config = of()
    config.model.n_layer, config.imitate.max_latent_stage, config.rl.capacities = 1, 1, ((1.0, 1.0),)
    return config


configs.quickstart.get_config = smaller
"""


def _execute(**parameters):
    """The cells' outputs, without installing, and with other values after the parameters' cell."""
    notebook = nbformat.read(STORED, as_version=4)
    cells = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "install" not in tags:
            cells.append(cell)
        if "parameters" in tags:
            text = "".join(f"{name} = {value!r}\n" for name, value in parameters.items())
            cells.append(nbformat.v4.new_code_cell(text + SMALLER))
    assert len(cells) == len(notebook.cells), "one cell installs, one has the parameters"
    notebook.cells = cells
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _text(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def _images(cell) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def _assert_shown(cells, workdir: Path, samples: int, limit: int):
    """Accuracy, curve, table and bars, by what the evaluation wrote."""
    accuracy, curve, table, bars, votes = cells[-5:]
    rows = [json.loads(line) for line in (workdir / "notebook.jsonl").read_text().splitlines()]
    assert len(rows) == limit
    share = sum(row["correct"] for row in rows) / limit
    assert re.match(rf"Acc {100 * share:.1f} ± \d+\.\d on {limit} problems\n", _text(accuracy))
    assert all(len(row["samples"]) == samples for row in rows)
    solved = sum(any(sample["correct"] for sample in row["samples"]) for row in rows) / limit
    assert f"Pass@{samples:<2} {100 * solved:.1f} ±" in _text(accuracy)
    assert _images(curve) == 1
    assert f"question  {QUESTION}\nanswer " in _text(table)
    count = int(re.search(r"^thought   (\d+) latent", _text(table), re.MULTILINE)[1])
    probabilities = re.findall(r"^ +\d+  (0\.\d\d|1\.00)  \S", _text(table), re.MULTILINE)
    assert len(probabilities) == count >= 1
    assert _images(bars) == 1
    assert sum(int(number) for number in re.findall(r"^ +(\d+)  ", _text(votes), re.MULTILINE)) == 16


@pytest.mark.slow
def test_it_trains_a_reasoner(tmp_path):
    work = tmp_path / "work"
    cells = _execute(
        CHECKPOINT="", WORKDIR=str(work), STEPS=TINY, PROBLEMS="synthetic:test", LIMIT=6, SAMPLES=4, QUESTION=QUESTION
    )
    assert {path.parent.name for path in work.glob("checkpoints/*/finished")} == {"imitate", "cold_start", "slpo"}
    assert f"coconut_gpt2 from {work}/checkpoints/slpo, stops by threshold 0.5" in _text(cells[3])
    _assert_shown(cells, work, 4, 6)


@pytest.mark.slow
def test_it_loads_a_checkpoint(tmp_path):
    given, name = workdir("coconut_gpt2", tmp_path / "given"), "coconut_gpt2"
    problems = tmp_path / "problems.json"
    problems.write_text(json.dumps([{"question": QUESTION, "steps": [], "answer": str(n)} for n in range(4)]))
    work = tmp_path / "work"
    work.mkdir()
    cells = _execute(
        CHECKPOINT=str(given), WORKDIR=str(work), PROBLEMS=str(problems), LIMIT=0, SAMPLES=2, QUESTION=QUESTION
    )
    assert f"{name} from {given}/checkpoints/cold_start, stops by threshold {RUN[name]}" in _text(cells[3])
    _assert_shown(cells, work, 2, 4)
    assert os.listdir(work) == ["notebook.jsonl"]


def test_its_stored_outputs_are_its_code_s():
    """What a reader sees without running it, made by the code that stands there, and nothing of the machine."""
    notebook = nbformat.read(STORED, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 6
    store = runpy.run_path(str(ROOT / "notebooks" / "store_outputs.py"))
    assert notebook.metadata[store["MADE_FROM"]] == store["digest"](notebook), "run notebooks/store_outputs.py"
    assert all(cell.execution_count is None for cell in code)
    _, _, _, trained, accuracy, curve, table, bars, votes = code
    assert "stops by threshold" in _text(trained)
    assert re.match(r"Acc \d+\.\d ± \d+\.\d on 300 problems\n", _text(accuracy))
    assert [_images(cell) for cell in (curve, bars)] == [1, 1]
    assert "thought" in _text(table)
    assert "<- majority" in _text(votes)
    assert not re.search(r"/(root|home|work|content|tmp)/|https?://", STORED.read_text())
