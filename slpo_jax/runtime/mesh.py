"""The devices of a run as a mesh of two axes, and arrays on it.

Rows of a batch are spread over all devices, over both axes. Along `fsdp` devices may share one copy of a parameter,
each holding a part; along `data` there are copies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from slpo_jax.errors import UserError
from slpo_jax.runtime import hosts

DATA, FSDP = "data", "fsdp"
AXES = (DATA, FSDP)
ROWS, EVERYWHERE = PartitionSpec(AXES), PartitionSpec()
"""How a batch lies on the mesh, and what every device has all of."""


def device_mesh(devices=None, fsdp: int = 1) -> Mesh:
    """A mesh over all devices, or the given ones.

    Args:
        fsdp: devices that share a copy of the parameters.
    Raises:
        UserError: it does not divide their number.
    """
    devices = devices or jax.devices()
    if len(devices) % fsdp:
        raise UserError(f"config.sharding.fsdp: {fsdp} does not divide the {len(devices)} devices; give one that does")
    shape = (len(devices) // fsdp, fsdp)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Host arrays [B, ...], the same on every process, as arrays whose rows are spread over the mesh."""
    sharding = NamedSharding(mesh, ROWS)

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def over_rows(function: Callable[..., Any], mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., Any]:
    """The function as a compiled program in which each device has its own rows, of what it is given and returns.

    Args:
        specs: of its arguments, `ROWS` or `EVERYWHERE`.
    """
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=False))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree on every device of the mesh; of several processes each gives the same."""
    sharding = NamedSharding(mesh, EVERYWHERE)
    if hosts.count() == 1:
        return jax.device_put(tree, sharding)

    def put(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)
