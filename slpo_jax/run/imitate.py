"""Imitation of written solutions, in phases; those that end when they are learned end alike in a run that goes on."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.models import parts
from slpo_jax.policy.noise import Stream
from slpo_jax.run.experiment import Stage
from slpo_jax.run.run_checks import check_answers
from slpo_jax.run.setup import Setup
from slpo_jax.run.sources import DEMOS, TRAIN
from slpo_jax.run.stage import close_stage, note_finished, open_stage
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.stages import CONTROL, IMITATE, NO_THOUGHT, UNFINISHED
from slpo_jax.training.loop import Learning, StageRun, StepFn
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from slpo_jax.training.recipes import RECIPES, ImitateSettings, Phase, Recipe, RecipeSettings, recipe_of
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import TrainState, init_optimizer, init_state, make_train_step

_ENDS, _ACCURACIES = "ends", "accuracies"  # in what is saved beside a state


def imitated(setup: Setup, recipe: Recipe, plan: list[Phase]) -> EncodedProblems:
    """The training problems that are imitated.

    Raises:
        UserError: there are none, an answer does not fit in config.max_answer_tokens, none has steps where steps are
            written, or one needs more positions than the model has, which that key does not bound.
    """
    problems, longest = setup.demos, setup.config.imitate.max_tokens
    key = DEMOS if setup.config.data.demos else TRAIN
    answered = {place for place, problem in enumerate(problems.problems) if problem.answer}
    if not answered:
        raise UserError(
            f"config.stages: imitate, but none of the {len(problems)} problems of {key} has an answer to "
            "imitate; take it out, or give answers, or other problems to imitate as config.data.demos"
        )
    kept = [place for place in recipe.usable(problems, longest) if place in answered]
    if not kept:
        raise UserError(
            f"config.imitate.max_tokens: {longest} leaves no problem of {key}; raise it or give other data"
        )
    check_answers(key, problems, kept, "max_answer_tokens", setup.config.max_answer_tokens)
    chosen, most = problems.subset(kept), setup.reasoner.config.n_positions
    fewest = recipe.fewest_steps(plan)
    if max(map(len, chosen.steps)) < fewest:
        why = "" if fewest == 1 else ", of which CODI's teacher leaves out the last (config.imitate.distil.last_step)"
        raise UserError(
            f"{key}: none of its {len(chosen)} problems has {fewest} step(s) to imitate{why}; give "
            "solutions in a field of docs/data.md, other problems to imitate as config.data.demos, or for answers "
            "alone 0 for config.imitate.cot_steps and stage_steps"
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
    plan = recipe.phases(setup.demos, setup.config.max_latents)
    if not plan:
        raise UserError("config.imitate.final_steps: the stage has no steps; give some or take it out of config.stages")
    check_ends(config, recipe, plan)
    # A constant schedule that is not begun anew goes through all phases.
    whole = plan[-1].end if config.optimizer.schedule == "constant" and not config.reset_optimizer else None
    steps = [whole or (config.reset_optimizer and phase.rise) or phase.end - phase.start for phase in plan]
    own = [{} if phase.learning_rate is None else {"learning_rate": phase.learning_rate} for phase in plan]
    return recipe, plan, [setup.optimizer_config(IMITATE, n, **rate) for n, rate in zip(steps, own, strict=True)]


def _plan(stage: Stage) -> tuple[Recipe, list[Phase], list[OptimizerConfig], EncodedProblems]:
    """Return what is `planned` and `imitated`: what was worked out when the stage was checked, or begins as it does."""
    plans, name = stage.run.plans, NO_THOUGHT if stage.name == NO_THOUGHT else IMITATE
    if name not in plans:
        made = planned(stage.run, name)
        plans[name] = *made, imitated(stage.run, *made[:2])
    return plans[name]


def check(stage: Stage) -> None:
    """Fail before the first stage on problems or settings that could not be imitated."""
    if not stage.folder.is_finished:
        _plan(stage)


def train(stage: Stage) -> None:
    """Run the phases of the recipe.

    For the control the last goes on for as many steps as the stage rl has; without thoughts they end where they did
    with them.
    """
    run, config = stage.run, _settings(stage.settings, stage.name)
    recipe, plan, optimizer_configs, problems = _plan(stage)
    more = run.config.rl.steps if stage.name == CONTROL else 0
    if stage.name == IMITATE:  # the others imitate the same
        _say(run, recipe, plan, problems)
    stage_run, state, trained, saved = _begun(stage, recipe, plan, optimizer_configs[0], more)
    step_of = functools.cache(functools.partial(_make_step, run, recipe, config))
    known = {name: saved[name] for name in (_ENDS, _ACCURACIES) if name in saved}
    phase_run = _PhaseRun(run, recipe, config, problems, trained, stage_run, step_of, **known)
    with stage_run:
        for number, settings in enumerate(optimizer_configs):
            phases = as_ended(plan, phase_run.ends, more)
            stage_run.end_at(phases[-1].end)
            if int(state.step) < phases[number].end:
                state = phase_run.take(phases[number], settings, state, learns=not more)
        if not recipe.ends_apart:
            close_stage(stage, stage_run, state, to_save(phase_run.ends))
            return
        stage_run.finish(state, to_save(phase_run.ends))
    own = {*trained} - {part.name for part in run.parts}
    _save_finished(run.stage(IMITATE), recipe, state, own - {*recipe.keeps})


@dataclasses.dataclass
class _PhaseRun:
    """Takes the steps of one phase after another.

    Attributes:
        trained: the parts that are changed by a phase that names none.
        stage_run: of the whole stage.
        step_of: (latent slots, parts, optimizer) -> step, one program each.
        ends: after which step those phases ended that ended before their time, by name.
        accuracies: `Learning.accuracies` of the checkpoint that is gone on from.
    """

    run: Setup
    recipe: Recipe
    config: ImitateSettings
    problems: EncodedProblems
    trained: tuple[str, ...]
    stage_run: StageRun
    step_of: Callable[..., StepFn]
    ends: dict[str, int] = dataclasses.field(default_factory=dict)
    accuracies: list[float] = dataclasses.field(default_factory=list)

    def take(self, phase: Phase, settings: OptimizerConfig, state: TrainState, learns: bool) -> TrainState:
        """Take the steps of a phase that the state has not taken yet.

        Args:
            learns: the phase may end when it is learned.
        """
        learning = self._learning(phase, int(state.step)) if learns and self.config.stage_until else None
        if int(state.step) == phase.start and phase.copies:
            copies = {part: jax.tree.map(jnp.copy, state.params[other]) for part, other in phase.copies}
            state = dataclasses.replace(state, params=state.params | copies)
        if settings.schedule == "constant":  # then all phases of a layout are one program
            settings = dataclasses.replace(settings, total_steps=None)
        now = phase.trains or self.trained
        saved = functools.partial(to_save, self.ends, phase, learning)
        batch = functools.partial(self._batch, phase, self.recipe.slots(self.problems, phase, self.config.suffix_slots))
        for start, end in phase.stretches:
            if int(state.step) == start and (self.config.reset_optimizer or phase.trains):
                changing = {part: state.params[part] for part in now}
                fresh = init_optimizer(make_optimizer(settings), changing, self.run.layout)
                state = dataclasses.replace(state, opt_state=fresh)
            step_fn = self.step_of(phase.latent_slots, now, settings)
            state = self.stage_run.advance(state, step_fn, batch, end, saved, learning)
        self.ends = saved().get(_ENDS, {})
        if learning and learning.accuracies:
            _say_learned(self.stage_run.name, phase, learning, int(state.step) - phase.start)
        return state

    def _learning(self, phase: Phase, step: int) -> Learning:
        """What ends a phase, going on from what was known of it at a step."""
        known = self.accuracies if phase.start < step else []
        return Learning(self.config.stage_until, phase.start + self.config.stage_least, known)

    def _batch(self, phase: Phase, slots: Any, step: int) -> Any:
        """The sharded batch of a phase's step."""
        how = self.run.config.seed, self.config.batch_size, self.run.prompt_slots, slots
        return shard_rows(self.recipe.batch(self.problems, phase, step, *how), self.run.mesh)


def _make_step(
    run: Setup, recipe: Recipe, config: ImitateSettings, latents: int, now: tuple[str, ...], settings: OptimizerConfig
) -> StepFn:
    """The step of phases that have so many latent slots and change these parts."""
    loss = recipe.loss_of(run.policy.having(max_latents=latents, dropout_rate=config.dropout))
    how = (make_optimizer(settings), now, run.layout, IMITATE, config.micro_batches)
    return make_train_step(loss, *how, schedule=make_schedule(settings))


def _begun(
    stage: Stage, recipe: Recipe, plan: list[Phase], settings: OptimizerConfig, more: int
) -> tuple[StageRun, TrainState, tuple[str, ...], dict[str, Any]]:
    """The stage's run and state, the parts that it trains, and what is saved beside the state that it goes on from."""
    run, params, own = stage.run, stage.run.initial_params(), {}
    if recipe.init:
        own = recipe.init(jax.random.fold_in(run.key, Stream.RECIPE_PARTS), run.policy, params)
        if taken := (own.keys() & params.keys()) - {*parts.CARRIED}:
            raise UserError(f"config.imitate.recipe: {recipe.name} makes the part {min(taken)} anew; rename its own")
    trained = (*(() if recipe.alone else run.trained_by(IMITATE, params)), *own)
    folder = run.stage(UNFINISHED).folder if recipe.ends_apart else stage.folder
    step = max(folder.steps, default=0)  # of the newest checkpoint: of the phase that it is in, or at the end of
    now = next((phase for phase in plan if step <= phase.end), plan[-1]).trains or trained
    state = init_state(params | own, now, make_optimizer(settings), run.key, run.layout)
    del params, own  # the state has its own
    known: dict[str, Any] = {}
    if stage.name in (CONTROL, NO_THOUGHT):
        before = StageCheckpoints(run.stage(IMITATE).folder.path)
        imitated_state, known = before.restore(state, newest=True)
        before.close()
        state = imitated_state if stage.name == CONTROL else state
    stage_run, state, extra = open_stage(stage, state, plan[-1].end + more, folder)
    return stage_run, state, trained, known or extra


def _save_finished(stage: Stage, recipe: Recipe, state: TrainState, dropped: Set[str]) -> None:
    """The end of a recipe with parts of its own: parameters as every other stage leaves them."""

    def finish(params):
        return {name: part for name, part in recipe.finish(params).items() if name not in dropped}

    checkpoints = StageCheckpoints(stage.folder.path)
    checkpoints.save(dataclasses.replace(state, params=jax.jit(finish)(state.params), opt_state=()))
    checkpoints.close()
    note_finished(stage, int(state.step))


def _say(run: Setup, recipe: Recipe, plan: list[Phase], problems: EncodedProblems) -> None:
    """Lines on problems that are not imitated, or have no steps."""
    if why := left_out(run.demos, len(problems), run.config.imitate.max_tokens, recipe.name):
        logging.warning("imitate: left out %d of %d problems: %s", len(run.demos) - len(problems), len(run.demos), why)
    bare = sum(not steps for steps in problems.steps)
    if bare and recipe.fewest_steps(plan):
        logging.warning("imitate: %d of %d problems have no steps: just answers are written", bare, len(problems))


def left_out(problems: EncodedProblems, kept: int, most: int, recipe: str) -> str:
    """Why some problems are not imitated, each cause with its number; "" where all are.

    Args:
        kept: how many are.
        most: `config.imitate.max_tokens`.
    """
    answered = {place for place, problem in enumerate(problems.problems) if problem.answer}
    short = answered.intersection(Recipe.usable(problems, most))  # the usual one, which goes by lengths alone
    causes = {
        "without an answer": len(problems) - len(answered),
        f"longer than config.imitate.max_tokens={most}": len(answered) - len(short),
        f"that {recipe} leaves out, as CODI does negative answers": len(short) - kept,
    }
    return ", ".join(f"{count} {cause}" for cause, count in causes.items() if count)


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


def as_ended(plan: list[Phase], ends: Mapping[str, int], more: int = 0) -> list[Phase]:
    """The phases as far as is known by now: what one does not need, the next may take.

    Args:
        plan: the longest that they can be.
        ends: after which step those ended that ended before their time, by name.
        more: steps that the last one goes on for, as a control.
    """
    found = list[Phase]()
    for phase in plan:
        start = found[-1].end if found else 0
        found.append(dataclasses.replace(phase, start=start, end=ends.get(phase.name, phase.end)))
    return [*found[:-1], dataclasses.replace(found[-1], end=found[-1].end + more)]


def to_save(ends: dict[str, int], phase: Phase | None = None, learning: Learning | None = None) -> dict[str, Any]:
    """What is saved beside a state, for a run that goes on from there."""
    if phase is None or learning is None:
        return {_ENDS: ends} if ends else {}
    early = {} if learning.end is None else {phase.name: learning.end}
    return {_ENDS: ends | early, _ACCURACIES: learning.accuracies}


def _say_learned(stage: str, phase: Phase, learning: Learning, steps: int) -> None:
    """Whether a phase was learned in its steps."""
    learned = learning.end is not None or learning.is_learned
    how = f"learned after {steps} steps" if learned else f"not learned in its {steps} steps"
    if hosts.is_first():
        logging.warning(
            "%s: %s %s (accuracy %.3f, config.imitate.stage_until is %g)",
            stage, phase.name.replace("_", " "), how, learning.accuracy, learning.until,
        )  # fmt: skip
