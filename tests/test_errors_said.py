"""Every text that an error or warning may be made of, as the code has it: a change of one is on purpose, or a fault.

`python tests/test_errors_said.py` writes `golden/errors.txt` anew.
"""

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
GOLDEN, PACKAGE = HERE / "golden" / "errors.txt", HERE.parent / "slpo_jax"
_PLACES = re.compile(r"%[-\d.]*[sdrfg]|\{[\w.!:]*\}")


def _text(node: ast.AST) -> str | None:
    """A string's template, with {} for what is put in; None for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text(side) for side in (node.left, node.right)]
        return None if sides == [None, None] else "".join("{}" if side is None else side for side in sides)
    return None


def _pieces(node: ast.expr) -> list[ast.expr]:
    """Of a string that stands in another."""
    whole = isinstance(node, ast.Constant)
    return node.values if isinstance(node, ast.JoinedStr) else [node if whole else ast.FormattedValue(node, -1)]


class _Joined(ast.NodeTransformer):
    """`UserError(key, problem)` as the one text that it says, and in a text `key_name(key)` as the key."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if getattr(node.func, "id", "") != "UserError" or len(node.args) != 2:
            return node
        key, problem = map(_pieces, node.args)
        return ast.JoinedStr([*key, ast.Constant(": "), *problem])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        calls = [getattr(part, "value", None) for part in node.values]
        named = [isinstance(call, ast.Call) and getattr(call.func, "id", "") == "key_name" for call in calls]
        pairs = zip(node.values, calls, named, strict=True)
        return ast.JoinedStr([x for part, call, is_key in pairs for x in (_pieces(call.args[0]) if is_key else [part])])


def _said(node: ast.AST) -> Iterator[str]:
    """All strings of three words or more in one line: parts of a message may stand far from where it is raised."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return
    text = _text(node)
    if text is not None and "\n" not in text and len(re.findall(r"[a-z]{2,}", text)) > 2 and " " in text.strip():
        yield " ".join(_PLACES.sub("{}", text).split())
    for child in ast.iter_child_nodes(node):
        if text is None or not isinstance(child, ast.Constant):
            yield from _said(child)


def _lines() -> list[str]:
    trees = [_Joined().visit(ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")]
    return sorted({line for tree in trees for line in _said(tree)})


def test_every_error_and_warning_says_what_it_did():
    known = GOLDEN.read_text(encoding="utf-8").splitlines()
    diff = [
        line for line in difflib.unified_diff(known, _lines(), "known", "now", lineterm="", n=0) if line[:2] != "@@"
    ]
    assert not diff, "\n".join([*diff, f"if this is meant: python tests/{Path(__file__).name}"])


if __name__ == "__main__":
    GOLDEN.write_text("".join(line + "\n" for line in _lines()), encoding="utf-8")
