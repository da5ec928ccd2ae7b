"""The stages of a run: imitate, cold_start, slpo (evaluate is in `slpo_jax.rows`). Each goes on where it was."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from slpo_jax.checks import ADAPTER, check_batch, checkpoint_dir, claim, has_checkpoint, imitated
from slpo_jax.errors import UserError
from slpo_jax.evaluation.evaluate import accuracy
from slpo_jax.evaluation.records import write_text
from slpo_jax.experiment import Experiment
from slpo_jax.models import lora
from slpo_jax.policy.objective import ObjectiveConfig
from slpo_jax.policy.rollout import Stopping
from slpo_jax.training import cold_start, slpo
from slpo_jax.training.checkpoint import StageCheckpoints, load_params
from slpo_jax.training.imitate import Imitation, Phase, of_adapter
from slpo_jax.training.loop import StageRun
from slpo_jax.training.optimizer import make_optimizer
from slpo_jax.training.state import TrainState, init_state, make_train_step, replicate, shard_rows

Params = dict[str, Any]


def stage_params(experiment: Experiment, stage: str) -> Params:
    """The parameters that a finished stage left."""
    return load_params(checkpoint_dir(experiment, stage), experiment.abstract_params())


def starting_params(experiment: Experiment, before: tuple[str, ...]) -> Params:
    """Where a stage starts: the last of the stages `before` it that was run, else `config.init`, else random."""
    for stage in reversed(before):
        if has_checkpoint(experiment, stage):
            return stage_params(experiment, stage)
    return experiment.initial_params()


def _open(
    experiment: Experiment, stage: str, state: TrainState, total: int, folder: str = ""
) -> tuple[StageRun, TrainState, dict]:
    """The stage's run, at its newest checkpoint (in `folder` if not the stage's own) if there is one."""
    config = experiment.config
    checkpoints = StageCheckpoints(checkpoint_dir(experiment, folder or stage))
    extra: dict[str, Any] = {}
    if checkpoints.latest_step is not None:
        state, extra = checkpoints.restore(state)
    experiment.log.rewind(stage, int(state.step))
    run = StageRun(
        stage, total, int(state.step), experiment.log, checkpoints, config.log_every, config.checkpoint_every
    )
    return run, state, extra


def _close(experiment: Experiment, stage: str, run: StageRun, state: TrainState, extra: dict | None = None) -> None:
    run.finish(state, extra)
    write_text(checkpoint_dir(experiment, stage) / "finished", f"{int(state.step)}\n")


def check_stages(experiment: Experiment) -> None:
    """Fail before the first stage, not hours later, on what a later one could not use.

    Raises:
        UserError: a setting of a stage can't be used, or the workdir holds the stage of another config.
    """
    config = experiment.config
    for stage in config.stages:
        if stage == "evaluate":
            continue
        check_batch(experiment, stage)
        claim(experiment, stage, write=False)
        if stage == "imitate" and config.imitate.control:
            claim(experiment, "imitate_control", write=False)
        if stage != "imitate":  # whose schedules are its phases'
            experiment.optimizer_config(stage, config[stage].steps)
        if stage == "slpo":
            make_slpo(experiment)


def run_imitate(experiment: Experiment) -> None:
    """CoT-SFT and the COCONUT curriculum, or CODI's distillation; then, if asked for, the control's further steps."""
    config = experiment.config.imitate
    check_batch(experiment, "imitate")
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
    claim(experiment, "imitate")
    if not has_checkpoint(experiment, "imitate"):
        _imitate(experiment, imitation, "imitate", plan, plan[-1].end)
    if not config.control:
        return
    claim(experiment, "imitate_control")
    if not has_checkpoint(experiment, "imitate_control"):
        _imitate(experiment, imitation, "imitate_control", plan, plan[-1].end + experiment.config.slpo.steps)


def _imitate(experiment: Experiment, imitation: Imitation, stage: str, plan: list[Phase], until: int) -> None:
    """Run the phases up to step `until`; the last goes on beyond its end for the control."""
    problems = imitated(experiment, imitation, plan)
    config, seed, rank = experiment.config.imitate, experiment.config.seed, experiment.config.imitate.lora.rank
    optimizers = [make_optimizer(experiment.optimizer_config("imitate", phase.end - phase.start)) for phase in plan]
    params, trained = starting_params(experiment, ()), ("reasoner",)
    if rank:
        key = jax.random.fold_in(experiment.key, 1 << 29)
        params, trained = params | {"adapter": lora.adapt(key, params["reasoner"], rank)}, ("adapter",)
    state = init_state(params, trained, optimizers[0], experiment.key, experiment.mesh)
    if stage == "imitate_control":
        before = StageCheckpoints(checkpoint_dir(experiment, "imitate"))
        state, _ = before.restore(state)
        before.close()
    run, state, _ = _open(experiment, stage, state, until, ADAPTER if rank else stage)
    plan = [*plan[:-1], dataclasses.replace(plan[-1], end=until)]
    for phase, optimizer in zip(plan, optimizers, strict=True):
        if int(state.step) >= phase.end:
            continue
        if int(state.step) == phase.start and config.reset_optimizer:
            opt_state = optimizer.init({name: state.params[name] for name in trained})
            state = dataclasses.replace(state, opt_state=replicate(opt_state, experiment.mesh))
        layout = dataclasses.replace(experiment.rollout, max_latents=phase.latent_slots, dropout_rate=config.dropout)
        loss_fn = imitation.make_loss(experiment.reasoner, experiment.gate, layout)
        if rank:
            loss_fn = of_adapter(loss_fn, config.lora.alpha / rank)
        step_fn = make_train_step(loss_fn, optimizer, trained, experiment.mesh, "imitate", config.micro_batches)
        slots = imitation.suffix_slots(problems, phase, config.suffix_slots)

        def batch(step, phase=phase, slots=slots):
            made = imitation.make_batch(problems, phase, step, seed, config.batch_size, experiment.prompt_slots, slots)
            return shard_rows(made, experiment.mesh)

        state = run.advance(state, step_fn, batch, phase.end)
    if rank:
        run.finish(state)
        _save_merged(experiment, state, config.lora.alpha / rank)
    else:
        _close(experiment, stage, run, state)


def _save_merged(experiment: Experiment, state: TrainState, scale: float) -> None:
    """The end of imitation with adapters: parameters as every other stage leaves them."""
    reasoner = jax.jit(lora.adapted)(state.params["reasoner"], state.params["adapter"], scale)
    merged = dataclasses.replace(state, params={"reasoner": reasoner, "gate": state.params["gate"]}, opt_state=())
    directory = checkpoint_dir(experiment, "imitate")
    checkpoints = StageCheckpoints(directory)
    checkpoints.save(merged)
    checkpoints.close()
    write_text(directory / "finished", f"{int(state.step)}\n")
    shutil.rmtree(checkpoint_dir(experiment, ADAPTER), ignore_errors=True)


def _prompted(experiment: Experiment, config):
    """step -> the sharded batch of prompts and references; `config` is the stage's."""
    seed, parts = experiment.config.seed, experiment.mesh.size * config.micro_batches
    most = experiment.train.most_tokens(seed, config.steps, config.batch_size, parts)

    def batch(step: int):
        made = slpo.make_batch(
            experiment.train,
            step,
            seed,
            config.batch_size,
            experiment.prompt_slots,
            experiment.reference_width,
            most,
            parts,
        )
        return shard_rows(made, experiment.mesh)

    return batch


def run_cold_start(experiment: Experiment) -> None:
    """Train the gate; keep the one with the best validation accuracy, then sweep its threshold."""
    claim(experiment, "cold_start")
    if has_checkpoint(experiment, "cold_start"):
        return
    config, stage = experiment.config.cold_start, "cold_start"
    check_batch(experiment, stage)
    trained = ("reasoner", "gate") if config.train_backbone else ("gate",)
    optimizer = make_optimizer(experiment.optimizer_config(stage, config.steps))
    state = init_state(starting_params(experiment, ("imitate",)), trained, optimizer, experiment.key, experiment.mesh)
    settings = cold_start.ColdStartConfig(
        config.trajectories,
        experiment.config.min_latents,
        experiment.config.gate.dropout,
        config.train_backbone,
        config.forced_stop,
    )
    loss_fn = cold_start.make_loss(
        experiment.reasoner, experiment.gate, experiment.reward, experiment.rollout, settings
    )
    step_fn = make_train_step(loss_fn, optimizer, trained, experiment.mesh, stage, config.micro_batches)
    run, state, best = _open(experiment, stage, state, config.steps)
    batch, best_dir = _prompted(experiment, config), checkpoint_dir(experiment, "cold_start_best")
    if not best:  # a first step: what another try left there is not this one's
        shutil.rmtree(best_dir, ignore_errors=True)
        best = {"accuracy": -1.0, "step": 0, "evaluated": 0}
    experiment.log.rewind(stage, best["evaluated"], "valid_accuracy")

    def known() -> dict:
        return best

    while True:
        step = int(state.step)
        if best["evaluated"] < step and (step % config.evaluate_every == 0 or step == config.steps):
            best = _keep_if_better(experiment, state, best, best_dir)
        if step >= config.steps or step - best["step"] >= config.patience * config.evaluate_every:
            break
        until = min(config.steps, (step // config.evaluate_every + 1) * config.evaluate_every)
        state = run.advance(state, step_fn, batch, until, known)
    state = dataclasses.replace(state, params=load_params(best_dir, state.params))
    run.checkpoints.save(state, best, replace=True)  # the last step's may be there already, with the last gate
    _close(experiment, stage, run, state, best)


def _keep_if_better(experiment: Experiment, state: TrainState, best: dict, directory: Path) -> dict:
    """Validate the gate, keep its checkpoint if none was better, and return what is known of the best now."""
    step = int(state.step)
    found = validation_accuracy(experiment, state.params, "threshold", 0.5)
    experiment.log.write("cold_start", step, {"valid_accuracy": found})
    if found <= best["accuracy"]:
        return best | {"evaluated": step}
    keeper = StageCheckpoints(directory)
    keeper.save(state)
    keeper.close()
    return {"accuracy": found, "step": step, "evaluated": step}


def run_slpo(experiment: Experiment) -> None:
    """Surrogate latent policy optimization of reasoner, answers and gate."""
    claim(experiment, "slpo")
    if has_checkpoint(experiment, "slpo"):
        return
    config, stage = experiment.config.slpo, "slpo"
    check_batch(experiment, stage)
    gated = experiment.config.gate.enabled
    trained = ("reasoner", "gate") if gated else ("reasoner",)
    optimizer = make_optimizer(experiment.optimizer_config(stage, config.steps))
    state = init_state(
        starting_params(experiment, ("imitate", "cold_start")), trained, optimizer, experiment.key, experiment.mesh
    )
    step_fn = make_train_step(
        slpo.make_loss(make_slpo(experiment)), optimizer, trained, experiment.mesh, stage, config.micro_batches
    )
    run, state, _ = _open(experiment, stage, state, config.steps)
    state = run.advance(state, step_fn, _prompted(experiment, config), config.steps)
    _close(experiment, stage, run, state)


def make_slpo(experiment: Experiment) -> slpo.Slpo:
    """The parts of the SLPO step that the config describes."""
    config, gated = experiment.config.slpo, experiment.config.gate.enabled
    objective = ObjectiveConfig(**config.objective.to_dict())
    if not gated:
        objective = dataclasses.replace(objective, stop_weight=0.0)
    if objective.latent_weight == objective.answer_weight == objective.stop_weight == 0.0:
        raise UserError("config.slpo.objective: all three weights are 0, so there is nothing to train; set one")
    stopping: Stopping = config.stopping if gated else "length"
    # Without a gate all latents are used; rooms that differ in those alone are one.
    rooms = config.rooms if gated else dict.fromkeys((1.0, said) for _, said in config.rooms)
    return slpo.Slpo(
        experiment.reasoner,
        experiment.gate,
        experiment.reward,
        dataclasses.replace(experiment.rollout, stopping=stopping, temperature=config.temperature),
        objective,
        slpo.SlpoConfig(config.group, config.passes, config.advantage, config.answer_passes, tuple(map(tuple, rooms))),
    )


def validation_accuracy(experiment: Experiment, params: Params, stopping: Stopping, rule: float | int) -> float:
    """Acc on the validation split, where all choices are made."""
    valid = experiment.valid
    done = experiment.evaluator.run(
        params, valid, stopping, rule, limit=experiment.config.evaluate.limit, label="validation"
    )
    return accuracy(experiment.reader, valid, done)


def choose(experiment: Experiment, name: str, params: Params, stopping: Stopping, rules: list) -> float | int:
    """The rule (threshold or number of latents) with the best validation Acc, ties to the smaller.

    The sweep is kept in `thresholds.json` under `name`.
    """
    path = experiment.workdir / "thresholds.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    found = {str(rule): validation_accuracy(experiment, params, stopping, rule) for rule in sorted(rules)}
    best = sorted(rules)[int(np.argmax(list(found.values())))]
    known[name] = found | {"chosen": best}
    write_text(path, json.dumps(known, indent=1) + "\n")
    return best
