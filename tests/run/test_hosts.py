"""Two processes with two devices each, started as on two machines, against one process with four.

The two have their parameters and their optimizer's state in parts over all four devices, the one has them whole.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from same_run import checkpoint_of, rows_of, texts_of
from small_run import ROOT, new_folder, start_all

pytestmark = pytest.mark.nightly
SHORT = [
    "--config.stages=('imitate','rl','evaluate')", "--config.imitate.control=False", "--config.imitate.cot_steps=0",
    "--config.imitate.final_steps=4", "--config.rl.steps=20", "--config.evaluate.samples=0",
    "--config.evaluate.datasets=('real',)", "--config.checkpoint_every=2",
]  # fmt: skip
FSDP = 4
EXACT = ("reward", "latent_steps", "solved", "mixed", "accuracy")


def _flags(folder: Path, workdir: str, devices: int) -> list[str]:
    sources = {"train": "train.jsonl", "valid": "valid.txt", "eval.real": "real.json"}
    data = [f"--config.data.{key}={folder / file}" for key, file in sources.items()]
    where = [f"--config={folder / 'small.py'}", f"--workdir={folder / workdir}"]
    return [*where, *SHORT, *data, f"--config.cpu_devices={devices}"]


def _wait_for(path: Path, stage: str, step: int, processes: list) -> None:
    """Until the stage has logged the step."""
    for _ in range(4000):
        if path.exists() and f'"step": {step}, "stage": "{stage}"' in path.read_text():
            return
        assert all(process.exitcode is None for process in processes)
        time.sleep(0.05)
    raise TimeoutError(stage)


def _wait(processes: list) -> list[int]:
    """How they end."""
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _determined(path: str, leaf):
    """An array, and how exactly it is determined.

    Softmax cancels the biases of attention's keys, so that their gradient is rounding, which Adam and Adafactor make
    whole steps of. They are left out; and as Adafactor limits the steps of an array together, those of queries and
    values beside them are determined less exactly.
    """
    if (
        not path.endswith("['c_attn']['bias']") or len(leaf) % 3
    ):  # Adafactor keeps sums beside the whole
        return leaf, 1e-5
    queries, _, values = np.split(leaf, 3)
    return np.concatenate([queries, values]), 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_folder(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def alone(folder):
    """By the script that starts it on a machine."""
    command = [
        "bash",
        str(ROOT / "launch" / "one_machine.sh"),
        *_flags(folder, "alone", 4),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "alone"


@pytest.fixture(scope="module")
def together(folder):
    """Stopped by a signal to one of them, killed, and started again each time."""
    work = folder / "two"
    flags = [*_flags(folder, "two", 2), f"--config.sharding.fsdp={FSDP}"]
    first = start_all(2, *flags, folder=folder, output="first")
    _wait_for(work / "metrics.jsonl", "imitate", 2, first)
    os.kill(first[1].pid, signal.SIGTERM)
    stopped = _wait(first)
    second = start_all(2, *flags, folder=folder, output="second")
    _wait_for(work / "metrics.jsonl", "slpo", 9, second)
    for process in second:
        process.kill()
    _wait(second)
    third = start_all(2, *flags, folder=folder, output="third")
    assert _wait(third) == [0, 0], (folder / "third_0.stderr").read_text()
    return work, stopped


def test_a_signal_to_one_stops_all_and_nothing_is_lost(together, folder):
    """By the status of a terminated program, after one and the same step; the rest is the next test's."""
    _, stopped = together
    assert stopped == [128 + signal.SIGTERM] * 2
    said = (folder / "first_0.stdout").read_text() + (
        folder / "first_0.stderr"
    ).read_text()
    assert re.search(
        r"imitate: interrupted at step \d+; the same command goes on", said
    )
    rows = [
        (row["stage"], row["step"], *sorted(row)) for row in rows_of(folder / "two")
    ]
    assert len(rows) == len(set(rows))


def test_it_is_the_same_run(together, alone):
    """Trajectories and rewards exactly, sums over devices as far as their order allows, and the same report."""
    work, _ = together
    ours = rows_of(work)
    theirs = rows_of(alone)
    assert [sorted(row) for row in ours] == [sorted(row) for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        assert {name: row[name] for name in EXACT if name in row} == {
            n: expected[n] for n in EXACT if n in expected
        }
        numbers = [name for name in row if name not in EXACT and name != "stage"]
        np.testing.assert_allclose(
            [row[n] for n in numbers],
            [expected[n] for n in numbers],
            rtol=1e-4,
            atol=1e-6,
        )
    for stage in ("imitate", "slpo"):
        expected = checkpoint_of(alone, stage)
        for path, leaf in checkpoint_of(work, stage).items():
            (ours, exactly), (theirs, _) = (
                _determined(path, leaf),
                _determined(path, expected[path]),
            )
            np.testing.assert_allclose(
                ours, theirs, rtol=1e-4, atol=exactly, err_msg=f"{stage}{path}"
            )


def test_it_writes_the_same_files_once(together, alone):
    work, _ = together
    ours = texts_of(work)
    theirs = texts_of(alone)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if name.endswith(".jsonl"):
            assert ours[name] == theirs[name], name
    config, expected = (json.loads(texts["config.json"]) for texts in (ours, theirs))
    assert config == expected | {
        "cpu_devices": 2,
        "sharding": expected["sharding"] | {"fsdp": FSDP},
    }


STUCK = """
import signal
import time

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(10_000))  # the main thread's end; heartbeats go on
"""


def test_a_process_alive_but_stuck_is_named_and_all_end(folder):
    """By the same line of each process, and the status of other errors."""
    with (folder / "small.py").open() as file:
        (folder / "stuck.py").write_text(file.read() + STUCK)
    flags = [
        f"--config={folder / 'stuck.py'}",
        f"--workdir={folder / 'stuck'}",
        "--config.stages=('imitate',)",
    ]
    flags += [
        f"--config.data.train={folder / 'train.jsonl'}",
        f"--config.data.valid={folder / 'valid.txt'}",
    ]
    flags += [
        "--config.imitate.cot_steps=0",
        "--config.imitate.final_steps=100000",
        "--config.stuck_after=60",
    ]
    processes = start_all(2, *flags, folder=folder, output="stuck")
    _wait_for(folder / "stuck" / "metrics.jsonl", "imitate", 5, processes)
    os.kill(processes[1].pid, signal.SIGUSR1)
    assert _wait(processes) == [2, 2]
    for index in range(2):
        line = (folder / f"stuck_{index}.stderr").read_text().splitlines()[-1]
        assert re.match(rf"error: stuck for 60 s, of 2 processes: process 1 \(.*PID {processes[1].pid}\) after "
                        r"imitate, step \d+; the others wait for it; .*config\.stuck_after", line)  # fmt: skip
