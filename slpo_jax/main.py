"""`python -m slpo_jax.main --config=configs/NAME.py [--workdir=DIR] [--config.key=value ...]`: run `config.stages`.

Run again with the same workdir, it goes on where it was. Bad input ends with one line and status 2.
"""

import re
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from slpo_jax import config as configs
from slpo_jax.errors import UserError
from slpo_jax.io.files import write_text
from slpo_jax.run.cold_start import run_cold_start
from slpo_jax.run.command import run_command, set_up_jax
from slpo_jax.run.evaluate import run_evaluate
from slpo_jax.run.experiment import build
from slpo_jax.run.imitate import run_imitate
from slpo_jax.run.plan import check_stages
from slpo_jax.run.rl import run_rl

RUN = {"imitate": run_imitate, "cold_start": run_cold_start, "rl": run_rl, "evaluate": run_evaluate}

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. configs/quickstart.py.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and reports go; default runs/NAME of the config.")


def main(_: list[str]) -> None:
    config = _CONFIG.value
    configs.check(config)
    set_up_jax(config.cpu_devices)
    name = Path(config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")[0]).stem
    workdir = Path(_WORKDIR.value or f"runs/{name}").expanduser()
    experiment = build(config, workdir)
    try:
        check_stages(experiment)
        write_text(experiment.workdir.config, config.to_json_best_effort(indent=1) + "\n")
        for stage in config.stages:
            RUN[stage](experiment)
    finally:
        experiment.log.close()
    if experiment.workdir.report_md.exists():
        print(f"report: {experiment.workdir.report_md}")


def _parse(argv: list[str]) -> list[str]:
    """absl's flags, with what can be wrong in them said in one line."""
    given = {arg.partition("=")[0].lstrip("-"): arg.partition("=")[2] for arg in argv[1:]}
    known = ", ".join(sorted(map(str, Path("configs").glob("*.py"))))
    try:
        rest = flags.FLAGS(argv)
        missing = _CONFIG.value is None
        _ = missing or _CONFIG.value.stages  # a file that could not be loaded raises only when it is looked into
    except UserError:
        raise
    except Exception as error:  # the config file is the user's code, and can raise anything
        path = given.get("config", "")
        if isinstance(error, OSError) and not Path(path.partition(":")[0]).is_file():
            raise UserError(f"--config={path}: no such file; give one of {known}") from error
        reason = _reason(error)
        words = set(re.findall(r"\w+", reason))
        unknown = [key for key in given if key.startswith("config.") and words & set(key.split(".")[1:])]
        if isinstance(error, AttributeError | KeyError) and unknown:
            raise UserError(f"{unknown[0]}: unknown config key; {_neighbours(unknown[0])}") from error
        in_flags = isinstance(error, flags.Error) and "Traceback" not in str(error)
        source = "" if in_flags else f"--config={path}: "
        raise UserError(f"{source}{reason}; see slpo_jax/config.py for the keys and their types") from error
    if missing:
        raise UserError(f"--config: not given; give one of {known}")
    return rest


def _reason(error: Exception) -> str:
    """What went wrong in one line: ml_collections adds whole tracebacks and whole configs."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    last = lines[-1] if "Traceback" in str(error) else " ".join(" ".join(lines).split())
    return last.partition(" since the config is locked")[0].strip("'\" ")


def _neighbours(key: str) -> str:
    """The keys that stand where an unknown one was given."""
    node = configs.default_config()
    for part in key.split(".")[1:-1]:
        node = node.get(part) if hasattr(node, "get") else None
    return f"use one of {', '.join(sorted(node))}" if node else "there is no such section"


def run() -> None:
    """The command: one line and status 2 for what the user can mend."""
    run_command(main, _parse)


if __name__ == "__main__":
    run()
