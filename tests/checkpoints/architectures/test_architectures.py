"""What tells one architecture from another lies in `slpo_jax.checkpoints.architectures` alone."""

import ast
import re
from pathlib import Path

import pytest

import slpo_jax
from slpo_jax.checkpoints.architectures import ARCHITECTURES, REASONERS

PACKAGE = Path(slpo_jax.__file__).parent
ROOM = PACKAGE / "checkpoints" / "architectures"
NAMES = {*ARCHITECTURES, *REASONERS}


def told_apart(source: str) -> list[str]:
    """Where a module compares an architecture's name, chooses by it, or takes an architecture's own module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.args if re.search("startswith|endswith|prefix|suffix|partition|get", node.func.attr) else []
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            # A record's text is no architecture, nor are a recipe and a latent policy.
            asked = node.keys if keys <= NAMES or keys & NAMES not in ({"text"}, {"colar"}) else []
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.ImportFrom) and re.match(
            r"slpo_jax\.checkpoints\.architectures\.(?!architecture$)", node.module or ""
        ):
            found.append(ast.unparse(node))
        parts = [each.elts if isinstance(each, ast.Tuple | ast.List | ast.Set) else [each] for each in asked if each]
        names = [each.value for part in parts for each in part if isinstance(each, ast.Constant)]
        found += [ast.unparse(node) for name in names if name in NAMES]
    return found


def test_no_other_room_knows_an_architecture_from_another():
    files = [path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents]
    assert len(files) > 100
    assert [(str(path), line) for path in files for line in told_apart(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    ["x.architecture == 'codi'", "x not in ('a', 'text')", "x.startswith('coconut')", "{'text': 1}[x]",
     "d.get('codi_llama')", "from slpo_jax.checkpoints.architectures.codi import Codi"],
)  # fmt: skip
def test_what_is_looked_for_is_found(source):
    assert told_apart(source) == [source.replace("[x]", "")]


def test_linen_lies_in_models_and_architectures_alone():
    folders = {path.parent for path in PACKAGE.rglob("*.py") if "flax.linen" in path.read_text()}
    assert folders == {PACKAGE / "models", ROOM}
