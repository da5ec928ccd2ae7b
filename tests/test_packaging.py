"""What setup.py declares is what the package imports."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {"torch", "wandb", "trackio", "mlflow"}  # where a pickled checkpoint is to be read, and trackers


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


def test_orbax_is_bounded_below_the_release_that_renames_its_package():
    assert "1.0.0" not in _declared()["orbax-checkpoint"].specifier
    assert "0.12.8" in _declared()["orbax-checkpoint"].specifier
