"""The notebook from top to bottom on a tiny model: once it trains one, once it loads one."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import slpo_jax as slpo
from asked import QUESTION, RUN, workdir

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "notebooks" / "slpo_colab.ipynb"
TINY = {
    "stages": ("imitate", "rl"), "cpu_devices": 1, "model.n_layer": 1, "imitate.control": False,
    "imitate.max_latent_stage": 1, "imitate.cot_steps": 0, "imitate.stage_steps": 0, "imitate.final_steps": 2,
    "imitate.optimizer.warmup_steps": 0, "rl.objectives": ("slpo",), "rl.steps": 1,
    "rl.optimizer.warmup_steps": 0, "rl.capacities": ((1.0, 1.0),), "data.chain.train_size": 64,
    "data.chain.demos_size": 64, "data.chain.valid_size": 8,
}  # fmt: skip


def _execute(**parameters):
    """The cells' outputs, without installing, and with other values after the parameters' cell."""
    notebook = nbformat.read(STORED, as_version=4)
    cells = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "install" not in tags:
            cells.append(cell)
        if "parameters" in tags:
            text = "".join(
                f"{name} = {value!r}\n" for name, value in parameters.items()
            )
            cells.append(nbformat.v4.new_code_cell(text))
    assert len(cells) == len(notebook.cells), (
        "one cell installs, one has the parameters"
    )
    notebook.cells = cells
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _text(cell) -> str:
    return "".join(
        output.text for output in cell.outputs if output.get("name") == "stdout"
    )


def _without_time(text: str) -> str:
    """Leave out how long an answer took, which differs each time."""
    return re.sub(r"; [0-9.]+ ms, .*", "", text).strip()


def _images(cell) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def _assert_shown(cells, question: str, evaluation: slpo.Evaluation):
    """Accuracy, curve, thought and votes, by what the same reasoner gives here."""
    accuracy, curve, thought = cells[-3:]
    assert _without_time(_text(accuracy)) == _without_time(str(evaluation))
    assert _images(curve) == 1
    assert f"question  {question}\nanswer " in _text(thought)
    count = int(re.search(r"^thought   (\d+) latent", _text(thought), re.MULTILINE)[1])
    told, votes = _text(thought).split("vote of 16 rollouts")
    probabilities = re.findall(
        r"^ +\d+  (?:(?:0\.\d\d|1\.00)  )?\S", told, re.MULTILINE
    )
    assert len(probabilities) == count >= 1
    assert (
        sum(int(number) for number in re.findall(r"^ +(\d+)  ", votes, re.MULTILINE))
        == 16
    )


@pytest.mark.nightly
def test_it_trains_a_reasoner(tmp_path):
    question = "7 * 3 + 9 * 7 + 2"
    work = tmp_path / "work"
    asked = {"PROBLEMS": "chain:test", "LIMIT": 6, "SAMPLES": 4, "QUESTION": question}
    cells = _execute(CHECKPOINT="", WORKDIR=str(work), SETTINGS=TINY, **asked)
    assert {path.parent.name for path in work.glob("checkpoints/*/finished")} == {
        "imitate",
        "slpo",
    }
    assert f"coconut_gpt2 from {work}/checkpoints/slpo, stops by length 4" in _text(
        cells[3]
    )
    _assert_shown(
        cells, question, slpo.load(work).evaluate("chain:test", samples=4, limit=6)
    )


@pytest.mark.nightly
def test_it_loads_a_checkpoint(tmp_path):
    given = workdir("coconut_gpt2", tmp_path / "given")
    name = "coconut_gpt2"
    problems = [{"question": QUESTION, "steps": [], "answer": str(n)} for n in range(4)]
    cells = _execute(
        CHECKPOINT=str(given), PROBLEMS=problems, LIMIT=0, SAMPLES=2, QUESTION=QUESTION
    )
    assert (
        f"{name} from {given}/checkpoints/cold_start, stops by threshold {RUN[name]}"
        in _text(cells[3])
    )
    _assert_shown(cells, QUESTION, slpo.load(given).evaluate(problems, samples=2))


def test_it_imports_the_package_alone():
    code = [
        cell.source
        for cell in nbformat.read(STORED, as_version=4).cells
        if cell.cell_type == "code"
    ]
    imports = re.findall(r"^ *(?:import|from) .*", "\n".join(code), re.MULTILINE)
    assert imports == [
        "import site",
        "from pathlib import Path",
        "import slpo_jax as slpo",
    ]


@pytest.mark.parametrize(
    ("there", "source"),
    [
        (["slpo_jax/", "slpo_jax-1.whl"], "-e ."),
        (["slpo_jax-1.whl", "slpo_jax-2.whl", "runs/"], "./slpo_jax-2.whl"),
        ([], "slpo_jax"),
    ],
)
def test_it_installs_a_checkout_or_a_wheel_or_by_name(
    there, source, tmp_path, monkeypatch
):
    for name in there:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    (cell,) = [
        each
        for each in nbformat.read(STORED, as_version=4).cells
        if "install" in each.metadata.get("tags", [])
    ]
    code, _, rest = cell.source.partition("%pip ")
    found: dict[str, str] = {}
    exec(code, found)
    assert rest.splitlines()[0].format(**found) == f"install -q {source}[plot]"


_INSTALL = """
import pathlib, sys, sysconfig

folder = pathlib.Path(sysconfig.get_path("purelib"))
checkout = pathlib.Path("checkout")
(checkout / "slpo_jax").mkdir(parents=True)
(checkout / "slpo_jax" / "__init__.py").write_text("HERE = 1")
(folder / "slpo_jax_editable.pth").write_text(str(checkout.resolve()))
"""


def test_the_kernel_that_installs_a_checkout_finds_it(tmp_path):
    """As pip leaves an editable installation: a .pth file, which Python reads as it starts."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True
    )
    (cell,) = [
        each
        for each in nbformat.read(STORED, as_version=4).cells
        if "install" in each.metadata.get("tags", [])
    ]
    lines = [line for line in cell.source.splitlines() if not line.startswith("%pip")]
    program = "\n".join([_INSTALL, *lines, "import slpo_jax", "assert slpo_jax.HERE"])
    command = [tmp_path / "env" / "bin" / "python", "-I", "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_its_stored_outputs_are_its_code_s():
    """A reader sees what the code that stands there made, and nothing of the machine; or all of it is cleared."""
    notebook = nbformat.read(STORED, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    store = runpy.run_path(str(ROOT / "notebooks" / "store_outputs.py"))
    if store["MADE_FROM"] not in notebook.metadata:
        assert not any(cell.outputs for cell in code), "run notebooks/store_outputs.py"
        return
    assert notebook.metadata[store["MADE_FROM"]] == store["digest"](notebook), (
        "run notebooks/store_outputs.py"
    )
    assert all(cell.execution_count is None for cell in code)
    *_, loaded, accuracy, curve, thought = code
    assert "stops by length 4" in _text(loaded)
    assert re.match(
        r"Acc     \d+\.\d (± \d+\.\d|\[.*\]) on 300 problems\n", _text(accuracy)
    )
    assert _images(curve) == 1
    assert "<- majority" in _text(thought)
    assert not re.search(
        r"/(root|home|work|content|tmp)/|https?://", STORED.read_text()
    )
