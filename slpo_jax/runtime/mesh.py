"""The devices of a run as a mesh of two axes, and arrays on it.

Rows of a batch are spread over all devices, over both axes. Along `fsdp` devices may share one copy of a parameter,
each holding a part (fully sharded data parallelism); along `data` there are copies.

Between steps a device holds its part of every parameter and of the optimizer's state. A step gathers the parameters
before the rollout, so that no loop waits for other devices, and scatters the gradients' sum back into parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from slpo_jax.errors import UserError
from slpo_jax.runtime import hosts
from slpo_jax.settings import Checked, setting

DATA = "data"
FSDP = "fsdp"
AXES = (DATA, FSDP)
ROWS = PartitionSpec(AXES)
EVERYWHERE = PartitionSpec()
"""How a batch lies on the mesh, and how a copy on every device does."""


def device_mesh(devices=None, fsdp: int = 1) -> Mesh:
    """Make a mesh over all devices, or the given ones.

    Args:
        fsdp: devices that share a copy of the parameters.
    Raises:
        UserError: it does not divide their number.
    """
    devices = devices or jax.devices()
    if len(devices) % fsdp:
        raise UserError(
            f"config.sharding.fsdp: {fsdp} does not divide the {len(devices)} devices; give one that does"
        )
    shape = (len(devices) // fsdp, fsdp)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Spread the rows of host arrays [B, ...], the same on every process, over the mesh."""
    sharding = NamedSharding(mesh, ROWS)

    def put(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def over_rows(
    function: Callable[..., Any], mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> Callable[..., Any]:
    """Compile the function so that each device has its own rows, of arguments and of results.

    Args:
        specs: of its arguments, `ROWS` or `EVERYWHERE`.
    """
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=False
        )
    )


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Put the tree on every device of the mesh; of several processes each gives the same."""
    sharding = NamedSharding(mesh, EVERYWHERE)
    if hosts.count() == 1:
        return jax.device_put(tree, sharding)

    def put(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                put(jax.random.key_data(x)), impl=jax.random.key_impl(x)
            )
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


@dataclass(frozen=True)
class ShardingConfig(Checked):
    """The section `config.sharding`: how a run's arrays lie on its devices. Results depend on it in rounding alone.

    Attributes:
        fsdp: devices that share one copy of parameters, gradients and optimizer state; 1 gives each its own.
    """

    fsdp: int = setting(1, least=1)


@dataclass(frozen=True)
class Layout:
    """The places of the arrays of a stage's state.

    Attributes:
        mesh: from `device_mesh`; its axis `fsdp` has as many devices as the config says.
    """

    mesh: Mesh

    @property
    def is_sharded(self) -> bool:
        """Whether anything is cut at all."""
        return self.mesh.shape[FSDP] > 1

    def specs(self, params: Any) -> Any:
        """Return a `PartitionSpec` for each parameter.

        The longest axis with equal parts is cut; biases, norms' scales and what has no such axis stay whole.
        """
        return jax.tree_util.tree_map_with_path(self._spec, params)

    def _spec(self, path: Any, param: Any) -> PartitionSpec:
        parts = self.mesh.shape[FSDP]
        # Of the axes with equal parts, the first of the longest ones is cut.
        sizes = [size if size % parts == 0 else 0 for size in param.shape]
        longest = max(sizes, default=0)
        name = jax.tree_util.keystr(path, simple=True)
        is_small = name.endswith(("bias", "scale"))
        if parts == 1 or not longest or is_small:
            return EVERYWHERE
        axes: list[str | None] = [None] * len(sizes)
        axes[sizes.index(longest)] = FSDP
        return PartitionSpec(*axes)

    def state_specs(
        self, optimizer: optax.GradientTransformation, trained: Any, opt_state: Any
    ) -> Any:
        """Return an optimizer state's specs: leaves of a parameter's shape are cut as it is, all others stay whole."""

        def spec(leaf, param, of_param):
            return of_param if leaf.shape == param.shape else EVERYWHERE

        return optax.tree_map_params(
            optimizer,
            spec,
            opt_state,
            trained,
            self.specs(trained),
            transform_non_params=lambda _: EVERYWHERE,
        )

    def shardings(self, specs: Any) -> Any:
        """Put specs on this mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def pin(self, tree: Any, specs: Any) -> Any:
        """Lay a tree out so, inside jit; where nothing is cut, the compiler may as it likes."""
        if not self.is_sharded:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.shardings(specs))


def all_gather_params(params: Any, specs: Any) -> Any:
    """Gather whole parameters from their parts, inside shard_map."""

    def whole(part, spec):
        if FSDP not in spec:
            return part
        return jax.lax.all_gather(part, FSDP, axis=_cut_axis(spec), tiled=True)

    return jax.tree.map(whole, params, specs)


def psum_scatter_grads(grads: Any, specs: Any) -> Any:
    """Sum the gradients of all devices, inside shard_map: each device's whole ones in, its parts of the sum out."""

    def part(grad, spec):
        if FSDP not in spec:
            return psum_all(grad)
        # Sum and part along one axis of the mesh, then sum the parts along the other.
        axis = _cut_axis(spec)
        shard = jax.lax.psum_scatter(grad, FSDP, scatter_dimension=axis, tiled=True)
        return jax.lax.psum(shard, DATA)

    return jax.tree.map(part, grads, specs)


def psum_all(tree: Any) -> Any:
    """Sum over all devices, inside shard_map; one device's tree is left as it is, which a collective would copy."""
    if jax.lax.axis_size(AXES) == 1:
        return tree
    return jax.lax.psum(tree, AXES)


def _cut_axis(spec: PartitionSpec) -> int:
    return tuple(spec).index(FSDP)
