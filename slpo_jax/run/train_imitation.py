"""Imitation of written solutions: trains the reasoner, its control, and imitation without latents.

The file reads from top to bottom, as the stage runs:

1. `prepare` plans the phases of the recipe, chooses the problems (`run/imitation_plan.py`), and refuses what could not
   be imitated.
2. The state to begin with, or to go on from.
3. `train`, the loop: phase after phase; steps, metrics, checkpoints. Phases that end when they are learned end alike in
   a run that goes on.
4. The end of a recipe that trains parts of its own.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import StageFolder
from slpo_jax.models import parts
from slpo_jax.models.parts import Params
from slpo_jax.policy.noise import Stream
from slpo_jax.run.experiment import Experiment, Stage
from slpo_jax.run.imitation_plan import (
    choose_problems,
    imitate_settings_of,
    left_out,
    plan_phases,
)
from slpo_jax.run.run_checks import check_batch
from slpo_jax.run.train_stage import close_stage, note_finished, open_stage
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.stages import CONTROL, IMITATE, IMITATE_SCRATCH, NO_THOUGHT
from slpo_jax.training.loop import AccuracyWindow, StepFn
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from slpo_jax.training.recipes import (
    ImitateSettings,
    Phase,
    Recipe,
)
from slpo_jax.training.stage_checkpoints import StageCheckpoints
from slpo_jax.training.state import (
    TrainState,
    init_optimizer,
    init_state,
    make_train_step,
)

ENDS = "ends"  # in what is saved beside a state
ACCURACIES = "accuracies"

# ---------------------------------------------------------------------------
# 1. Prepare: the phases, the problems, and every refusal
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """Imitation that can be trained.

    Attributes:
        settings: of this run of the stage, see `imitate_settings_of`.
        phases: with the latest ends that they can have.
        optimizer_configs: one for each phase.
        problems: the ones that are imitated.
    """

    stage: Stage
    settings: ImitateSettings
    recipe: Recipe
    phases: list[Phase]
    optimizer_configs: list[OptimizerConfig]
    problems: EncodedProblems


def prepare(stage: Stage) -> Plan | None:
    """Return what the loop needs; None where there is nothing left to train.

    Raises:
        UserError: the problems or settings can't be imitated.
    """
    experiment = stage.experiment
    check_batch(experiment.config, IMITATE, experiment.mesh.size)
    if stage.is_done:
        return None

    # Further imitation goes on as imitation does; imitation without latents has a recipe of its own.
    settings = imitate_settings_of(experiment.config.imitate, stage.name)
    recipe, phases, optimizer_configs = plan_phases(experiment, stage.name)
    problems = choose_problems(experiment, recipe, phases)
    if stage.name == CONTROL:
        check_control(experiment, settings, recipe)
    return Plan(stage, settings, recipe, phases, optimizer_configs, problems)


def check_control(
    experiment: Experiment, settings: ImitateSettings, recipe: Recipe
) -> None:
    """Refuse further imitation that would learn nothing, or that can't go on from where imitation ended."""
    optimizer = settings.optimizer
    ends_at_zero = optimizer.schedule != "constant" and not optimizer.final_fraction
    if ends_at_zero and not settings.control_rate:
        raise UserError(
            "config.imitate.control_rate: 0 goes on at the rate that imitation ends with, and that is 0 with "
            f"config.imitate.optimizer.schedule={optimizer.schedule}; give a rate, or set config.imitate.control to "
            "False"
        )

    # A recipe's own parts are kept as long as further imitation is to come.
    imitation = experiment.stage(IMITATE)
    has_lost_parts = (
        recipe.has_extra_parameters and not running_folder(imitation, recipe).steps
    )
    control = experiment.stage(CONTROL)
    if control.folder.is_finished and has_lost_parts:
        steps = control.folder.read_config()["rl"]["steps"]
        raise UserError(
            f"config.rl.steps: {experiment.config.rl.steps}, but {control.folder.path} ended after {steps}, and the "
            f"parts of {recipe.name}'s own are gone from which it would go on; set config.imitate.control to False, "
            "or use another --workdir"
        )
    if imitation.folder.is_finished and has_lost_parts:
        raise UserError(
            f"config.imitate.control: True, but {imitation.folder.path} was finished without it, and the parts of "
            f"{recipe.name}'s own are gone from which further imitation would go on; set it to False, or use another "
            "--workdir"
        )


# ---------------------------------------------------------------------------
# 2. The state to begin with
# ---------------------------------------------------------------------------


def running_folder(stage: Stage, recipe: Recipe) -> StageFolder:
    """Return the folder of a stage's checkpoints while it runs, which have the recipe's own parts beside the others."""
    if not recipe.has_extra_parameters:
        return stage.folder
    return stage.experiment.stage(IMITATE_SCRATCH[stage.name]).folder


def begin(plan: Plan) -> tuple[TrainState, tuple[str, ...], dict[str, Any]]:
    """Make the state before the first step.

    Returns:
        the state; the parts that the recipe trains; and for further imitation and imitation without latents what
        imitation saved beside its last state.
    """
    stage = plan.stage
    experiment = stage.experiment
    recipe = plan.recipe

    # A recipe may have parts of its own, as SIM-CoT's decoder.
    params = experiment.initial_params()
    new_parts: Params = {}
    if recipe.init:
        key = jax.random.fold_in(experiment.key, Stream.RECIPE_PARTS)
        new_parts = recipe.init(key, experiment.policy, params)
        clashes = (new_parts.keys() & params.keys()) - {*parts.CARRIED}
        if clashes:
            raise UserError(
                f"config.imitate.recipe: {recipe.name} would overwrite the part {min(clashes)}; rename the recipe's own"
            )
    trained = tuple(new_parts)
    if not recipe.trains_only_these:
        trained = (*experiment.trained_by(IMITATE, params), *new_parts)

    # The optimizer's state is laid out for the phase that the newest checkpoint is in, or at the end of. Phases that
    # end when they are learned may be shorter than here, but all of them train the same parts (`check_ends`).
    phase = plan.phases[-1]
    if stage.name != CONTROL:
        newest = max(running_folder(stage, recipe).steps, default=0)
        unfinished = [phase for phase in plan.phases if newest <= phase.end]
        phase = unfinished[0] if unfinished else phase
    # That layout does not depend on a phase's rates.
    optimizer = make_optimizer(plan.optimizer_configs[0])
    state = init_state(
        params | new_parts,
        phase.trains or trained,
        optimizer,
        experiment.key,
        experiment.layout,
    )
    del params, new_parts  # the state has its own

    # Further imitation goes on from imitation's last state; without latents it takes as many steps, from the beginning.
    saved: dict[str, Any] = {}
    imitation = experiment.stage(IMITATE)
    if stage.name == CONTROL:
        before = StageCheckpoints(running_folder(imitation, recipe).path)
        state, saved = before.restore(state, newest=True)
        before.close()
    elif stage.name == NO_THOUGHT:
        before = StageCheckpoints(imitation.folder.path)
        saved = before.newest_extra()
        before.close()
    return state, trained, saved


# ---------------------------------------------------------------------------
# 3. The loop
# ---------------------------------------------------------------------------


def train(plan: Plan) -> None:
    """Run the phases of the recipe.

    For the control the last one goes on for as many steps as the stage rl has; without thoughts they end where they did
    with them.
    """
    stage = plan.stage
    experiment = stage.experiment
    settings = plan.settings
    recipe = plan.recipe
    problems = plan.problems
    if stage.name == IMITATE:  # the others imitate the same
        warn_of_left_out(plan)

    # Further imitation is as long as reinforcement learning, if asked to at a rate of its own.
    more = experiment.config.rl.steps if stage.name == CONTROL else 0
    optimizer_configs = list(plan.optimizer_configs)
    if more and settings.control_rate:
        optimizer_configs[-1] = dataclasses.replace(
            optimizer_configs[-1],
            learning_rate=settings.control_rate,
            schedule="constant",
            warmup_steps=0,
        )
    plan = dataclasses.replace(plan, optimizer_configs=optimizer_configs)

    @functools.cache  # phases that differ in none of these share a program
    def make_step(
        latent_slots: int, changing: tuple[str, ...], optimizer_config: OptimizerConfig
    ) -> StepFn:
        policy = experiment.policy.with_config(
            max_latents=latent_slots, dropout_rate=settings.dropout
        )
        return make_train_step(
            recipe.loss_of(policy),
            make_optimizer(optimizer_config),
            changing,
            experiment.layout,
            IMITATE,
            settings.micro_batches,
            schedule=make_schedule(optimizer_config),
        )

    # The same command goes on from the newest checkpoint, in whatever phase that is.
    state, trained, saved = begin(plan)
    total = plan.phases[-1].end + more
    loop, state, own_saved = open_stage(
        stage, state, total, running_folder(stage, recipe)
    )
    # What imitation saved, for those that go by its ends; else what the stage did.
    saved = saved or own_saved
    ends: dict[str, int] = saved.get(ENDS, {})
    with loop:
        step = int(state.step)
        for number, optimizer_config in enumerate(optimizer_configs):
            # A phase begins where the one before it has ended, so the boundaries change whenever one ends.
            phases = as_ended(plan.phases, ends, more)
            phase = phases[number]
            loop.end_at(phases[-1].end)
            if step >= phase.end:
                continue
            if step == phase.start and phase.copies:
                params = dict(state.params)
                for part, other in phase.copies:
                    params[part] = jax.tree.map(jnp.copy, state.params[other])
                state = dataclasses.replace(state, params=params)
                del params  # steps give the state's away

            # With a constant rate all phases of a layout are one program, however many steps they have.
            if optimizer_config.schedule == "constant":
                optimizer_config = dataclasses.replace(
                    optimizer_config, total_steps=None
                )
            changing = phase.trains or trained
            step_fn = make_step(phase.latent_slots, changing, optimizer_config)
            slots = recipe.slots(problems, phase, settings.suffix_slots)
            make_batch = functools.partial(batch_of, plan, phase, slots)

            # It may end when it is learned, by the accuracy of its last steps.
            may_end = bool(settings.stage_until) and not more
            window = AccuracyWindow()
            if phase.start < step:  # where a checkpoint is gone on from
                window = AccuracyWindow(saved.get(ACCURACIES, []))
            for start, end in phase.stretches:
                if step == start and (settings.reset_optimizer or phase.trains):
                    optimizer = make_optimizer(optimizer_config)
                    now = {part: state.params[part] for part in changing}
                    fresh = init_optimizer(optimizer, now, experiment.layout)
                    state = dataclasses.replace(state, opt_state=fresh)
                batch = make_batch(step) if step < end else None
                while step < end:
                    # Everything that a step reads is on the devices already.
                    with jax.transfer_guard("disallow"):
                        state, metrics = step_fn(state, batch)
                    step += 1

                    # While the devices compute, the host makes the next batch and logs the step before.
                    last_batch = batch
                    batch = make_batch(step) if step < end else None
                    window.add(loop.log(step, metrics, last_batch))

                    # Metrics come a step late, so a phase ends one step after its window's mean reaches `stage_until`.
                    may_end_here = (
                        may_end and phase.start + settings.stage_least <= step < end
                    )
                    # It is the phase's only stretch (`check_ends`).
                    if may_end_here and window.is_learned(settings.stage_until):
                        ends = ends | {phase.name: step}
                        # The next phase may take the steps that are left; after the last there is none.
                        if number == len(optimizer_configs) - 1:
                            loop.end_at(step)
                        end = step
                    if loop.should_save(step):
                        window.add(loop.flush())
                        loop.save(
                            state, to_save(ends, window.accuracies if may_end else None)
                        )
                window.add(loop.flush())
            if may_end and window.accuracies:
                say_learned(plan, phase, window, ends)

        # Parts of the recipe's own are left out of what others find.
        if not recipe.has_extra_parameters:
            close_stage(stage, loop, state, to_save(ends))
            return
        loop.finish(state, to_save(ends))
    save_finished(plan, state, trained, to_save(ends))


def batch_of(plan: Plan, phase: Phase, slots: Any, step: int) -> Any:
    """Return the sharded batch of a phase's step."""
    experiment = plan.stage.experiment
    layout = (
        experiment.config.seed,
        plan.settings.batch_size,
        experiment.prompt_slots,
        slots,
    )
    return shard_rows(
        plan.recipe.batch(plan.problems, phase, step, *layout), experiment.mesh
    )


def as_ended(
    longest: list[Phase], ends: Mapping[str, int], more: int = 0
) -> list[Phase]:
    """Return the phases as they are by now: the steps that one does not need, the next may take.

    Args:
        longest: the phases, each as long as it can be.
        ends: after which step those ended that ended before their time, by name.
        more: steps that the last one goes on for, as a control.
    """
    phases = list[Phase]()
    for phase in longest:
        start = phases[-1].end if phases else 0
        phases.append(
            dataclasses.replace(phase, start=start, end=ends.get(phase.name, phase.end))
        )
    phases[-1] = dataclasses.replace(phases[-1], end=phases[-1].end + more)
    return phases


def to_save(
    ends: dict[str, int], accuracies: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return what is saved beside a state, for a run that goes on from there.

    Args:
        ends: see `as_ended`.
        accuracies: of the last steps of a phase that may end when it is learned.
    """
    if accuracies is not None:
        return {ENDS: ends, ACCURACIES: accuracies}
    return {ENDS: ends} if ends else {}


# ---------------------------------------------------------------------------
# 4. The end, and what is said of it
# ---------------------------------------------------------------------------


def save_finished(
    plan: Plan, state: TrainState, trained: Sequence[str], saved: dict[str, Any]
) -> None:
    """End a recipe with parts of its own: save parameters as every other stage leaves them.

    Args:
        trained: the parts that the recipe trained; of its own only those stay that it keeps.
    """
    stage = plan.stage
    own_parts = {*trained} - {part.name for part in stage.experiment.parts}
    dropped = own_parts - {*plan.recipe.keeps}

    def finish(params: Params) -> Params:
        return {
            name: part
            for name, part in plan.recipe.finish(params).items()
            if name not in dropped
        }

    checkpoints = StageCheckpoints(stage.folder.path)
    checkpoints.save(
        dataclasses.replace(state, params=jax.jit(finish)(state.params), opt_state=()),
        saved,
    )
    checkpoints.close()
    note_finished(stage, int(state.step))


def warn_of_left_out(plan: Plan) -> None:
    """Warn of problems that are not imitated, or have no steps."""
    experiment = plan.stage.experiment
    imitated = len(plan.problems)
    causes = left_out(
        experiment.demos,
        imitated,
        experiment.config.imitate.max_tokens,
        plan.recipe.name,
    )
    if causes:
        count = len(experiment.demos)
        logging.warning(
            "imitate: left out %d of %d problems: %s", count - imitated, count, causes
        )
    without_steps = sum(not steps for steps in plan.problems.steps)
    if without_steps and plan.recipe.fewest_steps(plan.phases):
        logging.warning(
            "imitate: %d of %d problems have no steps: just answers are written",
            without_steps,
            imitated,
        )


def say_learned(
    plan: Plan, phase: Phase, window: AccuracyWindow, ends: Mapping[str, int]
) -> None:
    """Say whether a phase was learned in its steps."""
    until = plan.settings.stage_until
    steps = ends.get(phase.name, phase.end) - phase.start
    outcome = f"not learned in its {steps} steps"
    if phase.name in ends or window.is_learned(until):
        outcome = f"learned after {steps} steps"
    if hosts.is_first():
        logging.warning(
            "%s: %s %s (accuracy %.3f, config.imitate.stage_until is %g)",
            plan.stage.name,
            phase.name.replace("_", " "),
            outcome,
            window.mean,
            until,
        )
