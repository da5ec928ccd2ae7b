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
from slpo_jax.evaluation.records import RolloutCache, write_records
from slpo_jax.evaluation.report import write_report
from slpo_jax.evaluation.report_rows import Row, read_row, write_row, write_rule
from slpo_jax.io import artifact
from slpo_jax.io.files import digest
from slpo_jax.io.orbax import params_digest
from slpo_jax.io.workdir import SetFiles, Workdir
from slpo_jax.models.parts import Params
from slpo_jax.policy.explain import reads_of
from slpo_jax.policy.scorers import PART, SCORERS, begun
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
    finished, config = experiment.finished, experiment.config.evaluate
    for stage in finished:
        check_start(stage)
    check_models(finished)
    if not (asking := _asking(config)):
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
    origin = [experiment.stage("")] * bool(experiment.config.init)
    labels = artifact.read(manifest_of(Workdir(Path(config.reward_model).parent.parent).labels))
    judged = [stage for stage in (*finished, *origin) if stage is not judge and labels]
    digests = [checkpoint_digest(stage, functools.partial(stage_params, stage)) for stage in judged]
    if labels and digests and labels.facts["checkpoint"] not in digests:  # what it says may be of use all the same
        logging.warning(
            "config.evaluate.reward_model: %s judged thoughts of another checkpoint than this run's; what it says of "
            "these may mean nothing", config.reward_model,
        )  # fmt: skip


def _asking(config: EvaluateConfig) -> str:
    """Return the key and the name that ask for a reward model's parameters; "" where none does."""
    keys = [f"config.evaluate.scorers: {name}" for name in config.scorers if SCORERS[name].part]
    keys += [f"config.evaluate.beams: {config.beams}, and {PART}"] * bool(config.beams)
    return keys[0] if keys else ""


def _reward_model(setup: Setup, source: str) -> Params:
    """Read the parameters that judge this reasoner.

    Raises:
        UserError: there are none, or they are of another reasoner.
    """
    everywhere = NamedSharding(setup.mesh, EVERYWHERE)
    shapes = jax.eval_shape(lambda params: begun(params, setup.reasoner.width), setup.abstract_params())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)
    return replicate(read_reward_model(source, setup.checkpoint.description, like), setup.mesh)


def run_evaluate(experiment: Experiment) -> None:
    """Evaluate all rows and write eval/ and the report.

    What is there already is kept if it is whole and of the very same parameters, problems and settings.
    """
    workdir, evaluation = experiment.workdir, _Evaluation(experiment)
    report_rows = [evaluation.bring_up_to_date(row) for row in rows(experiment)]
    evaluation.time(report_rows)
    if hosts.is_first():
        for name in experiment.tests:
            _copy(workdir.set_files(name, report_rows[-1].name), workdir.set_files(name))
        report = write_report(workdir.root)
        config = experiment.config
        completions = [row for name in experiment.tests for row in _some_completions(workdir, name, report_rows[-1])]
        experiment.log.report(config.trackers, values(config), _final_figures(report["eval"]), completions)
    hosts.barrier("report")


def _final_figures(evaluated: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return Acc and Pass@k, shares of 1, by SET/ROW/FIGURE, from the report's figures by row and set."""
    figures = {}
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
    return [{"set": name, "row": row.name} | {key: str(record[key]) for key in columns} for record in records]


class _Evaluation:
    """The evaluation of a run's rows, one after the other.

    Args:
        experiment: the run.
    """

    def __init__(self, experiment: Experiment):
        self._run, self._config = experiment, experiment.config.evaluate
        # What rollouts depend on beside the row's rule, and all that is evaluated of them.
        self._settings = evaluated_settings(experiment.config, experiment.template.more_eos_ids)
        config, self._scoring = self._config, dict[str, Any]()
        if _asking(config):
            folder = str(experiment.stage(PART).folder.path)
            self._scoring = {PART: _reward_model(experiment, config.reward_model or folder)}
        search = [f"{config.beams} x {config.candidates}"] if config.beams else []
        digests = [f"{part} {params_digest(params)}" for part, params in self._scoring.items()]
        sampling = {"samples": config.samples, "seeds": config.used_seeds}
        self._asked = sampling | {"scorers": [*config.scorers, *search, *digests]}
        self._done: dict[str, SetFiles] = {}  # by digest of what they are
        self._changed = set[str]()  # sets of other problems than before
        self._loaded: tuple[str | None, Params] = None, {}

    def _params(self, stage: str) -> Params:
        """Return a stage's parameters, one stage's at a time."""
        if stage != self._loaded[0]:
            self._loaded = None, {}  # the other's, whose memory is needed
            self._loaded = stage, stage_params(self._run.stage(stage))
        return self._loaded[1]

    def bring_up_to_date(self, row: Row) -> Row:
        """Evaluate a row, without what is only known of its checkpoint, where that is not done yet; the whole row."""
        run, config, row = self._run, self._config, self._with_rule(row)
        settings = self._settings | {"stopping": row.stopping, "rule": row.rule}
        if row.latents_a_step:
            settings |= {"latents_a_step": row.latents_a_step}
        trained = trained_with(run.stage(row.stage))
        row = dataclasses.replace(row, settings=trained, shown=reported_settings(trained), evaluation=settings)
        if row.name == row.stage:
            write_rule(run.workdir.stage_folder(row.stage), row, is_as_trained(run.config, row.settings))
        write_row(run.workdir.root, row)  # first, so that no records are taken for this checkpoint's that aren't
        for name in run.tests:
            files, test = run.workdir.set_files(name, row.name), run.test_set(name)
            facts: dict[str, Any] = {"checkpoint": row.checkpoint, "settings": settings} | self._asked
            facts |= problems_facts(test, config.limit) | {"set": name, "left_out": test.problems.left_out}
            what, needed = digest(facts), (files.records.name, *[files.latents.name] * config.save_latents)
            cache = RolloutCache(files.partial, what)
            if not hosts.decided(artifact.is_current(files.manifest, facts, needed)):
                self._say_changed(name, artifact.read(files.manifest), facts)
                if what not in self._done:
                    self._evaluate(row, files, cache)
                elif hosts.is_first():
                    _copy(self._done[what], files)
                artifact.write(files.manifest, facts, files=(files.records, files.latents))
            cache.clear()
            self._done[what] = files
            count = min(config.probed, facts["problems"]) if run.config.max_latents and row.rules != (0,) else 0
            if count and not hosts.decided(len(artifact.value_of(files.thoughts, what) or ()) == count):
                self._probe(row, files, what, count)
        return row

    def time(self, report_rows: list[Row]) -> None:
        """Measure how long an answer of each row takes, all rows anew if one has changed, on the last largest set."""
        run, config = self._run, self._config
        sizes = {name: min(config.limit or len(run.test_set(name)), len(run.test_set(name))) for name in run.tests}
        largest = [name for name, size in sizes.items() if size == max(sizes.values())][-1]
        problems = run.test_set(largest)
        facts = problems_facts(problems, config.limit) | {"set": largest, "batch_size": config.batch_size}
        facts["rows"] = {row.name: [row.checkpoint, row.evaluation] for row in report_rows}
        if hosts.decided(artifact.is_current(run.workdir.times, facts)):
            return
        begin(f"evaluate: milliseconds an answer on {largest}")
        times, batch = dict[str, float](), 0
        for row in report_rows:
            times[row.name], batch = run.evaluator.milliseconds(
                self._params(row.stage), problems, row.stopping, self._rule(row, problems), config.limit
            )
        device = run.mesh.devices
        where = f"{device.size} x {device.flat[0].device_kind}"
        artifact.write(run.workdir.times, facts, {"set": largest, "batch": batch, "device": where, "rows": times})

    def _rule(self, row: Row, problems: EncodedProblems) -> Any:
        """Return the rule of all problems, or of each where it goes by the problem's steps."""
        each = 1 if self._config.by_steps and row.stopping == "length" else row.latents_a_step
        if not each or row.rule is None:
            return row.rule
        evaluated = problems.problems[: self._config.limit or None]
        return [min(int(row.rule), each * len(problem.steps) or int(row.rule)) for problem in evaluated]

    def _say_changed(self, name: str, before: artifact.Artifact | None, facts: Mapping[str, Any]) -> None:
        """Say once of a set that it has other problems than those that were evaluated before."""
        if before and before.facts["data"] != facts["data"] and name not in self._changed and hosts.is_first():
            source = self._run.config.data.eval[name]
            logging.warning("%s%s: %s has changed since its evaluation, or config.evaluate.limit has; it is evaluated "
                            "anew", EVAL, name, source)  # fmt: skip
            self._changed.add(name)

    def _with_rule(self, row: Row) -> Row:
        """Return the row with its checkpoint's digest and its rule, chosen anew if what it depends on has changed."""
        checkpoint = checkpoint_digest(self._run.stage(row.stage), lambda: self._params(row.stage))
        if len(row.rules) == 1:
            return dataclasses.replace(row, checkpoint=checkpoint, rule=row.rules[0])
        valid = problems_facts(self._run.valid, self._config.limit)
        what = digest([checkpoint, valid, self._settings, row.stopping, row.rules])
        before = read_row(self._run.workdir.root, row.name)
        sweep: Mapping[str, Any] = before.sweep if before and before.selected_for == what else {}
        if not hosts.agreed(bool(sweep), self._run.workdir.row_facts(row.name)):
            sweep = self._choose(row, what) | {"problems": valid["problems"]}
        return dataclasses.replace(row, checkpoint=checkpoint, rule=sweep["chosen"], sweep=sweep, selected_for=what)

    def _choose(self, row: Row, what: str) -> dict[str, Any]:
        """Return the rules' validation Acc, and the best rule, ties to the smaller; `what` it all depends on."""
        begin(f"evaluate: the {'number of latents' if row.stopping == 'length' else 'threshold'} of {row.name}")
        cache, params = RolloutCache(self._run.workdir.sweep(row.name), what), self._params(row.stage)
        ascending = sorted(row.rules)
        accuracies = [
            validation_accuracy(self._run, params, row.stopping, rule, cache.having(f"rule {rule}"))
            for rule in ascending
        ]
        cache.clear()
        best = ascending[int(np.argmax(accuracies))]
        return dict(zip(map(str, ascending), accuracies, strict=True)) | {"chosen": best}

    def _evaluate(self, row: Row, files: SetFiles, cache: RolloutCache) -> None:
        run, config, label = self._run, self._config, f"{row.name} on {files.name}"
        params, problems = self._params(row.stage) | self._scoring, run.test_set(files.name)
        begin(f"evaluate: {label}")
        rule = self._rule(row, problems)
        evaluate = functools.partial(
            run.evaluator.run, params, problems, row.stopping, rule, limit=config.limit, name=files.name
        )

        def drawn(seed: int, kind: str, **options: Any):
            return evaluate(seed=seed, label=f"{label}, {kind}", cache=cache.having(kind), **options)

        kind = "greedy with latents" if config.save_latents else "greedy"
        greedy = evaluate(keep_latents=config.save_latents, label=label, cache=cache.having(kind))
        sampled = {seed: drawn(seed, f"seed {seed}", samples=config.samples) for seed in range(config.used_seeds)}
        seeds = range(config.seeds if config.beams else 0)
        searched = {seed: drawn(seed, f"search, seed {seed}", searched=True) for seed in seeds}
        if not hosts.is_first():
            return
        note_cuts(run, label, [greedy, *sampled.values(), *searched.values()])
        write_records(files.records, record_rows(run.reward, problems, greedy, sampled, config.samples, searched))
        files.latents.unlink(missing_ok=True)  # an earlier evaluation's
        if config.save_latents:
            np.savez_compressed(files.latents, latents=greedy["latents"], latent_steps=greedy["latent_steps"])

    def _probe(self, row: Row, files: SetFiles, what: str, count: int) -> None:
        """Roll the first problems out once more, and write down what is seen of their thoughts.

        With as many latents as they had, so that one program does for all rows, however their rollouts stop.
        """
        run, params, label = self._run, self._params(row.stage), f"{row.name} on {files.name}, thoughts"
        with files.records.open(encoding="utf-8") as lines:
            lengths = [json.loads(line)["latent_steps"] for line in itertools.islice(lines, count)]
        options: dict[str, Any] = {"limit": count, "probed": True, "label": label, "name": files.name}
        completions = run.evaluator.run(params, run.test_set(files.name), "length", lengths, **options)
        if hosts.is_first():
            texts = token_texts(run.template, run.reasoner.config.vocab_size)
            thoughts = thought_rows(run.reward, texts, completions, row.gated, reads_of(params))
            artifact.write(files.thoughts, what, list(thoughts))


def _copy(source: SetFiles, target: SetFiles) -> None:
    target.folder.mkdir(parents=True, exist_ok=True)
    for old, new in ((source.records, target.records), (source.latents, target.latents)):
        if old.exists():
            shutil.copyfile(old, new)
        else:
            new.unlink(missing_ok=True)
