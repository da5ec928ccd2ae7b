"""`slpo eval RUN PROBLEMS`: how often a trained reasoner is right.

PROBLEMS is a file, a directory, a hub id, a generated set such as synthetic:test, or the name of a set of the run.
Prints Acc, the share of right answers without noise, and Pass@k of --samples rollouts with the noise of the run's
evaluation, each with its standard error over problems. --out=FILE.jsonl keeps the records.
"""

from absl import flags

from slpo_jax.cli import reasoner_flags
from slpo_jax.cli.command import run_command, with_first
from slpo_jax.config.naming import FLAGS, naming
from slpo_jax.errors import UserError
from slpo_jax.io.files import to_json


def main(argv: list[str]) -> None:
    """The command, after its flags are parsed."""
    values, argv = flags.FLAGS, with_first("checkpoint", argv)
    if len(argv) != 2 and values.checkpoint:
        raise UserError("PROBLEMS: give one set: a file, a hub id, or the name of a set of the run")
    with naming(FLAGS):
        found = reasoner_flags.load_requested().evaluate(
            argv[-1], values.samples, values.seed, values.reward or None, values.limit
        )
    if values.out:
        from slpo_jax.evaluation.records import write_records

        write_records(values.out, found.records)
    print(to_json(found.summary) if values.json else found)


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    reasoner_flags.define_flags(samples=16)
    flags.adopt_module_key_flags(reasoner_flags)
    flags.DEFINE_integer("limit", 0, "Only the first problems; 0 is all.", lower_bound=0)
    flags.DEFINE_string("reward", "", "A reward that --register registers; default: the answer is the reference.")
    flags.DEFINE_string("out", "", "A .jsonl file to write the records to.")
    run_command(main, goes_on=False)
