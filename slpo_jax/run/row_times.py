"""How long an answer of each row of the report takes: `eval/times.json`."""

from slpo_jax.evaluation.report_rows import Row
from slpo_jax.io import artifact
from slpo_jax.run.experiment import Experiment
from slpo_jax.run.provenance import problems_facts
from slpo_jax.run.train_stage import ParamsReader
from slpo_jax.runtime import hosts
from slpo_jax.runtime.progress import begin


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
            row.rule_for(problems.problems[: config.limit or None], config.by_steps),
            config.limit,
        )
    device = experiment.mesh.devices
    where = f"{device.size} x {device.flat[0].device_kind}"
    value = {"set": largest, "batch": batch, "device": where, "rows": times}
    artifact.write(times_file, facts, value)
