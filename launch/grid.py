"""What a reproduction is made of: runs in a grid, and timings."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Run:
    """One line of a grid, run once for each seed.

    Attributes:
        label: of its folder and its line in the comparison.
        overrides: value by config key; "{after}" in one stands for the workdir of `after` with the same seed.
        after: the label of a run that comes first, whose report's rows this one takes where it has none of its own
            (`config.evaluate.rows_from`); "": none.
        seeds: instead of the grid's.
        config: instead of the grid's.
        rows: that are compared of it, instead of the grid's.
        alone: it takes no rows of `after`, being evaluated in another way.
        kind: what its settings are counted as; "": as its rows.
    """

    label: str
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    after: str = ""
    seeds: tuple[int, ...] = ()
    config: str = ""
    rows: tuple[str, ...] = ()
    alone: bool = False
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Runs and the comparison that they are made for.

    Attributes:
        config: a config file, as --config of slpo_jax.main takes it; relative to the checkout.
        runs: no two with one label; those named in `after` before those that name them.
        rows: of the report, compared between the runs.
        minus: baselines of theirs, which they are set beside within each run; without any they stand alone.
        metrics: of the report.
        folder: under runs/, shared with grids that have some of the same runs; "": the grid's name.
        over_training: logged metrics of which a picture shows how they went while the rows were trained.
    """

    config: str
    runs: tuple[Run, ...]
    rows: tuple[str, ...] = ("slpo",)
    minus: tuple[str, ...] = ("cold_start",)
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ("acc", "pass@1", "pass@8", "pass@16", "latent_steps")
    folder: str = ""
    over_training: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Timing:
    """A benchmark of random weights, which asks for no run; its `--json` has the paper's rows beside ours.

    Attributes:
        module: of benchmarks/.
        parts: of a step, which a bar is made of.
        flags: of the benchmark.
    """

    module: str
    parts: tuple[str, ...]
    flags: tuple[str, ...] = ()
