"""Where the phases of imitation end, if they end when they are learned; a run that goes on ends them alike."""

import dataclasses
from typing import Any

from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.training.loop import Learning
from slpo_jax.training.recipes import RECIPES, ImitateSettings, Phase, Recipe, RecipeSettings

_ENDS, _ACCURACIES = "ends", "accuracies"  # in what is saved beside a state


def check_ends(config: ImitateSettings, recipe: Recipe, plan: list[Phase]) -> None:
    """Refuse what makes no sense where stages end when they are learned, or are mixed.

    Raises:
        UserError: the key, and the remedy.
    """
    if config.mix and not RECIPES.get(recipe.name, RecipeSettings).has_stages:
        raise UserError(
            f"config.imitate.mix: {config.mix}, but {recipe.name} has no earlier stages to mix; set it to 0"
        )
    if config.stage_until and any(phase.rise or phase.trains for phase in plan):
        raise UserError(
            f"config.imitate.stage_until: {config.stage_until}, but {recipe.name} says itself when its phases end; set "
            "it to 0"
        )
    if config.stage_until and config.optimizer.schedule != "constant" and not config.reset_optimizer:
        raise UserError(
            f"config.imitate.optimizer.schedule: {config.optimizer.schedule} goes by the steps of all stages, which "
            "nobody knows with config.imitate.stage_until; set it to constant, or config.imitate.reset_optimizer=True"
        )


class StageEnds:
    """The phases, one after the other, some of which end before their time.

    Args:
        stage: name of what is trained.
        config: of the stage.
        plan: the phases as planned, which are the longest that they can be.
        more: steps that the last phase goes on for, as a control; then none ends before its time.
        saved: beside the checkpoint that is gone on from.
    """

    def __init__(self, stage: str, config: ImitateSettings, plan: list[Phase], more: int, saved: dict[str, Any]):
        self._stage, self._config, self._plan, self._more = stage, config, plan, more
        self._ends: dict[str, int] = dict(saved.get(_ENDS, {}))
        self._accuracies: list[float] = saved.get(_ACCURACIES, [])
        self._phase = plan[0]
        self.learning: Learning | None = None

    def phases(self) -> list[Phase]:
        """All of them, as far as is known by now: what one does not need, the next may take."""
        found = list[Phase]()
        for phase in self._plan:
            start, end = found[-1].end if found else 0, self._ends.get(phase.name, phase.end)
            found.append(dataclasses.replace(phase, start=start, end=end))
        return [*found[:-1], dataclasses.replace(found[-1], end=found[-1].end + self._more)]

    def begin(self, phase: Phase, step: int) -> None:
        """A phase is begun, or gone on with at a step."""
        self._phase, self.learning = phase, None
        if self._config.stage_until and not self._more:
            accuracies = self._accuracies if phase.start < step else []
            self.learning = Learning(self._config.stage_until, phase.start + self._config.stage_least, accuracies)

    def saved(self) -> dict[str, Any]:
        """What is saved beside a state, for a run that goes on from there."""
        if self.learning is None:
            return {_ENDS: self._ends} if self._ends else {}
        early = {} if self.learning.end is None else {self._phase.name: self.learning.end}
        return {_ENDS: self._ends | early, _ACCURACIES: self.learning.accuracies}

    def finish(self, step: int) -> None:
        """The phase has ended after a step; say whether it was learned."""
        learning, self._ends = self.learning, self.saved().get(_ENDS, {})
        self.learning = None
        if learning is None or not learning.accuracies or not hosts.is_first():
            return
        name, steps = self._phase.name.replace("_", " "), step - self._phase.start
        if learning.end is not None or learning.is_learned:
            logging.warning(
                "%s: %s learned after %d steps (accuracy %.3f)", self._stage, name, steps, learning.accuracy
            )
        else:
            logging.warning(
                "%s: %s not learned in its %d steps (accuracy %.3f, config.imitate.stage_until is %g); going on",
                self._stage, name, steps, learning.accuracy, learning.until,
            )  # fmt: skip
