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
from slpo_jax.io.workdir import StageFolder
from slpo_jax.models import parts
from slpo_jax.policy.noise import Stream
from slpo_jax.run.experiment import Stage
from slpo_jax.run.run_checks import check_answers
from slpo_jax.run.setup import Setup
from slpo_jax.run.sources import DEMOS, TRAIN
from slpo_jax.run.train_stage import close_stage, note_finished, open_stage
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.stages import CONTROL, IMITATE, NO_THOUGHT, UNFINISHED
from slpo_jax.training.loop import Learning, StageLoop, StepFn
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from slpo_jax.training.recipes import ImitateSettings, Phase, Recipe, check_ends, recipe_of
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import TrainState, init_optimizer, init_state, make_train_step

_ENDS, _ACCURACIES = "ends", "accuracies"  # in what is saved beside a state


def imitated(setup: Setup, recipe: Recipe, plan: list[Phase]) -> EncodedProblems:
    """Choose the training problems that are imitated.

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
    places = [place for place in recipe.usable(problems, longest) if place in answered]
    if not places:
        raise UserError(f"config.imitate.max_tokens: {longest} leaves no problem of {key}; raise it or give other data")
    check_answers(key, problems, places, "max_answer_tokens", setup.config.max_answer_tokens)
    chosen, most = problems.subset(places), setup.reasoner.config.n_positions
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
                f"{places[int(np.argmax(needed))]} in imitation's phase {phase.name}; raise it, lower "
                "config.imitate.max_tokens or drop the problem"
            )
    return chosen


def _settings(settings: ImitateSettings, name: str) -> ImitateSettings:
    """Return the settings of one of the stage's checkpoints."""
    if name != NO_THOUGHT:
        return settings
    without_thought = dataclasses.replace(settings, recipe="curriculum", c_thought=0, final_latents="published")
    return dataclasses.replace(without_thought, stage_until=0.0, mix=0.0, gate_weight=0.0)


def planned(setup: Setup, name: str = IMITATE) -> tuple[Recipe, list[Phase], list[OptimizerConfig]]:
    """Plan how the reasoner imitates, the stage's phases, and the optimizer of each.

    Raises:
        UserError: there are no steps, a phase has fewer than its warm-up, or *no latents* can't be trained beside what
            is trained.
    """
    config, recipe = _settings(setup.config.imitate, name), setup.recipe
    if name == NO_THOUGHT:
        recipe = recipe_of(config, config.recipe)
    plan = recipe.phases(setup.demos, setup.config.max_latents)
    if not plan:
        raise UserError("config.imitate.final_steps: the stage has no steps; give some or take it out of config.stages")
    if name == NO_THOUGHT:
        _check_no_thought(setup, recipe, plan)
    check_ends(config, recipe, plan)
    # A constant schedule that is not begun anew goes through all phases.
    all_steps = plan[-1].end if config.optimizer.schedule == "constant" and not config.reset_optimizer else None
    steps = [all_steps or (config.reset_optimizer and phase.rise) or phase.end - phase.start for phase in plan]
    rates = [{} if phase.learning_rate is None else {"learning_rate": phase.learning_rate} for phase in plan]
    return recipe, plan, [setup.optimizer_config(IMITATE, n, **rate) for n, rate in zip(steps, rates, strict=True)]


def _check_no_thought(setup: Setup, recipe: Recipe, plan: list[Phase]) -> None:
    """Refuse *no latents* where it would train other parameters, or in other steps.

    Args:
        recipe: of *no latents*.
        plan: its phases.
    """
    if recipe.ends_apart:
        raise UserError(
            "config.imitate.no_thought: True, which trains the whole reasoner, but lora.rank trains adapters; set it "
            "to False, or leave that out"
        )
    thinking = setup.recipe
    if not thinking.ends_apart:
        return
    steps = thinking.phases(setup.demos, setup.config.max_latents)[-1].end
    if steps != plan[-1].end:
        raise UserError(
            f"config.imitate.no_thought: True, which takes {plan[-1].end} steps in the curriculum's stages, but "
            f"{thinking.name} takes {steps}; set it to False, or train no latents in a run of its own"
        )


def _plan(stage: Stage) -> tuple[Recipe, list[Phase], list[OptimizerConfig], EncodedProblems]:
    """Return what is `planned` and `imitated`: what was worked out when the stage was checked, or begins as it does."""
    plans, name = stage.experiment.plans, NO_THOUGHT if stage.name == NO_THOUGHT else IMITATE
    if name not in plans:
        plan = planned(stage.experiment, name)
        plans[name] = *plan, imitated(stage.experiment, *plan[:2])
    return plans[name]


def check(stage: Stage) -> None:
    """Fail before the first stage on problems or settings that could not be imitated."""
    if stage.folder.is_finished:
        return
    recipe, *_ = _plan(stage)
    imitation = stage.experiment.stage(IMITATE)
    goes_on = stage.name == CONTROL and recipe.ends_apart and imitation.folder.is_finished
    if goes_on and not _folder(imitation, recipe).steps:
        raise UserError(
            f"config.imitate.control: True, but {imitation.folder.path} was finished without it, and the parts of "
            f"{recipe.name}'s own are gone from which further imitation would go on; set it to False, or use another "
            "--workdir"
        )


def train(stage: Stage) -> None:
    """Run the phases of the recipe.

    For the control the last goes on for as many steps as the stage rl has; without thoughts they end where they did
    with them.
    """
    experiment, config = stage.experiment, _settings(stage.settings, stage.name)
    recipe, plan, optimizer_configs, problems = _plan(stage)
    more = experiment.config.rl.steps if stage.name == CONTROL else 0
    if stage.name == IMITATE:  # the others imitate the same
        _say(experiment, recipe, plan, problems)
    if more and config.control_rate:
        changes: dict[str, Any] = {"learning_rate": config.control_rate, "schedule": "constant", "warmup_steps": 0}
        optimizer_configs = [*optimizer_configs[:-1], dataclasses.replace(optimizer_configs[-1], **changes)]
    stage_loop, state, trained, saved = _begun(stage, recipe, plan, optimizer_configs[0], more)
    step_of = functools.cache(functools.partial(_make_step, experiment, recipe, config))
    progress = {name: saved[name] for name in (_ENDS, _ACCURACIES) if name in saved}
    phase_run = _PhaseRun(experiment, recipe, config, problems, trained, stage_loop, step_of, **progress)
    with stage_loop:
        for number, settings in enumerate(optimizer_configs):
            phases = as_ended(plan, phase_run.ends, more)
            stage_loop.end_at(phases[-1].end)
            if int(state.step) < phases[number].end:
                state = phase_run.take(phases[number], settings, state, learns=not more)
        if not recipe.ends_apart:
            close_stage(stage, stage_loop, state, to_save(phase_run.ends))
            return
        stage_loop.finish(state, to_save(phase_run.ends))
    new_parts = {*trained} - {part.name for part in experiment.parts}
    _save_finished(stage, recipe, state, new_parts - {*recipe.keeps}, to_save(phase_run.ends))


@dataclasses.dataclass
class _PhaseRun:
    """A run through the steps of one phase after another.

    Attributes:
        trained: the parts that are changed by a phase that names none.
        stage_loop: of the whole stage.
        step_of: (latent slots, parts, optimizer) -> step, one program each.
        ends: after which step those phases ended that ended before their time, by name.
        accuracies: `Learning.accuracies` of the checkpoint that is gone on from.
    """

    setup: Setup
    recipe: Recipe
    config: ImitateSettings
    problems: EncodedProblems
    trained: tuple[str, ...]
    stage_loop: StageLoop
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
                fresh = init_optimizer(make_optimizer(settings), changing, self.setup.layout)
                state = dataclasses.replace(state, opt_state=fresh)
            step_fn = self.step_of(phase.latent_slots, now, settings)
            state = self.stage_loop.advance(state, step_fn, batch, end, saved, learning)
        self.ends = saved().get(_ENDS, {})
        if learning and learning.accuracies:
            _say_learned(self.stage_loop.name, phase, learning, int(state.step) - phase.start)
        return state

    def _learning(self, phase: Phase, step: int) -> Learning:
        """Return what ends a phase, going on from what was known of it at a step."""
        accuracies = self.accuracies if phase.start < step else []
        return Learning(self.config.stage_until, phase.start + self.config.stage_least, accuracies)

    def _batch(self, phase: Phase, slots: Any, step: int) -> Any:
        """Return the sharded batch of a phase's step."""
        layout = self.setup.config.seed, self.config.batch_size, self.setup.prompt_slots, slots
        return shard_rows(self.recipe.batch(self.problems, phase, step, *layout), self.setup.mesh)


def _make_step(
    setup: Setup, recipe: Recipe, config: ImitateSettings, latents: int, now: tuple[str, ...], settings: OptimizerConfig
) -> StepFn:
    """Make the step of phases that have so many latent slots and change these parts."""
    loss = recipe.loss_of(setup.policy.having(max_latents=latents, dropout_rate=config.dropout))
    arguments = (make_optimizer(settings), now, setup.layout, IMITATE, config.micro_batches)
    return make_train_step(loss, *arguments, schedule=make_schedule(settings))


def _begun(
    stage: Stage, recipe: Recipe, plan: list[Phase], settings: OptimizerConfig, more: int
) -> tuple[StageLoop, TrainState, tuple[str, ...], dict[str, Any]]:
    """Return the stage's run and state, the parts that it trains, and what was saved beside that state."""
    experiment, params, new_parts = stage.experiment, stage.experiment.initial_params(), {}
    if recipe.init:
        new_parts = recipe.init(jax.random.fold_in(experiment.key, Stream.RECIPE_PARTS), experiment.policy, params)
        if clashes := (new_parts.keys() & params.keys()) - {*parts.CARRIED}:
            raise UserError(f"config.imitate.recipe: {recipe.name} makes the part {min(clashes)} anew; rename its own")
    trained = (*(() if recipe.alone else experiment.trained_by(IMITATE, params)), *new_parts)
    folder = _folder(stage, recipe)
    step = max(folder.steps, default=0)  # of the newest checkpoint: of the phase that it is in, or at the end of
    now = plan[-1] if stage.name == CONTROL else next((phase for phase in plan if step <= phase.end), plan[-1])
    changed_parts = now.trains or trained
    state = init_state(params | new_parts, changed_parts, make_optimizer(settings), experiment.key, experiment.layout)
    del params, new_parts  # the state has its own
    saved: dict[str, Any] = {}
    if stage.name in (CONTROL, NO_THOUGHT):
        imitation = experiment.stage(IMITATE)
        before = StageCheckpoints((_folder(imitation, recipe) if stage.name == CONTROL else imitation.folder).path)
        if stage.name == CONTROL:
            state, saved = before.restore(state, newest=True)
        else:  # it takes as many steps, with parameters of its own
            saved = before.newest_extra()
        before.close()
    stage_loop, state, extra = open_stage(stage, state, plan[-1].end + more, folder)
    return stage_loop, state, trained, saved or extra


def _folder(stage: Stage, recipe: Recipe) -> StageFolder:
    """Return the folder of a stage's checkpoints while it runs."""
    return stage.experiment.stage(UNFINISHED[stage.name]).folder if recipe.ends_apart else stage.folder


def _save_finished(stage: Stage, recipe: Recipe, state: TrainState, dropped: Set[str], saved: dict[str, Any]) -> None:
    """End a recipe with parts of its own: save parameters as every other stage leaves them."""

    def finish(params):
        return {name: part for name, part in recipe.finish(params).items() if name not in dropped}

    checkpoints = StageCheckpoints(stage.folder.path)
    checkpoints.save(dataclasses.replace(state, params=jax.jit(finish)(state.params), opt_state=()), saved)
    checkpoints.close()
    note_finished(stage, int(state.step))


def _say(setup: Setup, recipe: Recipe, plan: list[Phase], problems: EncodedProblems) -> None:
    """Warn of problems that are not imitated, or have no steps."""
    if why := left_out(setup.demos, len(problems), setup.config.imitate.max_tokens, recipe.name):
        count = len(setup.demos)
        logging.warning("imitate: left out %d of %d problems: %s", count - len(problems), count, why)
    count = sum(not steps for steps in problems.steps)
    if count and recipe.fewest_steps(plan):
        logging.warning("imitate: %d of %d problems have no steps: just answers are written", count, len(problems))


def left_out(problems: EncodedProblems, count: int, most: int, recipe: str) -> str:
    """Tell why some problems are not imitated, each cause with its number; "" where all are.

    Args:
        count: how many are.
        most: `config.imitate.max_tokens`.
    """
    answered = {place for place, problem in enumerate(problems.problems) if problem.answer}
    short = answered.intersection(Recipe.usable(problems, most))  # the usual one, which goes by lengths alone
    causes = {
        "without an answer": len(problems) - len(answered),
        f"longer than config.imitate.max_tokens={most}": len(answered) - len(short),
        f"that {recipe} leaves out, as CODI does negative answers": len(short) - count,
    }
    return ", ".join(f"{count} {cause}" for cause, count in causes.items() if count)


def as_ended(plan: list[Phase], ends: Mapping[str, int], more: int = 0) -> list[Phase]:
    """Return the phases as far as is known by now: what one does not need, the next may take.

    Args:
        plan: the longest that they can be.
        ends: after which step those ended that ended before their time, by name.
        more: steps that the last one goes on for, as a control.
    """
    phases = list[Phase]()
    for phase in plan:
        start = phases[-1].end if phases else 0
        phases.append(dataclasses.replace(phase, start=start, end=ends.get(phase.name, phase.end)))
    return [*phases[:-1], dataclasses.replace(phases[-1], end=phases[-1].end + more)]


def to_save(ends: dict[str, int], phase: Phase | None = None, learning: Learning | None = None) -> dict[str, Any]:
    """Return what is saved beside a state, for a run that goes on from there."""
    if phase is None or learning is None:
        return {_ENDS: ends} if ends else {}
    early = {} if learning.end is None else {phase.name: learning.end}
    return {_ENDS: ends | early, _ACCURACIES: learning.accuracies}


def _say_learned(stage: str, phase: Phase, learning: Learning, steps: int) -> None:
    """Say whether a phase was learned in its steps."""
    learned = learning.end is not None or learning.is_learned
    outcome = f"learned after {steps} steps" if learned else f"not learned in its {steps} steps"
    if hosts.is_first():
        logging.warning(
            "%s: %s %s (accuracy %.3f, config.imitate.stage_until is %g)",
            stage, phase.name.replace("_", " "), outcome, learning.accuracy, learning.until,
        )  # fmt: skip
