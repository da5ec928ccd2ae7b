"""The rooms of the package: how densely they are written, the way that imports go, who knows which method."""

import ast
import graphlib
import io
import re
import tokenize
from pathlib import Path

import pytest

from slpo_jax.architectures import ARCHITECTURES, REASONERS
from slpo_jax.policy.latent_policies import LATENT_POLICIES
from slpo_jax.training.recipes import RECIPES

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "slpo_jax"
FILES = {path: path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))}
FLOORS = (
    {"errors", "stages", "version", "settings"}, {"runtime"}, {"io", "models", "rewards"}, {"data"}, {"policy"},
    {"architectures"}, {"training"}, {"evaluation"}, {"config"}, {"checkpoints"}, {"run"}, {"api"}, {"cli"},
)  # fmt: skip

# A record's text is no architecture, and a row of tables may be named as what it is of.
NAMES = {*ARCHITECTURES, *REASONERS, *RECIPES, *LATENT_POLICIES}
AMBIGUOUS = {"text", "latent", "soft", "colar", "regular", "silent", "hybrid"}
ROOMS = tuple(
    PACKAGE / room
    for room in ("architectures", "policy/latent_policies", "training/recipes")
)
OWN_MODULES = re.compile(
    r"slpo_jax\.(architectures|policy\.latent_policies|training\.recipes)\."
    r"(?!architecture$|tensors$|weights$|latent_policy$|soft_tokens$|recipe$)"
)


# The most that a code line of a folder holds, in nodes of the syntax tree.
DENSITY = 5.5
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
NO_NODE = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def nodes_and_lines(source: str) -> tuple[int, int]:
    """Counts the nodes of a module's syntax tree, and its lines of code: no docstrings, blanks or comments."""
    nodes = [
        node for node in ast.walk(ast.parse(source)) if not isinstance(node, NO_NODE)
    ]

    docstrings = set()
    for node in nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.update(range(node.lineno, node.end_lineno + 1))

    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(nodes), len(lines - docstrings)


def densities() -> dict[str, float]:
    """Nodes of the syntax tree in a code line, by folder."""
    nodes = dict.fromkeys([name.parent.as_posix() for name in FILES.values()], 0)
    lines = dict.fromkeys(nodes, 0)
    for path, name in FILES.items():
        folder = name.parent.as_posix()
        nodes_of_file, lines_of_file = nodes_and_lines(path.read_text(encoding="utf-8"))
        nodes[folder] += nodes_of_file
        lines[folder] += lines_of_file
    return {folder: nodes[folder] / lines[folder] for folder in nodes}


def test_nodes_and_lines_of_a_module():
    source = '"""Docstring."""\n\n# A comment.\nx = [\n    1,\n]  # another\n'
    # Module, docstring and its constant, assignment, name, list, constant.
    assert nodes_and_lines(source) == (7, 3)


def test_no_folder_is_dense():
    denser = {
        name: density for name, density in densities().items() if density > DENSITY
    }
    assert denser == {}


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
    assert {file.name for file, floor in floors.items() if floor is None} == {
        "__init__.py",
        "__main__.py",
        "main.py",
    }
    up = [f"{file} -> {other}" for file, others in _imports().items() if floors[file] is not None
          for other in others if (floors[other] or 0) > floors[file]]  # fmt: skip
    assert up == []


def test_no_files_import_each_other():
    # A folder's __init__ takes names of its files, and they of each other: only files of code can be in a circle.
    files = {
        file: {other for other in others if other.name != "__init__.py"}
        for file, others in _imports().items()
    }
    assert len([*graphlib.TopologicalSorter(files).static_order()]) == len(FILES)


def told_apart(source: str) -> list[str]:
    """Where a module compares a method's name, chooses by it, or takes a method's own module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr | None] = []
        known = NAMES - AMBIGUOUS
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
            known = NAMES - {"latent"}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = (
                node.args
                if re.search(
                    "startswith|endswith|prefix|suffix|partition|get", node.func.attr
                )
                else []
            )
        elif isinstance(node, ast.Dict):
            asked = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.ImportFrom) and OWN_MODULES.match(node.module or ""):
            found.append(ast.unparse(node))
        parts = [
            each.elts if isinstance(each, ast.Tuple | ast.List | ast.Set) else [each]
            for each in asked
            if each
        ]
        names = [
            each.value
            for part in parts
            for each in part
            if isinstance(each, ast.Constant)
        ]
        found += [
            ast.unparse(node)
            for name in names
            if isinstance(name, str) and name in known
        ]
    return found


def test_no_other_room_knows_one_method_from_another():
    others = {
        path: name for path, name in FILES.items() if not set(ROOMS) & set(path.parents)
    }
    assert len(others) > 100
    found = {
        name.as_posix(): told_apart(path.read_text(encoding="utf-8"))
        for path, name in others.items()
    }
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
    asking = [
        node
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
    ]
    return [
        ast.unparse(node) for node in asking if isinstance(node.args[1], ast.Constant)
    ]


def test_what_an_object_has_is_not_asked_by_name():
    """Within a base class's own room it may be, and in an export's own code, which meets other libraries' objects."""
    rooms = {"api", "checkpoints", "cli", "config", "evaluation", "run"}
    found = {name.as_posix(): fields_asked_for(path.read_text(encoding="utf-8")) for path, name in FILES.items()
             if name.parts[0] in rooms}  # fmt: skip
    del found["checkpoints/custom_generate.py"]
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert fields_asked_for(
        "x = getattr(stage.settings, 'patience', None) or getattr(stage, name)"
    ) == ["getattr(stage.settings, 'patience', None)"]


def test_linen_lies_in_models_and_architectures_alone():
    folders = {
        path.parent
        for path in FILES
        if "flax.linen" in path.read_text(encoding="utf-8")
    }
    assert folders == {PACKAGE / "models", ROOMS[0]}
