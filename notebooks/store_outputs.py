"""`python notebooks/store_outputs.py`: runs the notebook as it stands and stores what a reader is to see without running.

Text and pictures are stored; warnings, progress and the machine's own paths are not. It takes minutes of two cores,
and needs what `pip install -e '.[test]'` brings.
"""

import hashlib
import tempfile
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).resolve().parent / "slpo_colab.ipynb"
MADE_FROM = "outputs_made_from"  # in the notebook's metadata


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the code whose outputs are stored, which is all but what installs."""
    run = [cell.source for cell in _code(notebook) if not _installs(cell)]
    return hashlib.sha256("\n\n".join(run).encode()).hexdigest()


def _installs(cell: nbformat.NotebookNode) -> bool:
    return "install" in cell.metadata.get("tags", [])


def _code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _kept(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Standard output in one piece, and pictures."""
    text = "".join(
        output.text for output in cell.outputs if output.get("name") == "stdout"
    )
    kept = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    for output in cell.outputs:
        if picture := output.get("data", {}).get("image/png"):
            kept.append(
                nbformat.v4.new_output("display_data", data={"image/png": picture})
            )
    return kept


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Fill in the code cells' outputs, in a checkout that is installed already.

    Args:
        folder: where the run goes.
    """
    run = nbformat.from_dict(
        {**notebook, "cells": [cell for cell in notebook.cells if not _installs(cell)]}
    )
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        run, timeout=None, kernel_name="python3", resources=resources
    ).execute()
    by_id = {cell.id: cell for cell in run.cells}
    for cell in _code(notebook):
        cell.execution_count = None
        cell.outputs = _kept(by_id[cell.id]) if cell.id in by_id else []
        cell.metadata.pop("execution", None)
    notebook.metadata[MADE_FROM] = digest(notebook)


def main() -> None:
    """The command."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
