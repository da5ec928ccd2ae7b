"""Devices that need not be there: XLA compiles for what is described of them.

A GPU is a file in `benchmarks/targets/`, as XLA's own tools write and read it, for jax's CUDA plugin; a TPU is known to
`libtpu`. Both are in the extra `aot`, and run nothing.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from slpo_jax.errors import UserError, in_a_line

FOLDER = Path(__file__).resolve().parents[1] / "targets"
GPU_SHARE = 0.92  # of its memory, as launch/one_machine.sh sets it
_TPU_MEMORY = {
    "v4": 30.75,
    "v5e": 15.75,
    "v5p": 95.74,
    "v6e": 31.25,
}  # GiB of a chip that libtpu leaves to programs
_SLICES = {
    "v5e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"},
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
}
_SLICES |= {"v6e": _SLICES["v5e"], "v4": _SLICES["v5p"]}
_WITHOUT_TPU = {  # what libtpu asks of a TPU's host, or keeps for itself
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
        name: as it was asked for.
        platform: as jax calls it.
        devices: as many as were asked for.
        memory: bytes of one that a program can use; 0: not known.
    """

    name: str
    platform: str
    devices: Sequence[jax.Device]
    memory: int


def known() -> list[str]:
    """The names of the devices that `target` knows, but for "cpu"."""
    return [
        *(f"cuda:{path.stem}" for path in sorted(FOLDER.glob("*.txtpb"))),
        *(f"tpu:{kind}" for kind in _SLICES),
    ]


def target(name: str, count: int) -> Target:
    """Devices by name: "cpu", "cuda:NAME" of a file in `benchmarks/targets/`, or "tpu:KIND".

    Args:
        count: of devices, on one host.
    Raises:
        UserError: the name is unknown, its plugin is missing, or it has no slice of so many.
    """
    kind, _, which = name.partition(":")
    if name == "cpu":
        return Target(name, "cpu", jax.devices("cpu")[:count], 0)
    if kind == "cuda":
        return _cuda(name, which, count)
    if kind == "tpu":
        return _tpu(name, which, count)
    raise UserError(
        f"--device: {name!r} is unknown; give cpu or one of {', '.join(known())}"
    )


def _cuda(name: str, which: str, count: int) -> Target:
    file = FOLDER / f"{which}.txtpb"
    if name not in known():
        names = ", ".join(each for each in known() if each.startswith("cuda"))
        raise UserError(
            f"--device: {name} has no description in benchmarks/targets; add a {which}.txtpb, or use {names}"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file}: can't be read ({in_a_line(error)}); mend it"
        ) from None
    memory = re.search(r"device_memory_size: ([1-9]\d*)", text)
    if not memory or "cuda_compute_capability" not in text:
        raise UserError(
            f"{file}: has no device_memory_size or no cuda_compute_capability; mend it, as h100.txtpb is"
        )
    found = _topology(
        name,
        "cuda",
        topology_name="described",
        target_config=text,
        topology=f"1x1x{count}",
    )
    return Target(name, "gpu", found, int(GPU_SHARE * int(memory[1])))


def _tpu(name: str, which: str, count: int) -> Target:
    if name not in known():
        raise UserError(
            f"--device: {name} is unknown; use {', '.join(f'tpu:{kind}' for kind in _SLICES)}"
        )
    slices = _SLICES[which]
    if count not in slices:
        raise UserError(
            f"--count: there is no slice of {count} {name}; give one of {', '.join(map(str, slices))}"
        )
    os.environ.update(
        {key: value for key, value in _WITHOUT_TPU.items() if key not in os.environ}
    )
    os.environ.pop(
        "XLA_FLAGS", None
    )  # of another XLA: at one that it doesn't know, libtpu ends the process
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
    found = _topology(name, "tpu", topology_name=f"{which}:{slices[count]}", **bounds)
    return Target(name, "tpu", found, int(_TPU_MEMORY[which] * 2**30))


def _topology(name: str, platform: str, **how) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform=platform, **how).devices
    except Exception as error:  # the plugin's own errors have no common type
        remedy = "python -m pip install -e '.[aot]', or mend its description"
        raise UserError(
            f"--device: can't compile for {name} ({in_a_line(error)}); install its plugin: {remedy}"
        ) from error
