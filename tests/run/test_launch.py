"""The scripts in launch/ parse, pass their arguments on, and queue a SLURM job that runs out of time again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "launch" / "one_machine.sh"
SLURM = ROOT / "launch" / "slurm.sbatch"
ARGUMENTS = ["--config=configs/coconut_gpt2.py", "--workdir=runs/a b", "--config.rl.steps=3"]


def _run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(script), *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("script", [MACHINE, SLURM, ROOT / ".ci" / "run"], ids=lambda script: script.name)
def test_script_parses(script):
    result = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("script", [MACHINE, SLURM], ids=lambda script: script.name)
def test_dry_run_prints_the_command(script, tmp_path):
    result = _run(script, *ARGUMENTS, DRY_RUN="1", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "xla"), PYTHON="python")
    assert result.returncode == 0, result.stderr
    expected = r"python -m slpo_jax.main --config=configs/coconut_gpt2.py --workdir=runs/a\ b --config.rl.steps=3"
    assert result.stdout.strip().endswith(expected)
    assert f"JAX_COMPILATION_CACHE_DIR={tmp_path / 'xla'} " in result.stdout
    assert not (tmp_path / "xla").exists()


def test_one_machine_runs_the_program_in_the_checkout(tmp_path):
    fake = tmp_path / "fake"
    fake.write_text('#!/usr/bin/env bash\npwd; printf "%s|" "$@"; exit 7\n')
    fake.chmod(0o755)
    result = _run(MACHINE, *ARGUMENTS, PYTHON=str(fake), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "xla"))
    assert result.stdout == f"{ROOT}\n" + "|".join(["-m", "slpo_jax.main", *ARGUMENTS, ""])
    assert result.returncode == 7
    assert (tmp_path / "xla").is_dir()


@pytest.mark.parametrize(("nodes", "flags"), [("1", ""), ("2", " --distributed")])
def test_slurm_starts_a_process_a_node_and_tells_them_of_each_other(tmp_path, nodes, flags):
    result = _run(SLURM, *ARGUMENTS, DRY_RUN="1", SLURM_NNODES=nodes, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "xla"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("srun --ntasks-per-node=1 --kill-on-bad-exit=1 ")
    assert result.stdout.endswith(f"--config.rl.steps=3{flags} \n")


def test_slurm_wants_a_workdir():
    result = _run(SLURM, "--config=configs/coconut_gpt2.py", DRY_RUN="1")
    assert result.returncode == 2
    assert result.stderr.startswith("--workdir: ")
    assert result.stderr.count("\n") == 1


def _slurm_job(tmp_path: Path, program: str, *, out_of_time: bool) -> tuple[int, bool]:
    """Runs the job under stand-ins for Slurm's programs; gives its exit status and whether it was queued again."""
    programs = {"srun": 'shift 2; exec "$@"', "scontrol": f'echo "$@" > {tmp_path}/queued', "fake": program}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "fake"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "42",
        "STARTED": str(tmp_path / "started"),
    }
    job = subprocess.Popen(["bash", str(SLURM), *ARGUMENTS], env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while out_of_time and not (tmp_path / "started").exists():
            assert time.monotonic() < deadline, "the program did not start"
            time.sleep(0.02)
        if out_of_time:
            job.send_signal(signal.SIGUSR1)
        status = job.wait(timeout=30)
    finally:
        job.kill()
    queued = tmp_path / "queued"
    return status, queued.exists() and queued.read_text() == "requeue 42\n"


BUSY = 'touch "$STARTED"; for _ in $(seq 200); do sleep 0.1; done'


@pytest.mark.parametrize(
    ("program", "out_of_time", "status", "queued"),
    [
        ("exit 0", False, 0, False),
        ("exit 2", False, 2, False),  # a mistake in the config would only come back
        (BUSY, True, 0, True),
        (f"trap 'sleep 0.5; exit 143' TERM; {BUSY}", True, 0, True),  # writes a last checkpoint first
        (f"trap 'exit 0' TERM; {BUSY}", True, 0, False),  # was done
    ],
    ids=["finishes", "fails", "killed", "stops", "just finishes"],
)
def test_slurm_job_is_queued_again_only_when_out_of_time(tmp_path, program, out_of_time, status, queued):
    assert _slurm_job(tmp_path, program, out_of_time=out_of_time) == (status, queued)
