"""What setup.py declares is what the package imports."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import slpo_jax

ROOT = Path(__file__).resolve().parents[1]
# Where a pickled checkpoint is to be read, a curve drawn, boxes compared, and values logged.
OPTIONAL = {"torch", "matplotlib", "math_verify", "sympy", "reasoning_gym", "wandb", "mlflow", "trackio"}


def _declared() -> dict[str, Requirement]:
    """setup.py's REQUIREMENTS, by distribution."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (texts,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REQUIREMENTS"
    )
    return {canonicalize_name(found.name): found for found in map(Requirement, texts)}


def _imported() -> dict[str, str]:
    """Top-level package -> a file of ours that imports it, wherever in the file."""
    found = {}
    for path in (ROOT / "slpo_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found |= {name.partition(".")[0]: str(path) for name in names}
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "slpo_jax"}}


def test_every_package_that_is_imported_is_declared():
    declared, distributions = _declared(), packages_distributions()
    undeclared = {
        name: path
        for name, path in _imported().items()
        if name not in OPTIONAL and not declared.keys() & set(map(canonicalize_name, distributions.get(name, [])))
    }
    assert undeclared == {}


def test_the_version_is_the_same_everywhere():
    version = slpo_jax.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] in (version, "Unreleased")


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_can_be_read(path):
    """Jobs say how long they may take, and what publishes has no right beside its own."""
    found = yaml.safe_load(path.read_text())
    assert found["permissions"] == {"contents": "read"}
    assert found[True]  # "on", to YAML
    for job in found["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    publishing = {"site": {"pages": "write", "id-token": "write"}, "release": {"id-token": "write"}}
    publish = found["jobs"].get("publish", {})
    assert publish.get("permissions") == publishing.get(path.stem)
    assert publish.get("environment") or not publish


@pytest.mark.slow
def test_a_wheel_is_whole(tmp_path):
    """The shipped configs and every file that is no module are in it, and `slpo` finds them from anywhere."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("slpo_jax", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('wheels'))"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, check=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as whole:
        whole.extractall(tmp_path / "installed")
    files = {path.relative_to(ROOT) for path in (ROOT / "slpo_jax").rglob("*") if path.is_file()}
    files |= {"slpo_jax" / path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.py")}
    missing = [
        file for file in files if "__pycache__" not in file.parts and not (tmp_path / "installed" / file).exists()
    ]
    assert missing == []
    command = [sys.executable, "-m", "slpo_jax", "configs", "quickstart"]
    there = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path / "wheels", env=there, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "configs" / "quickstart.py").read_text()
