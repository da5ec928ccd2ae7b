"""The evaluate stage: every row of the report on every data set, then the report itself."""

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
from slpo_jax.evaluation.report_rows import Row, read_row, write_row, write_rule
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


def check_evaluation(experiment: Experiment) -> None:
    """Fail before the first stage on rows that could not be evaluated after the last.

    Raises:
        UserError: the key or the stage, and what differs; or a scorer's parameters will not be there, or are of another
            reasoner.
    """
    finished = experiment.finished
    config = experiment.config.evaluate
    for stage in finished:
        check_start(stage)
    check_models(finished)

    # Scorers and beams may need the parameters of a reward model: this run's, or those of another workdir.
    asking = _name_what_asks(config)
    if not asking:
        return
    judge = experiment.stage(PART)
    if not config.reward_model:
        if not (judge.folder.is_finished or judge.wanted):
            raise UserError(
                f"{asking} has parameters of its own, and {experiment.workdir} has none; put {PART} into "
                "config.stages, or give config.evaluate.reward_model"
            )
        return
    _reward_model(experiment, config.reward_model)

    # Another workdir's was trained on thoughts of a checkpoint; what it says of others' may be of use all the same.
    folder = Workdir(Path(config.reward_model).parent.parent)
    labels = artifact.read(manifest_of(folder.labels))
    if not labels:
        return
    judged = [stage for stage in finished if stage is not judge]
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


def _name_what_asks(config: EvaluateConfig) -> str:
    """Return the key and the name that ask for a reward model's parameters; "" where none does."""
    for name in config.scorers:
        if SCORERS[name].part:
            return f"config.evaluate.scorers: {name}"
    if config.beams:
        return f"config.evaluate.beams: {config.beams}, and {PART}"
    return ""


def _reward_model(setup: Setup, source: str) -> Params:
    """Read the parameters that judge this reasoner.

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
    return replicate(
        read_reward_model(source, setup.checkpoint.description, like), setup.mesh
    )


def run_evaluate(experiment: Experiment) -> None:
    """Evaluate all rows and write eval/ and the report.

    What is there already is kept if it is whole and of the very same parameters, problems and settings.
    """
    workdir = experiment.workdir
    evaluation = _Evaluation(experiment)
    report_rows = [evaluation.evaluate_row(row) for row in rows(experiment)]
    evaluation.time(report_rows)
    if hosts.is_first():
        for name in experiment.tests:
            _copy(
                workdir.set_files(name, report_rows[-1].name), workdir.set_files(name)
            )
        report = write_report(workdir.root)

        # The trackers get the figures and some completions, the terminal the headline.
        config = experiment.config
        completions = []
        for name in experiment.tests:
            completions += _some_completions(workdir, name, report_rows[-1])
        figures = _final_figures(report["eval"])
        experiment.log.report(config.trackers, values(config), figures, completions)
        print(headline_text(report["headline"]))
    hosts.barrier("report")


def _final_figures(
    evaluated: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, float]:
    """Return Acc and Pass@k, shares of 1, by SET/ROW/FIGURE, from the report's figures by row and set."""
    figures: dict[str, float] = {}
    for row, sets in evaluated.items():
        for name, found in sets.items():
            shown = [key for key in found if re.fullmatch(r"acc|pass@\d+", key)]
            figures |= {f"{name}/{row}/{key}": float(found[key]) for key in shown}
    return figures


def _some_completions(workdir: Workdir, name: str, row: Row) -> list[dict[str, str]]:
    """Return a row's first answers without noise to a set's problems, as texts by column, for the trackers."""
    with workdir.set_files(name, row.name).records.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in itertools.islice(lines, _COMPLETIONS)]
    columns = ("question", "completion", "reference", "correct")
    return [
        {"set": name, "row": row.name} | {key: str(record[key]) for key in columns}
        for record in records
    ]


class _Evaluation:
    """The evaluation of a run's rows, one after the other.

    Args:
        experiment: the run.
    """

    def __init__(self, experiment: Experiment):
        self._run = experiment
        config = experiment.config.evaluate
        self._config = config

        # What rollouts depend on beside the row's rule.
        self._settings = evaluated_settings(
            experiment.config, experiment.template.more_eos_ids
        )

        # All that is evaluated of them, with the digest of the reward model that judges.
        scorers = [*config.scorers]
        if config.beams:
            scorers.append(f"{config.beams} x {config.candidates}")
        self._scoring: Params = {}
        if _name_what_asks(config):
            folder = str(experiment.stage(PART).folder.path)
            judge = _reward_model(experiment, config.reward_model or folder)
            self._scoring = {PART: judge}
            scorers.append(f"{PART} {params_digest(judge)}")
        self._asked = {
            "samples": config.samples,
            "seeds": config.used_seeds,
            "scorers": scorers,
        }

        # What was done by now.
        self._done: dict[str, SetFiles] = {}  # by digest of what they are
        self._changed = set[str]()  # sets of other problems than before
        self._loaded: tuple[str | None, Params] = None, {}

    def _params(self, stage: str) -> Params:
        """Return a stage's parameters, one stage's at a time."""
        if stage != self._loaded[0]:
            self._loaded = None, {}  # the other's, whose memory is needed
            self._loaded = stage, stage_params(self._run.stage(stage))
        return self._loaded[1]

    def evaluate_row(self, row: Row) -> Row:
        """Evaluate a row, without what is only known of its checkpoint, where that is not done yet; the whole row."""
        run = self._run
        config = self._config

        # The row says what it depends on. It is written first, so that no records are taken for this checkpoint's that
        # aren't.
        row = self._choose_rule(row)
        settings = self._settings | {"stopping": row.stopping, "rule": row.rule}
        if row.latents_a_step:
            settings |= {"latents_a_step": row.latents_a_step}
        trained = trained_with(run.stage(row.stage))
        row = dataclasses.replace(
            row, settings=trained, shown=reported_settings(trained), evaluation=settings
        )
        if row.name == row.stage:
            stage_folder = run.workdir.stage_folder(row.stage)
            as_trained = is_as_trained(run.config, row.settings)
            write_rule(stage_folder, row, as_trained)
        write_row(run.workdir.root, row)

        for name in run.tests:
            files = run.workdir.set_files(name, row.name)
            test = run.test_set(name)
            facts: dict[str, Any] = {
                "checkpoint": row.checkpoint,
                "settings": settings,
                **self._asked,
                **problems_facts(test, config.limit),
                "set": name,
                "left_out": test.problems.left_out,
            }
            what = digest(facts)

            # Rollouts of the same checkpoint, problems and settings are those of an earlier run, or row.
            needed = [files.records.name]
            if config.save_latents:
                needed.append(files.latents.name)
            cache = RolloutCache(files.partial, what)
            if not hosts.broadcast_flag(
                artifact.is_current(files.manifest, facts, needed)
            ):
                self._say_changed(name, artifact.read(files.manifest), facts)
                if what not in self._done:
                    self._evaluate(row, files, cache)
                elif hosts.is_first():
                    _copy(self._done[what], files)
                artifact.write(
                    files.manifest, facts, files=(files.records, files.latents)
                )
            cache.clear()
            self._done[what] = files

            # What is seen of some thoughts, where there are any.
            if not run.config.max_latents or row.rules == (0,):
                continue
            count = min(config.probed, facts["problems"])
            probed = artifact.value_of(files.thoughts, what) or ()
            if count and not hosts.broadcast_flag(len(probed) == count):
                self._probe(row, files, what, count)
        return row

    def time(self, report_rows: list[Row]) -> None:
        """Measure how long an answer of each row takes, all rows anew if one has changed, on the last largest set."""
        run = self._run
        config = self._config
        sizes = {}
        for name in run.tests:
            size = len(run.test_set(name))
            sizes[name] = min(config.limit or size, size)
        largest = max(reversed(sizes), key=sizes.__getitem__)
        problems = run.test_set(largest)

        # All rows' times are of one machine and one program.
        facts = problems_facts(problems, config.limit)
        facts["set"] = largest
        facts["batch_size"] = config.batch_size
        facts["rows"] = {}
        for row in report_rows:
            facts["rows"][row.name] = [row.checkpoint, row.evaluation]
        if hosts.broadcast_flag(artifact.is_current(run.workdir.times, facts)):
            return
        begin(f"evaluate: milliseconds an answer on {largest}")
        times = dict[str, float]()
        batch = 0
        for row in report_rows:
            times[row.name], batch = run.evaluator.milliseconds(
                self._params(row.stage),
                problems,
                row.stopping,
                self._rule(row, problems),
                config.limit,
            )
        device = run.mesh.devices
        where = f"{device.size} x {device.flat[0].device_kind}"
        value = {"set": largest, "batch": batch, "device": where, "rows": times}
        artifact.write(run.workdir.times, facts, value)

    def _rule(self, row: Row, problems: EncodedProblems) -> Any:
        """Return the rule of all problems, or of each where it goes by the problem's steps."""
        each = row.latents_a_step
        if self._config.by_steps and row.stopping == "length":
            each = 1
        if not each or row.rule is None:
            return row.rule
        most = int(row.rule)
        rules = []
        for problem in problems.problems[: self._config.limit or None]:
            rules.append(min(most, each * len(problem.steps) or most))
        return rules

    def _say_changed(
        self, name: str, before: artifact.Artifact | None, facts: Mapping[str, Any]
    ) -> None:
        """Say once of a set that it has other problems than those that were evaluated before."""
        if not before or before.facts["data"] == facts["data"]:
            return
        if name in self._changed or not hosts.is_first():
            return
        logging.warning(
            "%s%s: %s has changed since its evaluation, or config.evaluate.limit has; it is evaluated anew",
            EVAL,
            name,
            self._run.config.data.eval[name],
        )
        self._changed.add(name)

    def _choose_rule(self, row: Row) -> Row:
        """Return the row with its checkpoint's digest and its rule, chosen anew if what it depends on has changed."""
        checkpoint = checkpoint_digest(
            self._run.stage(row.stage), lambda: self._params(row.stage)
        )
        if len(row.rules) == 1:
            return dataclasses.replace(row, checkpoint=checkpoint, rule=row.rules[0])

        # What was chosen before stays, if everything that it depends on is what it was.
        valid = problems_facts(self._run.valid, self._config.limit)
        what = digest([checkpoint, valid, self._settings, row.stopping, row.rules])
        before = read_row(self._run.workdir.root, row.name)
        sweep: Mapping[str, Any] = {}
        if before and before.selected_for == what:
            sweep = before.sweep
        if not hosts.all_processes_agree(
            bool(sweep), self._run.workdir.row_facts(row.name)
        ):
            sweep = self._sweep(row, what) | {"problems": valid["problems"]}
        return dataclasses.replace(
            row,
            checkpoint=checkpoint,
            rule=sweep["chosen"],
            sweep=sweep,
            selected_for=what,
        )

    def _sweep(self, row: Row, what: str) -> dict[str, Any]:
        """Return the rules' validation Acc, and the best rule, ties to the smaller; `what` it all depends on."""
        rule_name = "number of latents" if row.stopping == "length" else "threshold"
        begin(f"evaluate: the {rule_name} of {row.name}")
        cache = RolloutCache(self._run.workdir.sweep(row.name), what)
        params = self._params(row.stage)
        ascending = sorted(row.rules)
        accuracies = {}
        for rule in ascending:
            rollouts = cache.for_pass(f"rule {rule}")
            accuracies[str(rule)] = validation_accuracy(
                self._run, params, row.stopping, rule, rollouts
            )
        cache.clear()
        best = ascending[int(np.argmax([*accuracies.values()]))]
        return accuracies | {"chosen": best}

    def _evaluate(self, row: Row, files: SetFiles, cache: RolloutCache) -> None:
        """Roll out greedily, with samples and by search, and write the records of it."""
        run = self._run
        config = self._config
        label = f"{row.name} on {files.name}"
        params = self._params(row.stage) | self._scoring
        problems = run.test_set(files.name)
        begin(f"evaluate: {label}")
        rule = self._rule(row, problems)
        evaluate = functools.partial(
            run.evaluator.run,
            params,
            problems,
            row.stopping,
            rule,
            limit=config.limit,
            name=files.name,
        )

        kind = "greedy with latents" if config.save_latents else "greedy"
        greedy = evaluate(
            keep_latents=config.save_latents, label=label, cache=cache.for_pass(kind)
        )
        sampled = {}
        for seed in range(config.used_seeds):
            kind = f"seed {seed}"
            sampled[seed] = evaluate(
                seed=seed,
                label=f"{label}, {kind}",
                cache=cache.for_pass(kind),
                samples=config.samples,
            )
        searched = {}
        for seed in range(config.seeds if config.beams else 0):
            kind = f"search, seed {seed}"
            searched[seed] = evaluate(
                seed=seed,
                label=f"{label}, {kind}",
                cache=cache.for_pass(kind),
                searched=True,
            )

        # What is written, the first process writes.
        if not hosts.is_first():
            return
        note_cuts(run, label, [greedy, *sampled.values(), *searched.values()])
        records = record_rows(
            run.reward, problems, greedy, sampled, config.samples, searched
        )
        write_records(files.records, records)
        files.latents.unlink(missing_ok=True)  # an earlier evaluation's
        if config.save_latents:
            np.savez_compressed(
                files.latents,
                latents=greedy["latents"],
                latent_steps=greedy["latent_steps"],
            )

    def _probe(self, row: Row, files: SetFiles, what: str, count: int) -> None:
        """Roll the first problems out once more, and write down what is seen of their thoughts.

        With as many latents as they had, so that one program does for all rows, however their rollouts stop.
        """
        run = self._run
        params = self._params(row.stage)
        label = f"{row.name} on {files.name}, thoughts"
        lengths = []
        with files.records.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, count):
                lengths.append(json.loads(line)["latent_steps"])
        completions = run.evaluator.run(
            params,
            run.test_set(files.name),
            "length",
            lengths,
            limit=count,
            probed=True,
            label=label,
            name=files.name,
        )
        if hosts.is_first():
            texts = token_texts(run.template, run.reasoner.config.vocab_size)
            thoughts = thought_rows(
                run.reward, texts, completions, row.gated, reads_of(params)
            )
            artifact.write(files.thoughts, what, list(thoughts))


def _copy(source: SetFiles, target: SetFiles) -> None:
    """Copy a row's records of a set, and its latents if there are any."""
    target.folder.mkdir(parents=True, exist_ok=True)
    pairs = ((source.records, target.records), (source.latents, target.latents))
    for old, new in pairs:
        if old.exists():
            shutil.copyfile(old, new)
        else:
            new.unlink(missing_ok=True)
