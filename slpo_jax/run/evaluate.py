"""The evaluate stage: every row of the report on every data set, then the report itself.

The file reads from top to bottom, as the stage runs:

1. `prepare` refuses what could not be evaluated, before any stage begins.
2. Rows and rules: what a row depends on, and how its rollouts stop.
3. A row on a set: its rollouts, its records, and its thoughts as they can be seen.
4. `evaluate`, the loop over rows and sets; then times, the report and the trackers.

What an earlier run left is kept if it is whole and of the very same parameters, problems and settings.
"""

import dataclasses
import functools
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding

from slpo_jax.checkpoints.identity import read_reward_model
from slpo_jax.config.overrides import values
from slpo_jax.data.batches import EncodedProblems
from slpo_jax.data.templates import token_texts
from slpo_jax.errors import UserError
from slpo_jax.evaluation.completions import record_rows, thought_rows
from slpo_jax.evaluation.evaluator import EvaluateConfig
from slpo_jax.evaluation.headline import headline_text
from slpo_jax.evaluation.records import RolloutCache, write_records
from slpo_jax.evaluation.report import write_report
from slpo_jax.evaluation.report_rows import Row, Rule, read_row, write_row, write_rule
from slpo_jax.io import artifact
from slpo_jax.io.files import digest
from slpo_jax.io.orbax import params_digest
from slpo_jax.io.workdir import SetFiles, Workdir
from slpo_jax.models.parts import Params
from slpo_jax.policy.explain import reads_of
from slpo_jax.policy.scorers import PART, SCORERS, init_reward_model
from slpo_jax.run.experiment import Experiment, reported_settings, rows
from slpo_jax.run.latent_rm import manifest_of
from slpo_jax.run.provenance import (
    check_models,
    check_start,
    checkpoint_digest,
    evaluated_settings,
    is_as_trained,
    problems_facts,
    trained_with,
)
from slpo_jax.run.setup import Setup
from slpo_jax.run.sources import EVAL
from slpo_jax.run.train_stage import note_cuts, stage_params, validation_accuracy
from slpo_jax.runtime import hosts
from slpo_jax.runtime.mesh import EVERYWHERE, replicate
from slpo_jax.runtime.progress import begin

_COMPLETIONS = 8  # of each set that the trackers get

# ---------------------------------------------------------------------------
# 1. Prepare: every refusal, before any stage begins
# ---------------------------------------------------------------------------


def prepare(experiment: Experiment) -> list[Row]:
    """Return the rows of the report, in its order: of the stages that are finished, and of those that are to come.

    Raises:
        UserError: a stage is not what the config says, there is nothing to evaluate, nothing to choose rules on, or a
            scorer's parameters will not be there, or are of another reasoner.
    """
    for stage in experiment.finished:
        check_start(stage)
    check_models(experiment.finished)
    check_judge(experiment)

    # A row without a stage is of `config.init`, which has to fit the latent policy.
    report_rows = rows(experiment)
    if any(not row.stage for row in report_rows):
        experiment.stored_shapes()

    # Of several rules one is chosen, on the validation split.
    choosing = [row for row in report_rows if len(row.rules) > 1]
    if choosing and not experiment.config.data.valid:
        first = choosing[0]
        what = "number of latents"
        way = ""
        if first.gated:
            what = "gate's threshold"
            way = ", or one threshold, e.g. --config.evaluate.thresholds='(0.5,)'"
        raise UserError(
            f"config.data.valid: not set, and {first.label}'s {what} is chosen on it; give a file or a synthetic "
            f"set{way}"
        )
    return report_rows


def check_judge(experiment: Experiment) -> None:
    """Refuse scorers and beams whose reward model is not there, and warn of one that knows other checkpoints.

    Raises:
        UserError: the reward model will not be there, or is of another reasoner.
    """
    config = experiment.config.evaluate
    asking = name_what_judges(config)
    if not asking:
        return

    # It is this run's, or that of another workdir.
    own = experiment.stage(PART)
    if not config.reward_model:
        if not (own.folder.is_finished or own.wanted):
            raise UserError(
                f"{asking} has parameters of its own, and {experiment.workdir} has none; put {PART} into "
                "config.stages, or give config.evaluate.reward_model"
            )
        return
    read_judge(experiment, config.reward_model)

    # Another workdir's was trained on thoughts of a checkpoint; what it says of others' may be of use all the same.
    folder = Workdir(Path(config.reward_model).parent.parent)
    labels = artifact.read(manifest_of(folder.labels))
    if not labels:
        return
    judged = [stage for stage in experiment.finished if stage is not own]
    if experiment.config.init:
        judged.append(experiment.stage(""))
    digests = []
    for stage in judged:
        digests.append(checkpoint_digest(stage, functools.partial(stage_params, stage)))
    if digests and labels.facts["checkpoint"] not in digests:
        logging.warning(
            "config.evaluate.reward_model: %s judged thoughts of another checkpoint than this run's; what it says of "
            "these may mean nothing",
            config.reward_model,
        )


def name_what_judges(config: EvaluateConfig) -> str:
    """Return the key and the name that ask for a reward model's parameters; "" where none does."""
    for name in config.scorers:
        if SCORERS[name].part:
            return f"config.evaluate.scorers: {name}"
    if config.beams:
        return f"config.evaluate.beams: {config.beams}, and {PART}"
    return ""


def read_judge(setup: Setup, source: str) -> Params:
    """Read the parameters of the reward model that judges this reasoner.

    Raises:
        UserError: there are none, or they are of another reasoner.
    """
    everywhere = NamedSharding(setup.mesh, EVERYWHERE)
    shapes = jax.eval_shape(
        lambda params: init_reward_model(params, setup.reasoner.width),
        setup.abstract_params(),
    )
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes
    )
    params = read_reward_model(source, setup.checkpoint.description, like)
    return replicate(params, setup.mesh)


# ---------------------------------------------------------------------------
# 2. Rows and rules
# ---------------------------------------------------------------------------


class ParamsReader:
    """Reads stages' parameters when they are asked for, and holds those of one stage at a time: two may not fit."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.stage: str | None = None
        self.params: Params = {}

    def read(self, stage: str) -> Params:
        """Return a stage's parameters; without a name, those of `config.init`."""
        if stage != self.stage:
            self.params = {}  # the other's, whose memory is needed
            self.params = stage_params(self.experiment.stage(stage))
            self.stage = stage
        return self.params


def complete_row(experiment: Experiment, row: Row, reader: ParamsReader) -> Row:
    """Return the row with its rule and with all that its evaluations depend on, and write it down.

    The rule of a stage's own row is written beside the stage's checkpoint too.
    """
    config = experiment.config
    settings = evaluated_settings(config, experiment.template.more_eos_ids)
    row = choose_rule(experiment, row, settings, reader)

    # Rollouts depend on how they stop, too.
    settings["stopping"] = row.stopping
    settings["rule"] = row.rule
    if row.latents_a_step:
        settings["latents_a_step"] = row.latents_a_step
    trained = trained_with(experiment.stage(row.stage))
    row = dataclasses.replace(
        row, settings=trained, shown=reported_settings(trained), evaluation=settings
    )
    if row.name == row.stage:
        folder = experiment.workdir.stage_folder(row.stage)
        write_rule(folder, row, is_as_trained(config, trained))
    write_row(experiment.workdir.root, row)
    return row


def choose_rule(
    experiment: Experiment,
    row: Row,
    settings: Mapping[str, Any],
    reader: ParamsReader,
) -> Row:
    """Return the row with its checkpoint's digest and its rule, the best on the validation split.

    Args:
        settings: of all rollouts, however they stop.
    """
    checkpoint = checkpoint_digest(
        experiment.stage(row.stage), lambda: reader.read(row.stage)
    )
    if len(row.rules) == 1:
        return dataclasses.replace(row, checkpoint=checkpoint, rule=row.rules[0])

    # What was chosen before stays, if everything that it depends on is what it was.
    workdir = experiment.workdir
    valid = problems_facts(experiment.valid, experiment.config.evaluate.limit)
    choice = digest([checkpoint, valid, settings, row.stopping, row.rules])
    before = read_row(workdir.root, row.name)
    sweep: Mapping[str, Any] = {}
    if before and before.selected_for == choice:
        sweep = before.sweep

    # Otherwise the most accurate one is chosen, of equals the smallest.
    if not hosts.all_processes_agree(bool(sweep), workdir.row_facts(row.name)):
        accuracies = rule_accuracies(experiment, row, choice, reader)
        sweep = {
            **{str(rule): accuracy for rule, accuracy in accuracies.items()},
            "chosen": max(accuracies, key=accuracies.__getitem__),
            "problems": valid["problems"],
        }
    return dataclasses.replace(
        row,
        checkpoint=checkpoint,
        rule=sweep["chosen"],
        sweep=sweep,
        selected_for=choice,
    )


def rule_accuracies(
    experiment: Experiment, row: Row, choice: str, reader: ParamsReader
) -> dict[Rule, float]:
    """Return the validation Acc by each of a row's rules, ascending.

    Args:
        choice: digest of all that it depends on.
    """
    rule_name = "number of latents" if row.stopping == "length" else "threshold"
    begin(f"evaluate: the {rule_name} of {row.name}")
    cache = RolloutCache(experiment.workdir.sweep(row.name), choice)
    params = reader.read(row.stage)
    accuracies = {}
    for rule in sorted(row.rules):
        rollouts = cache.for_pass(f"rule {rule}")
        accuracies[rule] = validation_accuracy(
            experiment, params, row.stopping, rule, rollouts
        )
    cache.clear()
    return accuracies


def rule_of_problems(
    config: EvaluateConfig, row: Row, problems: EncodedProblems
) -> Any:
    """Return the rule of all problems, or a list of each problem's where it goes by the problem's steps."""
    each = row.latents_a_step
    if config.by_steps and row.stopping == "length":
        each = 1
    if not each or row.rule is None:
        return row.rule
    most = int(row.rule)
    rules = []
    for problem in problems.problems[: config.limit or None]:
        rules.append(min(most, each * len(problem.steps) or most))
    return rules


# ---------------------------------------------------------------------------
# 3. A row on a set: rollouts, records, thoughts
# ---------------------------------------------------------------------------


def evaluate_set(
    experiment: Experiment,
    row: Row,
    params: Params,
    files: SetFiles,
    cache: RolloutCache,
) -> None:
    """Roll out greedily, with samples and by search, and write the records of it.

    Args:
        params: with those of the reward model, where one judges.
        cache: keeps what is rolled out until the records are written.
    """
    config = experiment.config.evaluate
    label = f"{row.name} on {files.name}"
    problems = experiment.test_set(files.name)
    begin(f"evaluate: {label}")
    roll_out = functools.partial(
        experiment.evaluator.run,
        params,
        problems,
        row.stopping,
        rule_of_problems(config, row, problems),
        limit=config.limit,
        name=files.name,
    )

    # Without noise, for Acc.
    kind = "greedy with latents" if config.save_latents else "greedy"
    greedy = roll_out(
        keep_latents=config.save_latents, label=label, cache=cache.for_pass(kind)
    )

    # Under noise, for Pass@k and what scorers make of the samples.
    sampled = {}
    for seed in range(config.used_seeds):
        kind = f"seed {seed}"
        sampled[seed] = roll_out(
            seed=seed,
            label=f"{label}, {kind}",
            cache=cache.for_pass(kind),
            samples=config.samples,
        )

    # By a search over latents, one rollout of each problem.
    searched = {}
    for seed in range(config.seeds if config.beams else 0):
        kind = f"search, seed {seed}"
        searched[seed] = roll_out(
            seed=seed,
            label=f"{label}, {kind}",
            cache=cache.for_pass(kind),
            searched=True,
        )

    # What is written, the first process writes.
    if not hosts.is_first():
        return
    note_cuts(experiment, label, [greedy, *sampled.values(), *searched.values()])
    records = record_rows(
        experiment.reward, problems, greedy, sampled, config.samples, searched
    )
    write_records(files.records, records)
    files.latents.unlink(missing_ok=True)  # an earlier evaluation's
    if config.save_latents:
        np.savez_compressed(
            files.latents,
            latents=greedy["latents"],
            latent_steps=greedy["latent_steps"],
        )


def probe_set(
    experiment: Experiment,
    row: Row,
    params: Params,
    files: SetFiles,
    facts_digest: str,
    count: int,
) -> None:
    """Roll the first problems out once more, and write down what is seen of their thoughts.

    With as many latents as they had, so that one program does for all rows, however their rollouts stop.

    Args:
        facts_digest: of all that the records depend on.
        count: of the problems.
    """
    lengths = []
    with files.records.open(encoding="utf-8") as lines:
        for line in itertools.islice(lines, count):
            lengths.append(json.loads(line)["latent_steps"])
    completions = experiment.evaluator.run(
        params,
        experiment.test_set(files.name),
        "length",
        lengths,
        limit=count,
        probed=True,
        label=f"{row.name} on {files.name}, thoughts",
        name=files.name,
    )
    if hosts.is_first():
        texts = token_texts(experiment.template, experiment.reasoner.config.vocab_size)
        thoughts = thought_rows(
            experiment.reward, texts, completions, row.gated, reads_of(params)
        )
        artifact.write(files.thoughts, facts_digest, list(thoughts))


def copy_records(source: SetFiles, target: SetFiles) -> None:
    """Copy a row's records of a set, and its latents if there are any; the first process does so."""
    if not hosts.is_first():
        return
    target.folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source.records, target.records)
    target.latents.unlink(missing_ok=True)
    if source.latents.exists():
        shutil.copyfile(source.latents, target.latents)


# ---------------------------------------------------------------------------
# 4. The loop over rows and sets; times, report, trackers
# ---------------------------------------------------------------------------


def evaluate(experiment: Experiment, report_rows: list[Row]) -> None:
    """Evaluate all rows, and write eval/ and the report.

    Args:
        report_rows: of `prepare`; their stages are finished by now.
    """
    config = experiment.config.evaluate
    workdir = experiment.workdir
    reader = ParamsReader(experiment)

    # The reward model, where one judges, is among what records depend on.
    judge: Params = {}
    scorers = [*config.scorers]
    if config.beams:
        scorers.append(f"{config.beams} x {config.candidates}")
    if name_what_judges(config):
        own = str(experiment.stage(PART).folder.path)
        judge[PART] = read_judge(experiment, config.reward_model or own)
        scorers.append(f"{PART} {params_digest(judge[PART])}")

    completed = list[Row]()
    done: dict[str, SetFiles] = {}  # by digest of what records depend on
    changed = set[str]()  # sets that have other problems than before
    for planned_row in report_rows:
        # The row is written before its records, so that none are taken for this checkpoint's that aren't.
        row = complete_row(experiment, planned_row, reader)
        completed.append(row)
        for name in experiment.tests:
            files = workdir.set_files(name, row.name)
            problems = experiment.test_set(name)
            facts: dict[str, Any] = {
                "checkpoint": row.checkpoint,
                "settings": row.evaluation,
                "samples": config.samples,
                "seeds": config.used_seeds,
                "scorers": scorers,
                **problems_facts(problems, config.limit),
                "set": name,
                "left_out": problems.problems.left_out,
            }
            facts_digest = digest(facts)
            cache = RolloutCache(files.partial, facts_digest)

            # An earlier run's records are kept, and those that another row has of the same facts are copied.
            needed = [files.records.name]
            if config.save_latents:
                needed.append(files.latents.name)
            is_current = artifact.is_current(files.manifest, facts, needed)
            if not hosts.broadcast_flag(is_current):
                before = artifact.read(files.manifest)
                if before and before.facts["data"] != facts["data"]:
                    if name not in changed:
                        warn_of_changed_set(experiment, name)
                    changed.add(name)
                if facts_digest in done:
                    copy_records(done[facts_digest], files)
                else:
                    params = reader.read(row.stage) | judge
                    evaluate_set(experiment, row, params, files, cache)
                    del params  # the next stage's need the memory
                artifact.write(
                    files.manifest, facts, files=(files.records, files.latents)
                )
            cache.clear()
            done[facts_digest] = files

            # What is seen of some thoughts, where there are any.
            if experiment.config.max_latents and row.rules != (0,):
                count = min(config.probed, facts["problems"])
                probed = artifact.value_of(files.thoughts, facts_digest) or ()
                if count and not hosts.broadcast_flag(len(probed) == count):
                    params = reader.read(row.stage)
                    probe_set(experiment, row, params, files, facts_digest, count)
                    del params

    # What is read without a row's name is the last row's.
    time_rows(experiment, completed, reader)
    last_row = completed[-1]
    for name in experiment.tests:
        copy_records(workdir.set_files(name, last_row.name), workdir.set_files(name))

    # The trackers get the figures and some completions, the terminal the headline.
    if hosts.is_first():
        report = write_report(workdir.root)
        completions = []
        for name in experiment.tests:
            completions += first_completions(workdir, name, last_row)
        experiment.log.report(
            experiment.config.trackers,
            values(experiment.config),
            final_figures(report["eval"]),
            completions,
        )
        print(headline_text(report["headline"]))
    hosts.barrier("report")


def warn_of_changed_set(experiment: Experiment, name: str) -> None:
    """Say of a set that it has other problems than those that were evaluated before."""
    if hosts.is_first():
        logging.warning(
            "%s%s: %s has changed since its evaluation, or config.evaluate.limit has; it is evaluated anew",
            EVAL,
            name,
            experiment.config.data.eval[name],
        )


def time_rows(
    experiment: Experiment, report_rows: list[Row], reader: ParamsReader
) -> None:
    """Measure how long an answer of each row takes, all rows anew if one has changed, on the last largest set."""
    config = experiment.config.evaluate
    sizes = {}
    for name in experiment.tests:
        size = len(experiment.test_set(name))
        sizes[name] = min(config.limit or size, size)
    largest = max(reversed(sizes), key=sizes.__getitem__)
    problems = experiment.test_set(largest)

    # All rows' times are of one machine and one program.
    facts = problems_facts(problems, config.limit)
    facts["set"] = largest
    facts["batch_size"] = config.batch_size
    facts["rows"] = {}
    for row in report_rows:
        facts["rows"][row.name] = [row.checkpoint, row.evaluation]
    times_file = experiment.workdir.times
    if hosts.broadcast_flag(artifact.is_current(times_file, facts)):
        return
    begin(f"evaluate: milliseconds an answer on {largest}")
    times = dict[str, float]()
    batch = 0
    for row in report_rows:
        times[row.name], batch = experiment.evaluator.milliseconds(
            reader.read(row.stage),
            problems,
            row.stopping,
            rule_of_problems(config, row, problems),
            config.limit,
        )
    device = experiment.mesh.devices
    where = f"{device.size} x {device.flat[0].device_kind}"
    value = {"set": largest, "batch": batch, "device": where, "rows": times}
    artifact.write(times_file, facts, value)


def final_figures(
    evaluated: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, float]:
    """Return Acc and Pass@k, shares of 1, by SET/ROW/FIGURE, from the report's figures by row and set."""
    figures: dict[str, float] = {}
    for row, sets in evaluated.items():
        for name, found in sets.items():
            for key, figure in found.items():
                if re.fullmatch(r"acc|pass@\d+", key):
                    figures[f"{name}/{row}/{key}"] = float(figure)
    return figures


def first_completions(workdir: Workdir, name: str, row: Row) -> list[dict[str, str]]:
    """Return a row's first answers without noise to a set's problems, as texts by column, for the trackers."""
    completions = []
    with workdir.set_files(name, row.name).records.open(encoding="utf-8") as lines:
        for line in itertools.islice(lines, _COMPLETIONS):
            record = json.loads(line)
            completion = {"set": name, "row": row.name}
            for column in ("question", "completion", "reference", "correct"):
                completion[column] = str(record[column])
            completions.append(completion)
    return completions
