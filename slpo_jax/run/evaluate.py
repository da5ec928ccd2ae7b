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
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from slpo_jax.config.overrides import values
from slpo_jax.data.templates import token_texts
from slpo_jax.errors import UserError
from slpo_jax.evaluation.completions import record_rows, thought_rows
from slpo_jax.evaluation.headline import headline_text
from slpo_jax.evaluation.records import RolloutCache, write_records
from slpo_jax.evaluation.report import write_report
from slpo_jax.evaluation.report_rows import Row, read_row, write_row, write_rule
from slpo_jax.evaluation.tracked import tracked_completions, tracked_figures
from slpo_jax.io import artifact
from slpo_jax.io.files import digest
from slpo_jax.io.orbax import params_digest
from slpo_jax.io.workdir import SetFiles
from slpo_jax.models.parts import Params
from slpo_jax.policy.explain import reads_of
from slpo_jax.policy.scorers import PART
from slpo_jax.run.experiment import Experiment, reported_settings, rows
from slpo_jax.run.judge import check_judge, load_judge
from slpo_jax.run.provenance import (
    check_models,
    check_start,
    checkpoint_digest,
    evaluated_settings,
    is_as_trained,
    problems_facts,
    trained_with,
)
from slpo_jax.run.row_times import time_rows
from slpo_jax.run.sources import EVAL
from slpo_jax.run.train_stage import ParamsReader, note_cuts, validation_accuracy
from slpo_jax.runtime import hosts
from slpo_jax.runtime.progress import begin

# ---------------------------------------------------------------------------
# 1. Prepare: every refusal, before any stage begins
# ---------------------------------------------------------------------------


def prepare(experiment: Experiment) -> list[Row]:
    """Return the rows of the report, in its order: of the stages that are finished, and of those that are to come.

    Raises:
        UserError: a stage is not what the config says, there is nothing to evaluate, nothing to choose rules on, or a
            scorer's parameters will not be there, or are of another reasoner.
    """
    # What is there already has to be what the config says, and a reward model has to be there if one is asked for.
    finished = experiment.finished
    for stage in finished:
        check_start(stage)
    check_models(finished)
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


# ---------------------------------------------------------------------------
# 2. Rows and rules
# ---------------------------------------------------------------------------


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
    experiment: Experiment, row: Row, settings: Mapping[str, Any], reader: ParamsReader
) -> Row:
    """Return the row with its checkpoint's digest and its rule, of several the best on the validation split.

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
        rule_name = "number of latents" if row.stopping == "length" else "threshold"
        begin(f"evaluate: the {rule_name} of {row.name}")
        cache = RolloutCache(workdir.sweep(row.name), choice)
        params = reader.read(row.stage)
        ascending = sorted(row.rules)
        accuracies = {}
        for rule in ascending:
            # Too few latents may leave answers without an end, which says nothing about the rule that is chosen.
            accuracies[str(rule)] = validation_accuracy(
                experiment,
                params,
                row.stopping,
                rule,
                cache.for_pass(f"rule {rule}"),
                says_cuts=False,
            )
        cache.clear()
        best = max(ascending, key=lambda rule: accuracies[str(rule)])
        sweep = accuracies | {"chosen": best, "problems": valid["problems"]}
    return dataclasses.replace(
        row,
        checkpoint=checkpoint,
        rule=sweep["chosen"],
        sweep=sweep,
        selected_for=choice,
    )


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
        row.rule_for(problems.problems[: config.limit or None], config.by_steps),
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


def warn_of_change(experiment: Experiment, name: str) -> None:
    """Say of a set that it has other problems than those that were evaluated before."""
    if hosts.is_first():
        logging.warning(
            "%s%s: %s has changed since its evaluation, or config.evaluate.limit has; it is evaluated anew",
            EVAL,
            name,
            experiment.config.data.eval[name],
        )


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

    # Records depend on who scores and searches, and on the parameters of the reward model where it judges.
    judge_params = load_judge(experiment)
    scorers = [*config.scorers]
    if config.beams:
        scorers.append(f"{config.beams} x {config.candidates}, {config.seeds} seeds")
    if judge_params:
        scorers.append(f"{PART} {params_digest(judge_params[PART])}")

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
                is_changed = before and before.facts["data"] != facts["data"]
                if is_changed and name not in changed:
                    warn_of_change(experiment, name)
                    changed.add(name)
                if facts_digest in done:
                    done[facts_digest].copy_to(files)
                else:
                    params = reader.read(row.stage) | judge_params
                    evaluate_set(experiment, row, params, files, cache)
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
                    probe_set(
                        experiment,
                        row,
                        reader.read(row.stage),
                        files,
                        facts_digest,
                        count,
                    )

    # A set's files without a row's name are copies of the last row's.
    time_rows(experiment, completed, reader)
    last_row = completed[-1]
    for name in experiment.tests:
        workdir.set_files(name, last_row.name).copy_to(workdir.set_files(name))

    # The trackers get the figures and some completions, the terminal the headline.
    if hosts.is_first():
        report = write_report(workdir.root)
        experiment.log.report(
            experiment.config.trackers,
            values(experiment.config),
            tracked_figures(report["eval"]),
            tracked_completions(workdir, experiment.tests, last_row.name),
        )
        print(headline_text(report["headline"]))
    hosts.barrier("report")
