"""Imitation of written solutions."""

import dataclasses
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from slpo_jax.config.config import Config
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.errors import UserError
from slpo_jax.io.mesh import shard_rows
from slpo_jax.models import parts
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.stage import close_stage, note_finished, open_stage
from slpo_jax.run.stage_ends import StageEnds, check_ends
from slpo_jax.run.validate import check_answers
from slpo_jax.stages import CONTROL, IMITATE, NO_THOUGHT, UNFINISHED
from slpo_jax.training.checkpoint import StageCheckpoints
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from slpo_jax.training.recipes import ImitateSettings, Phase, Recipe, recipe_of
from slpo_jax.training.state import TrainState, init_optimizer, init_state, make_train_step


def imitated(experiment: Experiment, recipe: Recipe, plan: list[Phase]) -> EncodedProblems:
    """The training problems that are imitated.

    Raises:
        UserError: there are none, an answer does not fit in config.max_answer_tokens, none has steps where steps are
            written, or one needs more positions than the model has, which that key does not bound.
    """
    problems, longest = experiment.train, experiment.config.imitate.max_tokens
    kept = recipe.usable(problems, longest)
    if not kept:
        raise UserError(
            f"config.imitate.max_tokens: {longest} leaves no problem of config.data.train; raise it or give other data"
        )
    check_answers(experiment.config, "config.data.train", problems, kept)
    chosen, most = problems.subset(kept), experiment.reasoner.config.n_positions
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


def _settings(experiment: Experiment, stage: str) -> ImitateSettings:
    own = experiment.config.imitate
    if stage == NO_THOUGHT:
        bare = dataclasses.replace(own, recipe="curriculum", c_thought=0, final_latents="published")
        return dataclasses.replace(bare, stage_until=0.0, mix=0.0)
    return own


def planned(experiment: Experiment, stage: str = IMITATE) -> tuple[Recipe, list[Phase], list[OptimizerConfig]]:
    """How the reasoner imitates, the stage's phases, and the optimizer of each.

    Raises:
        UserError: there are no steps, a phase has fewer than its warm-up, or the control can't go on with what is
            trained.
    """
    config, recipe = _settings(experiment, stage), experiment.recipe
    for key in ("control", "no_thought"):
        if recipe.ends_apart and getattr(config, key):
            what = "lora.rank trains adapters" if config.lora.rank else f"{recipe.name} trains parts of its own"
            raise UserError(
                f"config.imitate.{key}: True, which trains the reasoner's parameters alone, but {what}; set it to "
                "False, or leave that out"
            )
    if stage == NO_THOUGHT:
        recipe = recipe_of(config, config.recipe)
    plan = recipe.phases(experiment.train, experiment.config.max_latents)
    if not plan:
        raise UserError("config.imitate.final_steps: the stage has no steps; give some or take it out of config.stages")
    check_ends(config, recipe, plan)
    # A constant schedule that is not begun anew goes through all phases.
    whole = plan[-1].end if config.optimizer.schedule == "constant" and not config.reset_optimizer else None
    steps = [whole or (config.reset_optimizer and phase.rise) or phase.end - phase.start for phase in plan]
    own = [{} if phase.learning_rate is None else {"learning_rate": phase.learning_rate} for phase in plan]
    return recipe, plan, [experiment.optimizer_config(IMITATE, n, **rate) for n, rate in zip(steps, own, strict=True)]


def validates(config: Config) -> bool:
    """Whether validation problems are asked for."""
    return False


def check(experiment: Experiment, stage: str) -> None:
    """Fail before the first stage on problems or settings that could not be imitated."""
    if not experiment.workdir.stage(stage).is_finished:
        recipe, plan, _ = planned(experiment, stage)
        imitated(experiment, recipe, plan)


def train(experiment: Experiment, stage: str) -> None:
    """Run the phases of the recipe.

    For the control the last goes on for as many steps as the stage rl has; without thoughts they end where they did
    with them.
    """
    recipe, plan, optimizer_configs = planned(experiment, stage)
    more = experiment.config.rl.steps if stage == CONTROL else 0
    problems, total = imitated(experiment, recipe, plan), len(experiment.train)
    if len(problems) < total:
        reason = "longer than config.imitate.max_tokens or, for CODI, with a negative answer"
        logging.warning("imitate: left out %d of %d problems: %s", total - len(problems), total, reason)
    bare = sum(not steps for steps in problems.steps)
    if bare and recipe.fewest_steps(plan):
        logging.warning("imitate: %d of %d problems have no steps: just answers are written", bare, len(problems))
    config, seed = _settings(experiment, stage), experiment.config.seed
    optimizers = [make_optimizer(each) for each in optimizer_configs]
    params = experiment.initial_params()
    trained, own = () if recipe.alone else experiment.trained_by(IMITATE, params), {}
    if recipe.init:
        own = recipe.init(jax.random.fold_in(experiment.key, 1 << 29), experiment.policy, params)
        if taken := (own.keys() & params.keys()) - {*parts.CARRIED}:
            raise UserError(f"config.imitate.recipe: {recipe.name} makes the part {min(taken)} anew; rename its own")
        params, trained = params | own, (*trained, *own)
    folder = UNFINISHED if recipe.ends_apart else stage
    now = _phase_at(experiment, folder, plan).trains or trained
    state = init_state(params, now, optimizers[0], experiment.key, experiment.layout)
    del params  # the state has its own
    known: dict[str, Any] = {}
    if stage in (CONTROL, NO_THOUGHT):
        before = StageCheckpoints(experiment.workdir.stage(IMITATE).path)
        imitated_state, known = before.restore(state, newest=True)
        before.close()
        state = imitated_state if stage == CONTROL else state
    run, state, extra = open_stage(experiment, stage, state, plan[-1].end + more, folder)
    ends, programs = StageEnds(stage, config, plan, more, known or extra), dict[Any, Any]()
    for number, (optimizer, optimizer_config) in enumerate(zip(optimizers, optimizer_configs, strict=True)):
        phase = ends.phases()[number]
        run.end_at(ends.phases()[-1].end)
        if int(state.step) >= phase.end:
            continue
        policy = experiment.policy.having(max_latents=phase.latent_slots, dropout_rate=config.dropout)
        now = phase.trains or trained
        # Where the rate is constant, all phases of a layout are one program.
        lasts = None if config.optimizer.schedule == "constant" else optimizer_config.total_steps
        program = phase.latent_slots, now, dataclasses.replace(optimizer_config, total_steps=lasts)
        if program not in programs:
            how = (optimizer, now, experiment.layout, IMITATE, config.micro_batches)
            schedule = make_schedule(optimizer_config)
            programs[program] = make_train_step(recipe.loss_of(policy), *how, schedule=schedule)
        step_fn = programs[program]
        slots = recipe.slots(problems, phase, config.suffix_slots)

        def batch(step, phase=phase, slots=slots):
            made = recipe.batch(problems, phase, step, seed, config.batch_size, experiment.prompt_slots, slots)
            return shard_rows(made, experiment.mesh)

        if int(state.step) == phase.start and phase.copies:
            begun = {part: jax.tree.map(jnp.copy, state.params[other]) for part, other in phase.copies}
            state = dataclasses.replace(state, params=state.params | begun)
        ends.begin(phase, int(state.step))
        for start, end in phase.stretches:
            if int(state.step) == start and (config.reset_optimizer or phase.trains):
                fresh = init_optimizer(optimizer, {name: state.params[name] for name in now}, experiment.layout)
                state = dataclasses.replace(state, opt_state=fresh)
            state = run.advance(state, step_fn, batch, end, ends.saved, ends.learning)
        ends.finish(int(state.step))
    if recipe.ends_apart:
        run.finish(state, ends.saved())
        _save_finished(experiment, recipe, state, own.keys() - {*recipe.keeps})
    else:
        close_stage(experiment, stage, run, state, ends.saved())


def _phase_at(experiment: Experiment, folder: str, plan: list[Phase]) -> Phase:
    """The phase that the stage's newest checkpoint was made in, or is at the end of; without one the first."""
    if not any(phase.trains for phase in plan):
        return plan[0]
    checkpoints = StageCheckpoints(experiment.workdir.stage(folder).path)
    step = checkpoints.latest_step or 0
    checkpoints.close()
    return next((phase for phase in plan if step <= phase.end), plan[-1])


def _save_finished(experiment: Experiment, recipe: Recipe, state: TrainState, dropped: Set[str]) -> None:
    """The end of a recipe with parts of its own: parameters as every other stage leaves them."""

    def finish(params):
        return {name: part for name, part in recipe.finish(params).items() if name not in dropped}

    finished = dataclasses.replace(state, params=jax.jit(finish)(state.params), opt_state=())
    checkpoints = StageCheckpoints(experiment.workdir.stage(IMITATE).path)
    checkpoints.save(finished)
    checkpoints.close()
    note_finished(experiment, IMITATE, int(state.step))
