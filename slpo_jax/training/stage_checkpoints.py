"""Orbax checkpoints of a stage's whole state, so that the same command goes on bit-exactly where it was."""

import concurrent.futures
import dataclasses
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging as absl_logging

from slpo_jax.errors import SaveError, UserError
from slpo_jax.io.artifact import damage, write_checksums
from slpo_jax.io.files import as_json, entries
from slpo_jax.io.orbax import abstract_tree, save_error
from slpo_jax.models import xla_cpu
from slpo_jax.runtime import hosts
from slpo_jax.training.state import TrainState

KEPT = 2  # the newest, and one to go back to
_SLACK = 2_000_000  # bytes of a checkpoint beside its arrays

# Orbax tells of every save; what went wrong comes as an exception or a warning.
logging.getLogger("absl").setLevel(logging.WARNING)


class StageCheckpoints:
    """The checkpoints of one stage, `DIR/STEP/{params,rest,extra}`; the newest are kept.

    Args:
        directory: `WORKDIR/checkpoints/STAGE`.

    Attributes:
        directory: the same, absolute.
    """

    def __init__(self, directory: Path):
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers

        self._kept = checkpoint_managers.AnyPreservationPolicy(
            [checkpoint_managers.LatestN(KEPT)]
        )
        # What was being saved as the program was killed, or the disk filled, takes room.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept, cleanup_tmp_directories=True
        )
        self.directory = directory.absolute()
        self._take_back()
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._checksummer = concurrent.futures.ThreadPoolExecutor(1)
        self._checksumming: concurrent.futures.Future[None] | None = None
        self._failed = False  # to write one

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, None without one."""
        return self._manager.latest_step()

    def keep(self, best: int) -> None:
        """Keep the checkpoint of this step too, instead of the one of which that was said before.

        Orbax's `BestN` reads metrics of every checkpoint, and fails on a damaged one, before it can be gone back from.
        """
        from orbax.checkpoint.checkpoint_managers import CustomSteps, LatestN

        self._kept.policies = [LatestN(KEPT), CustomSteps([best])]

    def save(
        self,
        state: TrainState,
        extra: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> None:
        """Save in the background; a checkpoint appears whole or not at all.

        Args:
            extra: JSON-able facts that the stage needs to go on.
            replace: the checkpoint of the same step, if there is one, which is otherwise kept.
        """
        import orbax.checkpoint as ocp

        step = int(state.step)
        self.wait()
        if step == self.latest_step:
            if not replace:
                return
            if hosts.is_first():
                (self.directory / str(step)).rename(self._replaced_path(step))
            hosts.barrier("replaced")
            self._manager.reload()
        self._check_room(state)
        # What is written in the background is as it is now: the caller may change its dicts at the next step.
        params = state.params
        rest = _rest(state)
        facts = as_json(extra or {})
        if xla_cpu.on_cpu():
            # There the copy being written may be the buffer itself, which the next step gives away.
            params, rest = jax.tree.map(jnp.copy, (params, rest))
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                rest=ocp.args.StandardSave(rest),
                extra=ocp.args.JsonSave(facts),
            ),
        )
        self._checksumming = self._checksummer.submit(self._checksum, step)

    def _check_room(self, state: TrainState) -> None:
        """Orbax on a full disk fails in several threads, with pages about each."""
        arrays = jax.tree.leaves((state.params, state.opt_state))
        needed = sum(x.nbytes for x in arrays) + _SLACK
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise self._save_error(
                f"it takes {needed / 1e6:,.0f} MB, the disk has {free / 1e6:,.1f}"
            )

    def _save_error(self, error: Exception | str) -> SaveError:
        return save_error(
            self.directory,
            error,
            "make room, and the same command goes on from the one before",
        )

    def _replaced_path(self, step: int) -> Path:
        """Where a checkpoint waits until the one that replaces it is whole."""
        return self.directory / f"{step}.replaced"

    def _take_back(self) -> None:
        """What was to be replaced when the program was killed is the step's checkpoint again, or no longer needed."""
        if hosts.is_first():
            for path in entries(self.directory):
                if path.suffix != ".replaced":
                    continue
                whole = path.with_suffix("")
                if whole.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(whole)
        hosts.barrier("taken back")

    def _checksum(self, step: int) -> None:
        self._manager.wait_until_finished()
        if hosts.is_first():
            # Orbax's own `restore` then reads the parameters on any devices, and not only on as many as these.
            checkpoint = self.directory / str(step)
            sharding = checkpoint / "params" / "_sharding"
            sharding.unlink(missing_ok=True)
            write_checksums(checkpoint)
            shutil.rmtree(self._replaced_path(step), ignore_errors=True)

    def wait(self) -> None:
        """Until what is being saved is on the disk.

        Raises:
            SaveError: it could not be written; the checkpoints before it are whole.
        """
        checksumming = self._checksumming
        self._checksumming = None
        try:
            if checksumming is not None:
                checksumming.result()
        except (OSError, ValueError) as error:
            self._failed = True
            raise self._save_error(error) from None

    def restore(
        self, like: TrainState, newest: bool = False
    ) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint that is whole; those after it, which are damaged, are deleted.

        Args:
            like: has its shapes, types and sharding.
            newest: none but the newest will do.
        Raises:
            UserError: there is no such checkpoint.
            OSError: one is there, and can't be read; none is deleted.
        """
        problems: dict[int, str] = {}
        steps = sorted(self._manager.all_steps(), reverse=True)
        if newest:
            steps = steps[:1]
        for step in steps:
            problem = damage(self.directory / str(step))
            if not problem:
                try:
                    found = self._restore(step, like)
                except Exception as error:
                    # Orbax has none of its own for a file that is damaged.
                    text = str(error)
                    gone = isinstance(error, FileNotFoundError | NotADirectoryError)
                    unreadable = isinstance(error, OSError) and not gone
                    if unreadable or "RESOURCE_EXHAUSTED" in text:
                        raise
                    problem = " ".join(text.split())[:200]
                else:
                    self._give_up(problems, step)
                    return found
            problems[step] = problem
        reason = next(iter(problems.values()), "there is none")
        raise UserError(
            f"{self.directory}: holds no whole checkpoint ({reason}); delete it to run the stage anew"
        )

    def newest_extra(self) -> dict[str, Any]:
        """Read what was saved beside the newest state, which itself is not read.

        Raises:
            UserError: that checkpoint is damaged.
        """
        import orbax.checkpoint as ocp

        if problem := damage(self.directory / str(self.latest_step)):
            raise UserError(
                f"{self.directory}: holds no whole checkpoint ({problem}); delete it to run the stage anew"
            )
        asked = ocp.args.Composite(extra=ocp.args.JsonRestore())
        found = self._manager.restore(self.latest_step, args=asked)
        return found["extra"]

    def _give_up(self, problems: dict[int, str], step: int) -> None:
        for late, problem in problems.items():
            absl_logging.warning(
                "%s: the checkpoint of step %d is damaged (%s)",
                self.directory,
                late,
                problem,
            )
            self._manager.delete(late)
        if problems:
            absl_logging.warning(
                "%s: going on from the checkpoint of step %d", self.directory, step
            )

    def _restore(
        self, step: int, like: TrainState
    ) -> tuple[TrainState, dict[str, Any]]:
        import orbax.checkpoint as ocp

        found = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract_tree(like.params)),
                rest=ocp.args.StandardRestore(abstract_tree(_rest(like))),
                extra=ocp.args.JsonRestore(),
            ),
        )
        rest = found["rest"]
        implementation = jax.random.key_impl(like.key)
        key = jax.random.wrap_key_data(rest["key"], impl=implementation)
        state = dataclasses.replace(
            like,
            step=rest["step"],
            params=found["params"],
            opt_state=rest["opt_state"],
            key=key,
            skipped=rest["skipped"],
        )
        return state, found["extra"]

    def close(self) -> None:
        """Wait for saves under way."""
        self.wait()
        self._checksummer.shutdown()
        if not self._failed:  # else Orbax would wait for files that never come
            self._manager.close()


def _rest(state: TrainState) -> dict[str, Any]:
    key = jax.random.key_data(state.key)
    return {
        "step": state.step,
        "opt_state": state.opt_state,
        "key": key,
        "skipped": state.skipped,
    }
