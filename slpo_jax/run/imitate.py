"""Imitation of written solutions."""

import dataclasses
import shutil

import jax
import numpy as np
from absl import logging

from slpo_jax.errors import UserError
from slpo_jax.io import hosts
from slpo_jax.io.mesh import shard_rows
from slpo_jax.models import lora
from slpo_jax.models.parts import ADAPTER as PART
from slpo_jax.run.claims import ADAPTER, claim
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.stage import check_batch, close_stage, note_finished, open_stage
from slpo_jax.run.usable import check_answers
from slpo_jax.text.batches import EncodedProblems
from slpo_jax.training.checkpoint import StageCheckpoints
from slpo_jax.training.distil import Distillation
from slpo_jax.training.icot import internalization
from slpo_jax.training.imitate import Imitation, Phase
from slpo_jax.training.optimizer import OptimizerConfig, make_optimizer
from slpo_jax.training.state import LossFn, TrainState, init_optimizer, init_state, make_train_step


def imitated(experiment: Experiment, imitation: Imitation, plan: list[Phase]) -> EncodedProblems:
    """The training problems that are imitated.

    Raises:
        UserError: there are none, an answer does not fit in config.max_answer_tokens, none has steps where steps are
            written, or one needs more positions than the model has, which that key does not bound.
    """
    problems, longest = experiment.train, experiment.config.imitate.max_tokens
    kept = imitation.usable(problems, longest)
    if not kept:
        raise UserError(
            f"config.imitate.max_tokens: {longest} leaves no problem of config.data.train; raise it or give other data"
        )
    check_answers(experiment.config, "config.data.train", problems, kept)
    chosen, most = problems.subset(kept), experiment.reasoner.config.n_positions
    fewest = _fewest_steps(experiment, imitation, plan)
    if max(map(len, chosen.steps)) < fewest:
        why = "" if fewest == 1 else ", of which CODI's teacher leaves out the last (config.imitate.last_step)"
        raise UserError(
            f"config.data.train: none of its {len(chosen)} problems has {fewest} step(s) to imitate{why}; give "
            "solutions in a field of docs/data.md, or for answers alone 0 for config.imitate.cot_steps and stage_steps"
        )
    for phase in plan:
        needed = imitation.positions(chosen, phase)
        if max(needed) > most:
            raise UserError(
                f"config.model.n_positions: {most} is less than the {max(needed)} positions of problem "
                f"{kept[int(np.argmax(needed))]} in imitation's phase {phase.name}; raise it, lower "
                "config.imitate.max_tokens or drop the problem"
            )
    return chosen


def _fewest_steps(experiment: Experiment, imitation: Imitation, plan: list[Phase]) -> int:
    """How many steps a problem has to have for one to be written; 0 where answers alone are."""
    if isinstance(imitation, Distillation):
        return 1 if imitation.last_step else 2
    return int(experiment.config.imitate.recipe == "icot" or any(phase.dropped is not None for phase in plan))


def planned(experiment: Experiment) -> tuple[Imitation, list[Phase], list[OptimizerConfig]]:
    """How the reasoner imitates, the stage's phases, and the optimizer of each.

    Raises:
        UserError: there are no steps, or a phase has fewer than its warm-up.
    """
    config = experiment.config.imitate
    imitation: Imitation
    if config.recipe == "icot":
        imitation = internalization(config, experiment.train)
    else:
        imitation = experiment.origin.recipe.imitation(config)
    plan = imitation.phases(
        config.cot_steps,
        config.stage_steps,
        config.final_steps,
        config.c_thought,
        config.max_latent_stage,
        config.final_latents,
        experiment.config.max_latents,
    )
    if not plan:
        raise UserError("config.imitate.final_steps: the stage has no steps; give some or take it out of config.stages")
    # A constant schedule that is not begun anew goes through all phases.
    whole = plan[-1].end if config.optimizer.schedule == "constant" and not config.reset_optimizer else None
    steps = [whole or (config.reset_optimizer and phase.rise) or phase.end - phase.start for phase in plan]
    return imitation, plan, [experiment.optimizer_config("imitate", count) for count in steps]


def run_imitate(experiment: Experiment) -> None:
    """The recipe of `config.imitate`; then, if asked for, the control's further steps."""
    config = experiment.config.imitate
    check_batch(experiment, "imitate")
    claim(experiment, "imitate")
    if not experiment.workdir.stage("imitate").is_finished:
        _imitate(experiment, "imitate")
    if hosts.is_first():  # also those that a run left which was killed as soon as it was finished
        shutil.rmtree(experiment.workdir.stage(ADAPTER).path, ignore_errors=True)
    if not config.control:
        return
    claim(experiment, "imitate_control")
    if not experiment.workdir.stage("imitate_control").is_finished:
        _imitate(experiment, "imitate_control", experiment.config.rl.steps)


def _imitate(experiment: Experiment, stage: str, further: int = 0) -> None:
    """Run the phases; the last goes on for some further steps for the control."""
    imitation, plan, optimizer_configs = planned(experiment)
    until = plan[-1].end + further
    problems, total = imitated(experiment, imitation, plan), len(experiment.train)
    if len(problems) < total:
        reason = "longer than config.imitate.max_tokens or, for CODI, with a negative answer"
        logging.warning("imitate: left out %d of %d problems: %s", total - len(problems), total, reason)
    bare = sum(not steps for steps in problems.steps)
    if bare and _fewest_steps(experiment, imitation, plan):
        logging.warning("imitate: %d of %d problems have no steps: just answers are written", bare, len(problems))
    config, seed, rank = experiment.config.imitate, experiment.config.seed, experiment.config.imitate.lora.rank
    optimizers = [make_optimizer(each) for each in optimizer_configs]
    params = experiment.initial_params()
    trained = experiment.trained_by("imitate", params)
    if rank:
        params, trained = lora.with_adapter(jax.random.fold_in(experiment.key, 1 << 29), params, rank), (PART,)
    state = init_state(params, trained, optimizers[0], experiment.key, experiment.layout)
    del params  # the state has its own
    if stage == "imitate_control":
        before = StageCheckpoints(experiment.workdir.stage("imitate").path)
        state, _ = before.restore(state, newest=True)
        before.close()
    run, state, _ = open_stage(experiment, stage, state, until, ADAPTER if rank else stage)
    plan = [*plan[:-1], dataclasses.replace(plan[-1], end=until)]
    for phase, optimizer in zip(plan, optimizers, strict=True):
        if int(state.step) >= phase.end:
            continue
        policy = experiment.policy.having(max_latents=phase.latent_slots, dropout_rate=config.dropout)
        loss_fn = imitation.make_loss(policy)
        if rank:
            loss_fn = _of_adapter(loss_fn, config.lora.alpha / rank)
        step_fn = make_train_step(loss_fn, optimizer, trained, experiment.layout, "imitate", config.micro_batches)
        slots = imitation.suffix_slots(problems, phase, config.suffix_slots)

        def batch(step, phase=phase, slots=slots):
            made = imitation.make_batch(problems, phase, step, seed, config.batch_size, experiment.prompt_slots, slots)
            return shard_rows(made, experiment.mesh)

        for start, end in phase.stretches:
            if int(state.step) == start and config.reset_optimizer:
                fresh = init_optimizer(optimizer, {name: state.params[name] for name in trained}, experiment.layout)
                state = dataclasses.replace(state, opt_state=fresh)
            state = run.advance(state, step_fn, batch, end)
    if rank:
        run.finish(state)
        _save_merged(experiment, state, config.lora.alpha / rank)
    else:
        close_stage(experiment, stage, run, state)


def _save_merged(experiment: Experiment, state: TrainState, scale: float) -> None:
    """The end of imitation with adapters: parameters as every other stage leaves them."""
    params = jax.jit(lora.without_adapter, static_argnums=1)(state.params, scale)
    merged = dataclasses.replace(state, params=params, opt_state=())
    folder = experiment.workdir.stage("imitate")
    checkpoints = StageCheckpoints(folder.path)
    checkpoints.save(merged)
    checkpoints.close()
    note_finished(experiment, "imitate", state)


def _of_adapter(loss_fn: LossFn, scale: float) -> LossFn:
    """The loss of the reasoner with what is trained of it (see `lora.with_adapter`) merged in.

    Args:
        scale: alpha / rank.
    """

    def adapter_loss(params, batch, key):
        return loss_fn(lora.without_adapter(params, scale), batch, key)

    return adapter_loss
