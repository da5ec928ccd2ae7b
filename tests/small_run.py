"""The command on a minuscule config, in processes of its own.

A server process imports the package once and is forked for each run, which saves seconds a run and changes nothing: a
fork starts with no backend, flags or arrays.
"""

import atexit
import functools
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# What the package imports when it is needed; transformers imports the modules of its names when they are asked for.
_LATE = ("tensorboardX", "orbax.checkpoint", "transformers.models.auto", "scipy.stats")
_PATIENCE = float(
    os.environ.get("SLPO_TEST_PATIENCE", "800")
)  # seconds for one command, on a busy machine
TOTALS = {"imitate": 44, "imitate_control": 50, "cold_start": 7, "slpo": 6}  # steps

CONFIG = """
from slpo_jax.config import default_config


def get_config():
    config = default_config()
    config.tokenizer = "synthetic:20"
    config.model.update(n_layer=1, n_head=2, n_embd=16, n_positions=40)
    config.max_latents = 3
    config.min_latents = 1
    config.prompt_slots = (20,)
    config.max_answer_tokens = 4
    config.cpu_devices = 2
    config.dropout.rate = 0.3
    config.data.synthetic.update(max_value=20, max_steps=2, train_size=32, valid_size=8, test_size=8)
    config.data.train = "train.jsonl"
    config.data.valid = "valid.txt"
    config.data.eval.real = "real.json"
    config.data.eval.made = "synthetic:test"
    config.imitate.update(
        batch_size=8, c_thought=1, max_latent_stage=1, cot_steps=4, stage_steps=0, final_steps=40,
        final_latents="random", control=True,
    )
    config.imitate.optimizer.update(learning_rate=3e-2, warmup_steps=2)
    config.cold_start.update(batch_size=4, micro_batches=1, trajectories=2, steps=7, evaluate_every=3)
    config.cold_start.optimizer.update(name="adamw", learning_rate=1e-1)
    # Sampled answers: greedy ones of so small a model may all be right or all wrong, and then nothing is learned.
    config.rl.update(batch_size=4, steps=6, group=4, temperature=1.0, capacities=((1.0, 1.0),))
    config.objective.slpo.passes = 2
    config.objective.slpo.latent_reduction = "mean"
    config.rl.optimizer.update(name="adafactor", learning_rate=1e-3, warmup_steps=0)
    config.evaluate.update(batch_size=32, limit=6, samples=2, prompt_multiple=20, seeds=2, thresholds=(0.5, 0.9),
                           scorers=("likelihood",))
    config.log_every = 1
    config.checkpoint_every = 20
    return config
"""


def write_problems(folder: Path) -> None:
    """Sums of 3 or 4, so that a model is right now and then after a few steps: a .jsonl, a .txt and a .json file."""
    people = ("Tom", "Ben", "Sam", "Leo")
    sums = ((1, 2), (2, 1), (1, 3), (3, 1), (2, 2))
    things = ("apples", "pens", "books", "cards", "shells", "coins", "cups", "toys")
    problems = [
        (f"{person} has {a} {thing} . He buys {b} . How many now ?", f"{a} + {b} = {a + b}", a + b)
        for person in people for thing in things for a, b in sums
    ]  # fmt: skip
    problems = [
        problems[i] for i in np.random.default_rng(0).permutation(len(problems))
    ]
    train = problems[:136]
    valid = problems[136:148]
    real = problems[148:]
    records = [
        {"question": question, "steps": [step], "answer": str(answer)}
        for question, step, answer in train
    ]
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    (folder / "valid.txt").write_text(
        "".join(f"{question}|| #### {answer}\n" for question, _, answer in valid)
    )
    records = [
        {"question": question, "answer": f"{answer}.0"} for question, _, answer in real
    ]
    (folder / "real.json").write_text(json.dumps(records))


def _child(argv: list[str], folder: str, output: str) -> None:
    """The command in a forked process, its output in two files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.chdir(folder)
    from slpo_jax.cli.command import run_command
    from slpo_jax.cli.train import train

    try:
        run_command(train, argv, goes_on=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without: the processes of one run would not part together


@functools.cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["slpo_jax.cli.train", "slpo_jax.run.run_stages", *_LATE]
    )
    return context


@dataclass
class Finished:
    """How a run ended."""

    status: int
    stdout: str
    stderr: str


def start(*arguments: str, folder: Path, output: str = "output"):
    """`python -m slpo_jax.main ARGUMENTS` in a folder, in the background.

    Args:
        output: what it says is in the folder's OUTPUT.stdout and OUTPUT.stderr.
    """
    output = str(folder / output)
    process = _server().Process(target=_child, args=([*arguments], str(folder), output))
    process.start()
    return process


def start_all(processes: int, *arguments: str, folder: Path, output: str) -> list:
    """The processes of one run, as on several machines; the output of each is in OUTPUT_0, .."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = [*arguments, f"--coordinator=localhost:{port}", f"--processes={processes}"]
    names = [(f"--process={index}", f"{output}_{index}") for index in range(processes)]
    return [
        start(*flags, process, folder=folder, output=name) for process, name in names
    ]


def run(*arguments: str, folder: Path, status: int | None = 0) -> Finished:
    """`python -m slpo_jax.main ARGUMENTS` in a folder; see `start`.

    Args:
        status: that it has to end with; None is any.
    """
    process = start(*arguments, folder=folder)
    process.join(_PATIENCE)
    if process.exitcode is None:
        process.kill()
    done = Finished(
        process.exitcode,
        *((folder / f"output.{name}").read_text() for name in ("stdout", "stderr")),
    )
    assert status in (None, done.status), done.stderr[-3000:]
    return done


def new_folder(parent: Path | None = None) -> Path:
    """A folder with the config and its problems."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    (folder / "small.py").write_text(CONFIG)
    write_problems(folder)
    return folder


def load_config():
    """The small config in this process, with problems in a folder of its own."""
    folder = _folder_of_this_process()
    namespace = {}
    exec(CONFIG, namespace)
    config = namespace["get_config"]()
    config.data.update(
        train=str(folder / "train.jsonl"), valid=str(folder / "valid.txt")
    )
    config.data.eval.real = str(folder / "real.json")
    return config


@functools.cache
def _folder_of_this_process() -> Path:
    folder = new_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def finished_run() -> Path:
    """The folder of a run that nobody interrupted, in `work/`, through the real command; read it, don't touch it.

    pytest-xdist's workers share it.
    """
    runs = Path(os.environ["SLPO_TEST_RUNS"])
    known = runs / "finished"
    with filelock.FileLock(runs / "finished.lock"):
        if not known.exists():
            known.write_text(str(_finish(new_folder(runs))))
    return Path(known.read_text())


def _finish(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "slpo_jax.main",
        "--config=small.py",
        "--workdir=work",
    ]
    environment = os.environ | {"JAX_LOG_COMPILES": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def train(experiment, *sections: str) -> None:
    """The stages of these sections that a config asks for; none is all."""
    from slpo_jax.run.run_stages import prepare, run_stage

    for stage in experiment.wanted:
        if not sections or stage.section in sections:
            run_stage(stage, prepare(stage))
