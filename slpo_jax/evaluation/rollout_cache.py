"""Rollouts of an evaluation under way, kept on the disk batch by batch: after an interruption none is done again."""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slpo_jax.io import artifact, hosts

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
    """The finished batches of one pass over a problem set: `FOLDER/PASS.NUMBER.npz`.

    Attributes:
        folder: of everything that the evaluation has not finished yet.
        evaluation: digest of all that the rollouts depend on; batches of another one are not there.
        name: of the pass: greedy, or a seed's.
    """

    folder: Path
    evaluation: str
    name: str = "rollouts"

    def having(self, name: str) -> "RolloutCache":
        """The same evaluation's other pass."""
        return dataclasses.replace(self, name=name)

    def batches(self) -> list[Batch]:
        """What is there and whole."""
        paths = sorted(self.folder.glob(f"{self.name}.*.npz"))
        found = [artifact.read_arrays(path, [self.evaluation, self.name]) for path in paths]
        return [Batch(arrays.pop(_ROWS), arrays) for arrays in found if arrays is not None]

    def add(self, number: int, batch: Batch) -> None:
        """Write a batch whole or not at all; of several processes the first does so.

        Args:
            number: of the batch; what had it before is replaced.
        """
        path = self.folder / f"{self.name}.{number}.npz"
        artifact.write_arrays(path, [self.evaluation, self.name], {_ROWS: batch.rows, **batch.values})

    def clear(self) -> None:
        """Forget all of the folder: its evaluation is written down elsewhere."""
        if hosts.is_first():
            shutil.rmtree(self.folder, ignore_errors=True)
