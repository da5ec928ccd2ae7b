"""What the site changes of its sources (mkdocs.yml): pages and links that leave docs/, and docstrings' sections."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {"launch/README.md": "launch.md"}
"""Page of another folder -> its name on the site."""
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")
_SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Raises|Returns|Yields):\n)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """A hook of mkdocs: pages of other folders join the site, with their links to docs/ as docs/ writes them."""
    for source, name in BESIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](../docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """A hook of mkdocs: links to other folders lead to the repository, or, where its address isn't known, are text."""
    for source, name in BESIDE.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    address = (config.repo_url or "").rstrip("/")
    return _OUTSIDE.sub(
        rf"[\1]({address}/blob/HEAD/\2)" if address else r"\1", markdown
    )


class Sections(griffe.Extension):
    """Has griffe see a section that no blank line stands before."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """One object of the package, as it is read."""
        if obj.docstring:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
