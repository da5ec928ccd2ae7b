"""The rooms of the package: their size, the way that imports go, and who knows one method from another.

`python tests/test_house.py` writes today's code lines into `golden/house.json`.
"""

import ast
import graphlib
import io
import json
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from slpo_jax.architectures import ARCHITECTURES, REASONERS
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.training.recipes import RECIPES

HERE = Path(__file__).resolve().parent
PACKAGE, BUDGET = HERE.parent / "slpo_jax", HERE / "golden" / "house.json"
FILES = {path: path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))}
FLOORS = (
    {"errors", "stages", "version", "settings"}, {"runtime"}, {"io", "models", "rewards"}, {"data"}, {"policy"},
    {"architectures"}, {"training"}, {"evaluation"}, {"config"}, {"checkpoints"}, {"run"}, {"api"}, {"cli"},
)  # fmt: skip

# A record's text is no architecture, and a row of tables may be named as what it is of.
NAMES = {*ARCHITECTURES, *REASONERS, *RECIPES, *LATENT_POLICIES}
AMBIGUOUS = {"text", "latent", "soft", "colar", "regular", "silent", "hybrid"}
ROOMS = tuple(PACKAGE / room for room in ("architectures", "policy/latent_policies", "training/recipes"))
OWN_MODULES = re.compile(
    r"slpo_jax\.(architectures|policy\.latent_policies|training\.recipes)\."
    r"(?!architecture$|tensors$|weights$|latent_policy$|soft_tokens$|recipe$)"
)


def code_lines(source: str) -> int:
    """Lines of code, without docstrings, blanks and comments."""
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docs = {
        line for node in strings
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }  # fmt: skip
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type not in empty]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs)


def _folders() -> dict[str, int]:
    found = Counter[str]()
    for path, name in FILES.items():
        found[name.parent.as_posix()] += code_lines(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def test_folders_have_the_code_lines_that_they_had():
    most = {name: 1.02 * lines + 1 for name, lines in json.loads(BUDGET.read_text()).items()}
    assert {name: lines for name, lines in _folders().items() if lines > most.get(name, 0)} == {}


def _floor(file: Path) -> int | None:
    """The floor of a file's room, or of a file that stands in none; None for the package's own doors."""
    room = file.parts[0].removesuffix(".py")
    return next((floor for floor, rooms in enumerate(FLOORS) if room in rooms), None)


def _imports() -> dict[Path, set[Path]]:
    """The files of the package that each of them takes names of, wherever in it."""
    found: dict[Path, set[Path]] = {}
    for path, file in FILES.items():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        modules = {
            module for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slpo_jax.")
            for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        }  # fmt: skip
        places = [Path(*module.split(".")[1:]) for module in modules]
        found[file] = {name for place in places for name in (place.with_suffix(".py"), place / "__init__.py")
                       if name in FILES.values()} - {file}  # fmt: skip
    return found


def test_imports_go_down():
    floors = {file: _floor(file) for file in FILES.values()}
    assert {file.name for file, floor in floors.items() if floor is None} == {"__init__.py", "__main__.py", "main.py"}
    up = [f"{file} -> {other}" for file, others in _imports().items() if floors[file] is not None
          for other in others if (floors[other] or 0) > floors[file]]  # fmt: skip
    assert up == []


def test_no_files_import_each_other():
    # A folder's __init__ takes names of its files, and they of each other: only files of code can be in a circle.
    files = {file: {other for other in others if other.name != "__init__.py"} for file, others in _imports().items()}
    assert len([*graphlib.TopologicalSorter(files).static_order()]) == len(FILES)


def test_no_two_files_have_one_name():
    names = Counter(file.name for file in FILES.values() if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def told_apart(source: str) -> list[str]:
    """Where a module compares a method's name, chooses by it, or takes a method's own module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr | None] = []
        known = NAMES - AMBIGUOUS
        if isinstance(node, ast.Compare):
            asked, known = [node.left, *node.comparators], NAMES - {"latent"}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.args if re.search("startswith|endswith|prefix|suffix|partition|get", node.func.attr) else []
        elif isinstance(node, ast.Dict):
            asked = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.ImportFrom) and OWN_MODULES.match(node.module or ""):
            found.append(ast.unparse(node))
        parts = [each.elts if isinstance(each, ast.Tuple | ast.List | ast.Set) else [each] for each in asked if each]
        names = [each.value for part in parts for each in part if isinstance(each, ast.Constant)]
        found += [ast.unparse(node) for name in names if isinstance(name, str) and name in known]
    return found


def test_no_other_room_knows_one_method_from_another():
    others = {path: name for path, name in FILES.items() if not set(ROOMS) & set(path.parents)}
    assert len(others) > 100
    found = {name.as_posix(): told_apart(path.read_text(encoding="utf-8")) for path, name in others.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    ["x.architecture == 'codi'", "x not in ('a', 'text')", "x.startswith('coconut')", "{'distil': 1}[x]",
     "d.get('codi_llama')", "recipe == 'icot'", "from slpo_jax.architectures.codi import Codi",
     "from slpo_jax.policy.latent_policies.hybrid import Hybrid"],
)  # fmt: skip
def test_what_is_looked_for_is_found(source):
    assert told_apart(source) == [source.replace("[x]", "")]


def fields_asked_for(source: str) -> list[str]:
    """Where a module asks an object by a field's name whether it has the field."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    asking = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")]
    return [ast.unparse(node) for node in asking if isinstance(node.args[1], ast.Constant)]


def test_what_an_object_has_is_not_asked_by_name():
    """Within a base class's own room it may be, and of other libraries' objects."""
    rooms = {"api", "checkpoints", "cli", "config", "evaluation", "run"}
    found = {name.as_posix(): fields_asked_for(path.read_text(encoding="utf-8")) for path, name in FILES.items()
             if name.parts[0] in rooms}  # fmt: skip
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert fields_asked_for("x = getattr(stage.settings, 'patience', None) or getattr(stage, name)") == [
        "getattr(stage.settings, 'patience', None)"
    ]


def test_linen_lies_in_models_and_architectures_alone():
    folders = {path.parent for path in FILES if "flax.linen" in path.read_text(encoding="utf-8")}
    assert folders == {PACKAGE / "models", ROOMS[0]}


if __name__ == "__main__":
    BUDGET.write_text(json.dumps(_folders(), indent=1) + "\n")
