"""Orbax checkpoints of a stage's whole state, so that the same command goes on bit-exactly where it was."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax

from slpo_jax.io.orbax import abstract_tree
from slpo_jax.training.state import TrainState

# Orbax tells of every save; what went wrong comes as an exception or a warning.
logging.getLogger("absl").setLevel(logging.WARNING)


class StageCheckpoints:
    """The checkpoints of one stage, `DIR/STEP/{params,rest,extra}`; the newest is kept.

    Args:
        directory: `WORKDIR/checkpoints/STAGE`.
    """

    def __init__(self, directory: Path):
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, None without one."""
        return self._manager.latest_step()

    def save(self, state: TrainState, extra: dict[str, Any] | None = None, replace: bool = False) -> None:
        """Save in the background; a checkpoint appears whole or not at all.

        Args:
            extra: JSON-able facts that the stage needs to go on.
            replace: the checkpoint of the same step, if there is one, which is otherwise kept.
        """
        import orbax.checkpoint as ocp

        step = int(state.step)
        if step == self.latest_step:
            if not replace:
                return
            self._manager.delete(step)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                rest=ocp.args.StandardSave(_rest(state)),
                extra=ocp.args.JsonSave(extra or {}),
            ),
        )
        if jax.default_backend() == "cpu":
            # There the copy being written may be the buffer itself, which the next step gives away.
            self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, with the shapes, types and sharding of `like`."""
        import orbax.checkpoint as ocp

        found = self._manager.restore(
            self.latest_step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract_tree(like.params)),
                rest=ocp.args.StandardRestore(abstract_tree(_rest(like))),
                extra=ocp.args.JsonRestore(),
            ),
        )
        rest = found["rest"]
        key = jax.random.wrap_key_data(rest["key"], impl=jax.random.key_impl(like.key))
        state = dataclasses.replace(
            like, step=rest["step"], params=found["params"], opt_state=rest["opt_state"], key=key
        )
        return state, found["extra"]

    def close(self) -> None:
        """Wait for saves under way."""
        self._manager.wait_until_finished()
        self._manager.close()


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state, "key": jax.random.key_data(state.key)}
