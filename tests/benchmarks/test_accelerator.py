"""The command for a new kind of device, on the CPU at tiny shapes."""

import ast
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from benchmarks import accelerator
from slpo_jax.config.config_checks import check

ROOT = Path(__file__).resolve().parents[2]


def _part(name, program, least=0):
    return accelerator.Part(name, (sys.executable, "-c", program), least)


def _page(tmp_path, monkeypatch, parts, *flags, device="cpu"):
    machine = {"device": device, "date": str(time.time())}
    monkeypatch.setattr(accelerator, "look", lambda: {"platform": "cpu", "machine": machine})
    monkeypatch.setattr(accelerator, "parts", lambda workdir, tiny: parts)
    return accelerator.page(accelerator.parse(["--workdir", str(tmp_path / "work"), *flags]))


@pytest.mark.nightly
def test_it_goes_on_where_a_limit_cut_it(tmp_path, monkeypatch):
    """Parts that ended well are not run again, unless their command is another one; those that failed are."""
    told = tmp_path / "told"
    count = f"open({str(told)!r}, 'a').write('x'); print('a table')"
    parts = [_part("one", count), _part("slow", "import time; time.sleep(60)"), _part("late", "print('late')", 1000)]
    text, well = _page(tmp_path, monkeypatch, parts, "--seconds", "2", "--json", str(tmp_path / "all.json"))
    assert not well
    ended = json.loads((tmp_path / "all.json").read_text())["parts"]
    assert (ended["one"]["said"], ended["one"]["status"], ended["slow"], ended["late"]) == ("a table\n", 0, None, None)
    assert "## one" in text
    assert text.count("Not finished: give the command again.") == 2
    parts[1:] = [_part("slow", "print('quick now')"), _part("late", "print('fails'); raise SystemExit(3)")]
    text, well = _page(tmp_path, monkeypatch, parts, "--seconds", "100")
    assert (well, "quick now" in text, "status 3" in text) == (False, True, True)
    parts[2] = _part("late", "print('mended')")
    text, well = _page(tmp_path, monkeypatch, parts)
    assert (well, "mended" in text) == (True, True)
    assert told.read_text() == "x"
    parts[0] = _part("one", count + "; print('changed')")
    assert "changed" in _page(tmp_path, monkeypatch, parts)[0]
    assert told.read_text() == "xx"
    _page(tmp_path, monkeypatch, parts, device="another")
    assert told.read_text() == "xxx"


@pytest.mark.nightly
def test_the_command_on_a_cpu(tmp_path):
    """One of its parts through its real program; the others', which take longer, are the next test's."""
    flags = ["--workdir", str(tmp_path / "work"), "--only", "predicted"]
    command = [sys.executable, "-m", "benchmarks.accelerator", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("## ")] == ["## predicted"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| products of a device"))
    assert float(row.split("|")[2].split()[0]) > 0 < float(row.split("|")[3].split()[0])
    assert json.loads((tmp_path / "work" / "predicted.json").read_text())["status"] == 0


@pytest.mark.parametrize("tiny", [True, False])
def test_its_parts_are_commands(tiny, tmp_path):
    """Every part's module takes the flags that it is given; those of runs are of their configs."""
    found = {part.name: part.command[2:] for part in accelerator.parts(tmp_path, tiny)}
    for name in ("step", "pass_at_16", "predicted", "smollm2"):
        module, *flags = found[name]
        importlib.import_module(module).parse(flags)
    runs = {name: words for name, words in found.items() if words[0] == "slpo_jax.main"}
    assert {*runs} == {"quickstart", *accelerator.METHODS}
    for name, (_, config, workdir, *changes) in runs.items():
        assert workdir.startswith(f"--workdir={tmp_path}")
        file, _, argument = config.removeprefix("--config=").partition(":")
        settings = runpy.run_path(str(ROOT / file))["get_config"](*filter(None, [argument]))
        for change in changes:
            key, _, value = change.removeprefix("--config.").partition("=")
            given = ast.literal_eval(value) if value.startswith("(") else yaml.safe_load(value)
            settings.update_from_flattened_dict({key: given})
        check(settings)
        assert bool(changes) == (tiny or name != "quickstart")
    assert all((ROOT / path).exists() for path in found["parity"][3:] if path.startswith("tests/"))


@pytest.mark.nightly
def test_each_method_is_tried_and_gone_on_with(tmp_path):
    """CoLaR, Latent-SFT, Latent-GRPO and LatentRM through their real programs; a second call has nothing to do."""
    command = ["--workdir", str(tmp_path), "--tiny", "--only", *accelerator.METHODS]
    text, well = accelerator.page(accelerator.parse(command))
    assert well, text
    stages = {"colar": "grpo", "latent_sft": "imitate", "latent_grpo": "latent_grpo", "latent_rm": "latent_rm"}
    for name, stage in stages.items():
        assert (tmp_path / f"{name}_tiny" / "checkpoints" / stage / "finished").exists()
    assert accelerator.page(accelerator.parse(command)) == (text, True)
