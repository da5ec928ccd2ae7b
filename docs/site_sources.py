"""What the site changes of its sources (mkdocs.yml): links that leave docs/, and docstrings' sections."""

import re
from typing import Any

import griffe

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")
_SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Raises|Returns|Yields):\n)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """A hook of mkdocs: links to other folders lead to the repository, or, where its address isn't known, are text."""
    address = (config.repo_url or "").rstrip("/")
    return _OUTSIDE.sub(rf"[\1]({address}/blob/HEAD/\2)" if address else r"\1", markdown)


class Sections(griffe.Extension):
    """Has griffe see a section that no blank line stands before."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """One object of the package, as it is read."""
        if obj.docstring:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
