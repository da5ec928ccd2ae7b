"""Rollouts of an evaluation under way, kept on the disk batch by batch: after an interruption none is done again."""

import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slpo_jax.io import hosts

_ROWS = "rows"


@dataclass(frozen=True)
class Batch:
    """Finished rollouts.

    Attributes:
        rows: int [N], their places in the evaluation.
        values: of these, see `Completions.values`.
    """

    rows: np.ndarray
    values: dict[str, np.ndarray]


@dataclass(frozen=True)
class RolloutCache:
    """The finished batches of one pass over a problem set: `FOLDER/EVALUATION.PASS.NUMBER.npz`.

    Attributes:
        folder: of everything that the evaluation has not finished yet.
        evaluation: digest of all that the rollouts depend on; batches of another one are never read.
        name: of the pass: greedy, or a seed's.
    """

    folder: Path
    evaluation: str
    name: str = "rollouts"

    def having(self, name: str) -> "RolloutCache":
        """The same evaluation's other pass."""
        return RolloutCache(self.folder, self.evaluation, name)

    def batches(self) -> list[Batch]:
        """What is there and whole."""
        found = []
        for path in sorted(self.folder.glob(f"{self._prefix}.*.npz")):
            try:
                with np.load(path) as arrays:
                    values = dict(arrays)
                    rows = values.pop(_ROWS)
                    if len(values["tokens"]) == len(rows):
                        found.append(Batch(rows, values))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                continue  # a machine that lost power tears files; the batch is rolled out again
        return found

    def add(self, number: int, batch: Batch) -> None:
        """Write a batch whole or not at all; of several processes the first does so.

        Args:
            number: of the batch; what had it before is replaced.
        """
        if not hosts.is_first():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self._prefix}.{number}.npz"
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            arrays: dict[str, Any] = {_ROWS: batch.rows, **batch.values}
            np.savez(file, **arrays)
        os.replace(temporary, path)

    def clear(self) -> None:
        """Forget all of the folder: its evaluation is written down elsewhere."""
        if hosts.is_first():
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _prefix(self) -> str:
        return f"{self.evaluation[:16]}.{self.name}"
