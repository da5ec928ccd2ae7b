"""`slpo data PROBLEMS`: how problems are understood, before anything is trained.

PROBLEMS is a file, a directory, a hub id or a generated set, as `slpo train --train=` takes it. Prints how many there
are, how many are left out and why, which fields are the question, the answer and the steps, which are not used, and the
first --limit problems as prompt, steps and answer. --config.data.fields.question=NAME (and answer, steps) names a field
that can't be told.
"""

from typing import get_args

from absl import flags

from slpo_jax.cli.command import parse_flags, run_command, take_keys
from slpo_jax.config.naming import naming
from slpo_jax.errors import UserError
from slpo_jax.rewards.answers import AskedStyle

_FIELDS = "config.data.fields"


def main(argv: list[str]) -> None:
    """The command, after its flags are parsed."""
    argv, fields = take_keys(argv, _FIELDS)
    if len(argv) != 2:
        raise UserError("PROBLEMS: give one source: a file, a directory, a hub id or a generated set")
    from slpo_jax.api.reading import read  # takes seconds, for which --help need not wait
    from slpo_jax.run.sources import problem_lines

    with naming({"config.prompt.answers": "--answers", "fields": f"--{_FIELDS}"}):
        problems = read(argv[1], flags.FLAGS.answers or "", fields)
    print("\n".join([str(problems), *problem_lines(problems[: flags.FLAGS.limit])]))


def _parse(argv: list[str]) -> list[str]:
    rest, fields = take_keys(argv, _FIELDS)
    return [*parse_flags(rest), *(f"--{_FIELDS}.{name}={field}" for name, field in fields.items())]


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    flags.DEFINE_enum("answers", None, get_args(AskedStyle), "How answers are read; default: as the data say.")
    flags.DEFINE_integer("limit", 3, "How many problems are shown.", lower_bound=0)
    run_command(main, _parse, goes_on=False)


if __name__ == "__main__":
    run()
