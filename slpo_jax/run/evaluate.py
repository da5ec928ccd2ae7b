"""The evaluate stage: every row of the report on every data set, then the report itself."""

import dataclasses
import functools
import itertools
import json
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from slpo_jax.checkpoints.decode_settings import made_like
from slpo_jax.data.templates import token_texts
from slpo_jax.evaluation.completions import record_rows, thought_rows
from slpo_jax.evaluation.records import RolloutCache, write_records
from slpo_jax.evaluation.report import write_report
from slpo_jax.evaluation.rows import Row, read_row, write_row, write_rule
from slpo_jax.io import artifact, hosts
from slpo_jax.io.files import digest
from slpo_jax.io.progress import begin
from slpo_jax.io.workdir import SetFiles
from slpo_jax.policy.explain import reads_of
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.provenance import check_models, check_starts, checkpoint_digest, evaluated_settings, problems_facts
from slpo_jax.run.rows import reported_settings, rows, trained_with
from slpo_jax.run.scoring import check_scorers, scorers_digests, scorers_params
from slpo_jax.run.select import choose, note_cuts
from slpo_jax.run.sources import sets_to_evaluate
from slpo_jax.run.stage import Params, stage_params


class _Checkpoints:
    """The parameters of one stage at a time, read when they are asked for."""

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._stage: str | None = None
        self._params: Params = {}

    def __call__(self, stage: str) -> Params:
        if stage != self._stage:
            self._params = {}  # the other's, whose memory is needed
            self._params = stage_params(self._experiment, stage)
            self._stage = stage
        return self._params


def check_evaluation(experiment: Experiment) -> None:
    """Fail before the first stage on rows that could not be evaluated after the last.

    Raises:
        UserError: the key or the stage, and what differs.
    """
    check_starts(experiment)
    check_models(experiment, experiment.workdir.finished_stages())
    check_scorers(experiment)


def run_evaluate(experiment: Experiment) -> None:
    """Evaluate all rows and write eval/ and the report.

    What is there already is kept if it is whole and of the very same parameters, problems and settings.
    """
    names, workdir, own = sets_to_evaluate(experiment.config), experiment.workdir, rows(experiment)
    load, done, scoring = _Checkpoints(experiment), dict[str, SetFiles](), scorers_params(experiment)
    for row in own:
        _evaluate_row(experiment, row, names, load, done, scoring)
    if hosts.is_first():
        for name in names:
            _copy(workdir.set_files(name, own[-1].name), workdir.set_files(name))
        write_report(workdir.root)
    hosts.barrier("report")


def _evaluate_row(
    experiment: Experiment,
    row: Row,
    names: tuple[str, ...],
    load: _Checkpoints,
    done: dict[str, SetFiles],
    scoring: Params,
) -> None:
    """Bring a row up to date.

    Args:
        experiment: the run.
        row: without what is only known of its checkpoint.
        names: of the data sets.
        load: stage -> parameters.
        done: files by digest of what they are, of the rows before and then also of this one.
        scoring: parameters of the scorers' own.
    """
    config, row = experiment.config.evaluate, _choose_rule(experiment, row, load)
    settings = _settings(experiment) | {"stopping": row.stopping, "rule": row.rule}
    shared: dict[str, Any] = {"checkpoint": row.checkpoint, "settings": settings, "samples": config.samples}
    shared |= {"seeds": config.used_seeds, "scorers": scorers_digests(config, scoring)}
    trained = trained_with(experiment, row.stage)
    row = dataclasses.replace(row, settings=trained, shown=reported_settings(trained), evaluation=settings)
    if row.name == row.stage:
        write_rule(experiment.workdir.stage(row.stage), row, made_like(experiment.config, row.settings))
    write_row(experiment.workdir.root, row)  # first, so that no records are taken for this checkpoint's that aren't
    for name in names:
        files, test = experiment.workdir.set_files(name, row.name), experiment.test_set(name)
        facts = shared | problems_facts(test, config.limit) | {"set": name, "left_out": test.left_out}
        what, wanted = digest(facts), (files.records.name, *[files.latents.name] * config.save_latents)
        if not hosts.decided(artifact.is_current(files.manifest, facts, wanted)):
            if what not in done:
                _evaluate_set(experiment, row, load(row.stage) | scoring, files, RolloutCache(files.partial, what))
            elif hosts.is_first():
                _copy(done[what], files)
            artifact.write(files.manifest, facts, files=(files.records, files.latents))
        RolloutCache(files.partial, what).clear()
        done[what] = files
        count = min(config.probed, facts["problems"]) if experiment.config.max_latents and row.rules != (0,) else 0
        if count and not hosts.decided(len(artifact.value_of(files.thoughts, what) or ()) == count):
            _probe_set(experiment, row, load(row.stage), files, what, count)


def _choose_rule(experiment: Experiment, row: Row, load: _Checkpoints) -> Row:
    """The row with its checkpoint's digest and its rule, chosen anew where what it was chosen for has changed."""
    checkpoint = checkpoint_digest(experiment, row.stage, lambda: load(row.stage))
    if len(row.rules) == 1:
        return dataclasses.replace(row, checkpoint=checkpoint, rule=row.rules[0])
    valid = problems_facts(experiment.valid, experiment.config.evaluate.limit)
    selected_for = digest([checkpoint, valid, _settings(experiment), row.stopping, row.rules])
    before = read_row(experiment.workdir.root, row.name)
    sweep: Mapping[str, Any] = before.sweep if before and before.selected_for == selected_for else {}
    if not hosts.decided(bool(sweep)):
        sweep = choose(experiment, row.name, load(row.stage), row.stopping, list(row.rules), selected_for)
    return dataclasses.replace(row, checkpoint=checkpoint, rule=sweep["chosen"], sweep=sweep, selected_for=selected_for)


def _settings(experiment: Experiment) -> dict[str, Any]:
    return evaluated_settings(experiment.config, experiment.template.more_eos_ids)


def _copy(source: SetFiles, target: SetFiles) -> None:
    target.folder.mkdir(parents=True, exist_ok=True)
    for old, new in ((source.records, target.records), (source.latents, target.latents)):
        if old.exists():
            shutil.copyfile(old, new)
        else:
            new.unlink(missing_ok=True)


def _evaluate_set(experiment: Experiment, row: Row, params: Any, files: SetFiles, cache: RolloutCache) -> None:
    config, problems = experiment.config.evaluate, experiment.test_set(files.name)
    label, latents = f"{row.name} on {files.name}", config.save_latents
    assert row.rule is not None
    begin(f"evaluate: {label}")
    rule: Any = row.rule
    if config.by_steps and row.stopping == "length":
        rule = [min(rule, len(each.steps) or rule) for each in problems.problems[: config.limit or None]]
    evaluate = functools.partial(
        experiment.evaluator.run, params, problems, row.stopping, rule, limit=config.limit, name=files.name
    )
    greedy_cache = cache.having("greedy with latents" if latents else "greedy")
    greedy = evaluate(keep_latents=latents, label=label, cache=greedy_cache)
    sampled = {}
    for seed in range(config.used_seeds):
        name = f"seed {seed}"
        sampled[seed] = evaluate(seed=seed, samples=config.samples, label=f"{label}, {name}", cache=cache.having(name))
    searched = {}
    for seed in range(config.seeds if config.beams else 0):
        name = f"search, seed {seed}"
        searched[seed] = evaluate(seed=seed, searched=True, label=f"{label}, {name}", cache=cache.having(name))
    if not hosts.is_first():
        return
    note_cuts(experiment, label, [greedy, *sampled.values(), *searched.values()])
    found = record_rows(experiment.reward, problems, greedy, sampled, config.samples, searched)
    write_records(files.records, found)
    files.latents.unlink(missing_ok=True)  # an earlier evaluation's
    if latents:
        np.savez_compressed(files.latents, latents=greedy.values["latents"], latent_steps=greedy.latent_steps)


def _probe_set(experiment: Experiment, row: Row, params: Any, files: SetFiles, what: str, count: int) -> None:
    """Roll the first problems out once more, and write down what is seen of their thoughts.

    With as many latents as they had, so that one program does for all rows, however their rollouts stop.
    """
    problems, label = experiment.test_set(files.name), f"{row.name} on {files.name}, thoughts"
    with files.records.open(encoding="utf-8") as lines:
        lengths = [json.loads(line)["latent_steps"] for line in itertools.islice(lines, count)]
    seen = experiment.evaluator.run(
        params, problems, "length", lengths, limit=count, probed=True, label=label, name=files.name
    )
    if hosts.is_first():
        texts = token_texts(experiment.template, experiment.reasoner.config.vocab_size)
        rows_seen = thought_rows(experiment.reward, texts, seen, row.gated, reads_of(params))
        artifact.write(files.thoughts, what, list(rows_seen))
