"""Fully sharded data parallelism: how parameters, and all that a step makes of them, are cut into parts.

Between steps a device holds its part of every parameter and of the optimizer's state. A step gathers the parameters
before the rollout, so that no loop waits for other devices, and scatters the gradients' sum back into parts.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slpo_jax.runtime.mesh import AXES, DATA, EVERYWHERE, FSDP
from slpo_jax.settings import Checked, setting


@dataclass(frozen=True)
class ShardingConfig(Checked):
    """The section `config.sharding`: how a run's arrays lie on its devices. Results depend on it in rounding alone.

    Attributes:
        fsdp: devices that share one copy of parameters, gradients and optimizer state; 1 gives each its own.
    """

    fsdp: int = setting(1, least=1)


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a stage's state are.

    Attributes:
        mesh: from `device_mesh`; its axis `fsdp` has as many devices as the config says.
    """

    mesh: Mesh

    @property
    def is_sharded(self) -> bool:
        """Whether anything is cut at all."""
        return self.mesh.shape[FSDP] > 1

    def specs(self, params: Any) -> Any:
        """A `PartitionSpec` for each parameter.

        The longest axis with equal parts is cut; biases, norms' scales and what has no such axis stay whole.
        """
        return jax.tree_util.tree_map_with_path(self._spec, params)

    def _spec(self, path: Any, param: Any) -> PartitionSpec:
        parts = self.mesh.shape[FSDP]
        sizes = [size if size % parts == 0 else 0 for size in param.shape]
        longest = max(sizes, default=0)
        if parts == 1 or not longest or jax.tree_util.keystr(path, simple=True).endswith(("bias", "scale")):
            return EVERYWHERE
        return PartitionSpec(*(FSDP if at == sizes.index(longest) else None for at in range(len(sizes))))

    def state_specs(self, optimizer: optax.GradientTransformation, trained: Any, opt_state: Any) -> Any:
        """The same for an optimizer's state: what has a parameter's shape is cut as that is, all else stays whole."""

        def spec(leaf, param, of_param):
            return of_param if leaf.shape == param.shape else EVERYWHERE

        return optax.tree_map_params(
            optimizer, spec, opt_state, trained, self.specs(trained), transform_non_params=lambda _: EVERYWHERE
        )

    def shardings(self, specs: Any) -> Any:
        """Specs with this mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def pinned(self, tree: Any, specs: Any) -> Any:
        """Inside jit: the tree laid out so; as the compiler likes where nothing is cut."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(specs)) if self.is_sharded else tree


def gathered(params: Any, specs: Any) -> Any:
    """Inside shard_map: the whole of each parameter, from the parts."""

    def whole(part, spec):
        return jax.lax.all_gather(part, FSDP, axis=_cut(spec), tiled=True) if FSDP in spec else part

    return jax.tree.map(whole, params, specs)


def summed(grads: Any, specs: Any) -> Any:
    """Inside shard_map: the parts of the gradients' sum over all devices, from each device's own whole ones."""

    def part(grad, spec):
        if FSDP not in spec:
            return total(grad)
        own = jax.lax.psum_scatter(grad, FSDP, scatter_dimension=_cut(spec), tiled=True)
        return jax.lax.psum(own, DATA)

    return jax.tree.map(part, grads, specs)


def total(tree: Any) -> Any:
    """Inside shard_map: sums over all devices; of one device the tree itself, which a collective would copy."""
    return jax.lax.psum(tree, AXES) if jax.lax.axis_size(AXES) > 1 else tree


def _cut(spec: PartitionSpec) -> int:
    return tuple(spec).index(FSDP)
