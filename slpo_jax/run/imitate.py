"""Imitation of written solutions, in phases; those that end when they are learned end alike in a run that goes on."""

import dataclasses
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.mesh import shard_rows
from slpo_jax.models import parts
from slpo_jax.run.experiment import Setup
from slpo_jax.run.sources import TRAIN
from slpo_jax.run.stage import Stage, close_stage, note_finished, open_stage
from slpo_jax.run.validate import check_answers
from slpo_jax.stages import CONTROL, IMITATE, NO_THOUGHT, UNFINISHED
from slpo_jax.training.checkpoint import StageCheckpoints
from slpo_jax.training.loop import Learning
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from slpo_jax.training.recipes import RECIPES, ImitateSettings, Phase, Recipe, RecipeSettings, recipe_of
from slpo_jax.training.state import TrainState, init_optimizer, init_state, make_train_step

_ENDS, _ACCURACIES = "ends", "accuracies"  # in what is saved beside a state


def imitated(setup: Setup, recipe: Recipe, plan: list[Phase]) -> EncodedProblems:
    """The training problems that are imitated.

    Raises:
        UserError: there are none, an answer does not fit in config.max_answer_tokens, none has steps where steps are
            written, or one needs more positions than the model has, which that key does not bound.
    """
    problems, longest = setup.train, setup.config.imitate.max_tokens
    kept = recipe.usable(problems, longest)
    if not kept:
        raise UserError(
            f"config.imitate.max_tokens: {longest} leaves no problem of config.data.train; raise it or give other data"
        )
    check_answers(TRAIN, problems, kept, "max_answer_tokens", setup.config.max_answer_tokens)
    chosen, most = problems.subset(kept), setup.reasoner.config.n_positions
    fewest = recipe.fewest_steps(plan)
    if max(map(len, chosen.steps)) < fewest:
        why = "" if fewest == 1 else ", of which CODI's teacher leaves out the last (config.imitate.distil.last_step)"
        raise UserError(
            f"config.data.train: none of its {len(chosen)} problems has {fewest} step(s) to imitate{why}; give "
            "solutions in a field of docs/data.md, or for answers alone 0 for config.imitate.cot_steps and stage_steps"
        )
    for phase in plan:
        needed = [positions for positions, *_ in recipe.needs(chosen, phase)]
        if max(needed) > most:
            raise UserError(
                f"config.model.n_positions: {most} is less than the {max(needed)} positions of problem "
                f"{kept[int(np.argmax(needed))]} in imitation's phase {phase.name}; raise it, lower "
                "config.imitate.max_tokens or drop the problem"
            )
    return chosen


def _settings(own: ImitateSettings, name: str) -> ImitateSettings:
    """Those of one of the stage's checkpoints."""
    if name != NO_THOUGHT:
        return own
    bare = dataclasses.replace(own, recipe="curriculum", c_thought=0, final_latents="published")
    return dataclasses.replace(bare, stage_until=0.0, mix=0.0)


def planned(setup: Setup, name: str = IMITATE) -> tuple[Recipe, list[Phase], list[OptimizerConfig]]:
    """How the reasoner imitates, the stage's phases, and the optimizer of each.

    Raises:
        UserError: there are no steps, a phase has fewer than its warm-up, or the control can't go on with what is
            trained.
    """
    config, recipe = _settings(setup.config.imitate, name), setup.recipe
    for key in ("control", "no_thought"):
        if recipe.ends_apart and getattr(config, key):
            what = "lora.rank trains adapters" if config.lora.rank else f"{recipe.name} trains parts of its own"
            raise UserError(
                f"config.imitate.{key}: True, which trains the reasoner's parameters alone, but {what}; set it to "
                "False, or leave that out"
            )
    if name == NO_THOUGHT:
        recipe = recipe_of(config, config.recipe)
    plan = recipe.phases(setup.train, setup.config.max_latents)
    if not plan:
        raise UserError("config.imitate.final_steps: the stage has no steps; give some or take it out of config.stages")
    check_ends(config, recipe, plan)
    # A constant schedule that is not begun anew goes through all phases.
    whole = plan[-1].end if config.optimizer.schedule == "constant" and not config.reset_optimizer else None
    steps = [whole or (config.reset_optimizer and phase.rise) or phase.end - phase.start for phase in plan]
    own = [{} if phase.learning_rate is None else {"learning_rate": phase.learning_rate} for phase in plan]
    return recipe, plan, [setup.optimizer_config(IMITATE, n, **rate) for n, rate in zip(steps, own, strict=True)]


def check(stage: Stage) -> None:
    """Fail before the first stage on problems or settings that could not be imitated."""
    if not stage.folder.is_finished:
        recipe, plan, _ = planned(stage.run, stage.name)
        imitated(stage.run, recipe, plan)


def train(stage: Stage) -> None:
    """Run the phases of the recipe.

    For the control the last goes on for as many steps as the stage rl has; without thoughts they end where they did
    with them.
    """
    run, name, imitation = stage.run, stage.name, stage.run.stage(IMITATE)
    recipe, plan, optimizer_configs = planned(run, name)
    more = run.config.rl.steps if name == CONTROL else 0
    problems, total = imitated(run, recipe, plan), len(run.train)
    if len(problems) < total:
        reason = "longer than config.imitate.max_tokens or, for CODI, with a negative answer"
        logging.warning("imitate: left out %d of %d problems: %s", total - len(problems), total, reason)
    bare = sum(not steps for steps in problems.steps)
    if bare and recipe.fewest_steps(plan):
        logging.warning("imitate: %d of %d problems have no steps: just answers are written", bare, len(problems))
    config, seed = _settings(stage.settings, name), run.config.seed
    optimizers = [make_optimizer(each) for each in optimizer_configs]
    params = run.initial_params()
    trained, own = () if recipe.alone else run.trained_by(IMITATE, params), {}
    if recipe.init:
        own = recipe.init(jax.random.fold_in(run.key, 1 << 29), run.policy, params)
        if taken := (own.keys() & params.keys()) - {*parts.CARRIED}:
            raise UserError(f"config.imitate.recipe: {recipe.name} makes the part {min(taken)} anew; rename its own")
        params, trained = params | own, (*trained, *own)
    folder = run.stage(UNFINISHED).folder if recipe.ends_apart else stage.folder
    now = trained
    if any(phase.trains for phase in plan):
        step = max(folder.steps, default=0)  # of the newest checkpoint: of the phase that it is in, or at the end of
        now = next((phase for phase in plan if step <= phase.end), plan[-1]).trains or trained
    state = init_state(params, now, optimizers[0], run.key, run.layout)
    del params  # the state has its own
    known: dict[str, Any] = {}
    if name in (CONTROL, NO_THOUGHT):
        before = StageCheckpoints(imitation.folder.path)
        imitated_state, known = before.restore(state, newest=True)
        before.close()
        state = imitated_state if name == CONTROL else state
    stage_run, state, extra = open_stage(stage, state, plan[-1].end + more, folder)
    ends, programs = StageEnds(name, config, plan, more, known or extra), dict[Any, Any]()
    for number, (optimizer, optimizer_config) in enumerate(zip(optimizers, optimizer_configs, strict=True)):
        phase = ends.phases()[number]
        stage_run.end_at(ends.phases()[-1].end)
        if int(state.step) >= phase.end:
            continue
        policy = run.policy.having(max_latents=phase.latent_slots, dropout_rate=config.dropout)
        now = phase.trains or trained
        # Where the rate is constant, all phases of a layout are one program.
        lasts = None if config.optimizer.schedule == "constant" else optimizer_config.total_steps
        program = phase.latent_slots, now, dataclasses.replace(optimizer_config, total_steps=lasts)
        if program not in programs:
            how = (optimizer, now, run.layout, IMITATE, config.micro_batches)
            schedule = make_schedule(optimizer_config)
            programs[program] = make_train_step(recipe.loss_of(policy), *how, schedule=schedule)
        step_fn = programs[program]
        slots = recipe.slots(problems, phase, config.suffix_slots)

        def batch(step, phase=phase, slots=slots):
            made = recipe.batch(problems, phase, step, seed, config.batch_size, run.prompt_slots, slots)
            return shard_rows(made, run.mesh)

        if int(state.step) == phase.start and phase.copies:
            begun = {part: jax.tree.map(jnp.copy, state.params[other]) for part, other in phase.copies}
            state = dataclasses.replace(state, params=state.params | begun)
        ends.begin(phase, int(state.step))
        for start, end in phase.stretches:
            if int(state.step) == start and (config.reset_optimizer or phase.trains):
                fresh = init_optimizer(optimizer, {name: state.params[name] for name in now}, run.layout)
                state = dataclasses.replace(state, opt_state=fresh)
            state = stage_run.advance(state, step_fn, batch, end, ends.saved, ends.learning)
        ends.finish(int(state.step))
    if not recipe.ends_apart:
        close_stage(stage, stage_run, state, ends.saved())
        return
    stage_run.finish(state, ends.saved())
    _save_finished(imitation, recipe, state, own.keys() - {*recipe.keeps})


def _save_finished(stage: Stage, recipe: Recipe, state: TrainState, dropped: Set[str]) -> None:
    """The end of a recipe with parts of its own: parameters as every other stage leaves them."""

    def finish(params):
        return {name: part for name, part in recipe.finish(params).items() if name not in dropped}

    checkpoints = StageCheckpoints(stage.folder.path)
    checkpoints.save(dataclasses.replace(state, params=jax.jit(finish)(state.params), opt_state=()))
    checkpoints.close()
    note_finished(stage, int(state.step))


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
        learned, steps = learning.end is not None or learning.is_learned, step - self._phase.start
        how = f"learned after {steps} steps" if learned else f"not learned in its {steps} steps"
        logging.warning(
            "%s: %s %s (accuracy %.3f, config.imitate.stage_until is %g)",
            self._stage, self._phase.name.replace("_", " "), how, learning.accuracy, learning.until,
        )  # fmt: skip
