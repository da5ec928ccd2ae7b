"""What a run says of itself at its start, on standard error: where it is, on which devices, of how many parameters."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slpo_jax import __version__
from slpo_jax.io import hosts

if TYPE_CHECKING:
    from slpo_jax.run.experiment import Experiment

_begun: list[str] = []  # workdirs that were said


def say_start(workdir: str | Path, config: str = "") -> None:
    """The first line, before anything is imported that takes a second.

    Args:
        config: its name or file.
    """
    if str(workdir) not in _begun:
        _begun.append(str(workdir))
        named = f", config {config}" if config else ""
        print(f"slpo_jax {__version__}: workdir {workdir}{named}", file=sys.stderr, flush=True)


def say_run(experiment: "Experiment") -> None:
    """The lines on devices, model and stages, of several processes the first's."""
    if not hosts.is_first():
        return
    import jax

    from slpo_jax.stages import EVALUATE, wanted

    config, workdir, devices = experiment.config, experiment.workdir, experiment.mesh.devices
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(experiment.abstract_params())]
    stages = []
    for stage in wanted(config):
        folder = workdir.stage(stage.name)
        at = f" (at step {max(folder.steps)})" if folder.steps else ""
        stages.append(stage.name + (" (finished)" if folder.is_finished else at))
    stages += [EVALUATE] * (EVALUATE in config.stages)
    together = "" if hosts.is_alone() else f" of {hosts.count()} processes"
    say_start(workdir.root)
    print(f"devices: {devices.size} x {devices.flat[0].device_kind}{together}", file=sys.stderr)
    print(f"model: {config.reasoner}, {sum(sizes):,} parameters", file=sys.stderr)
    print(f"stages: {', '.join(stages)}", file=sys.stderr, flush=True)
