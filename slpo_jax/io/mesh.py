"""The devices of a run as a mesh, and arrays on it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from slpo_jax.io import hosts

AXIS = "data"


def data_mesh(devices=None) -> Mesh:
    """A one-axis mesh over all devices, or the given ones."""
    devices = devices or jax.devices()
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Host arrays [B, ...], the same on every process, as arrays whose rows are spread over the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree on every device of the mesh; of several processes each gives the same."""
    sharding = NamedSharding(mesh, PartitionSpec())
    if hosts.is_alone():
        return jax.device_put(tree, sharding)

    def put(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)
