"""The scripts in launch/ parse, pass their arguments on, and queue a SLURM job that runs out of time again."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

import carry
from benchmarks import real

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "launch" / "one_machine.sh"
SLURM = ROOT / "launch" / "slurm.sbatch"
TPU = ROOT / "launch" / "tpu.sh"
REAL = ROOT / "launch" / "real_gpu.sh"
ARGUMENTS = [
    "--config=configs/coconut_gpt2.py",
    "--workdir=runs/a b",
    "--config.rl.steps=3",
]


def _run(
    script: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


PROGRAM = r"python -m slpo_jax.main --config=configs/coconut_gpt2.py --workdir=runs/a\ b --config.rl.steps=3"
OTHERS = {"COORDINATOR": "first:8476", "PROCESSES": "2", "PROCESS": "1"}


@pytest.mark.parametrize(
    ("script", "environment", "begins", "flags"),
    [
        (MACHINE, {}, "", ""),
        (MACHINE, OTHERS, "", " --coordinator=first:8476 --processes=2 --process=1 "),
        (
            SLURM,
            {"SLURM_NNODES": "1"},
            "srun --ntasks-per-node=1 --kill-on-bad-exit=1 ",
            "",
        ),
        (
            SLURM,
            {"SLURM_NNODES": "2"},
            "srun --ntasks-per-node=1 --kill-on-bad-exit=1 ",
            " --distributed ",
        ),
    ],
)
def test_dry_run_prints_the_command(script, environment, begins, flags, tmp_path):
    """A process a node, which are told of each other."""
    known = {
        "DRY_RUN": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
        "PYTHON": "python",
    }
    result = _run(script, *ARGUMENTS, **known | environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(begins)
    assert result.stdout.rstrip().endswith((PROGRAM + flags).rstrip())
    assert f"JAX_COMPILATION_CACHE_DIR={tmp_path / 'xla'} " in result.stdout
    assert not (tmp_path / "xla").exists()


@pytest.mark.parametrize("step", ["prepare", "first", "go"])
def test_a_real_model_s_commands_take_their_flags(step, monkeypatch, capsys):
    """Each that is printed is a command of the checkout, whose own parser takes what it is given."""
    more = {"prepare": ["--train=x.jsonl"], "go": ["480", "--task=countdown"]}.get(
        step, []
    )
    result = _run(REAL, step, *more, DRY_RUN="1", OUT=str(ROOT))
    assert result.returncode == 0, result.stderr
    commands = [shlex.split(line)[1:] for line in result.stdout.splitlines()]
    if step == "prepare":
        monkeypatch.setattr("sys.argv", commands[0])
        assert carry.main(commands[0][1:]) == 2
        assert "x.jsonl: no such file" in capsys.readouterr().err
        assert {"gguf", "ml_collections"} < {*commands[1]}
    if step == "go":
        flags = real.parse(commands[0][2:])
        assert (flags.seconds, flags.weights, flags.train.parent.name) == (
            480,
            ROOT / "runs/carry",
            "data",
        )
        assert flags.task == "countdown"


def test_one_machine_runs_the_program_in_the_checkout(tmp_path):
    _program(tmp_path / "fake", 'pwd; printf "%s|" "$@"; exit 7')
    places = {
        "PYTHON": str(tmp_path / "fake"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
    }
    result = _run(MACHINE, *ARGUMENTS, **places)
    assert result.stdout == f"{ROOT}\n" + "|".join(
        ["-m", "slpo_jax.main", *ARGUMENTS, ""]
    )
    assert result.returncode == 7
    assert (tmp_path / "xla").is_dir()


def test_jobset_s_pods_are_the_run_s_processes():
    """Of Kubernetes' own rules those that a reader of the file can get wrong: names, numbers, and who restarts whom."""
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    name = jobset["metadata"]["name"]
    pods = job["template"]["spec"]
    spec = pods["template"]["spec"]
    (container,) = spec["containers"]
    variables = {
        variable["name"]: variable.get("value") for variable in container["env"]
    }
    assert pods["completionMode"] == "Indexed"
    assert (
        pods["completions"] == pods["parallelism"] == int(variables["PROCESSES"]) == 2
    )
    port = container["ports"][0]["containerPort"]
    assert variables["COORDINATOR"] == f"{name}-{job['name']}-0-0.{name}:{port}"
    assert (pods["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert (
        pods["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]
        == container["name"]
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }
    assert (ROOT / container["command"][0]).is_file()
    assert all(
        (ROOT / a.split("=")[1]).is_file()
        for a in container["args"]
        if a.startswith("--config=")
    )


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "said"),
    [
        (TPU, ARGUMENTS, {"TPU": ""}, "TPU: missing"),
        (TPU, ARGUMENTS, {"ZONE": ""}, "ZONE: missing"),
        (TPU, ARGUMENTS[:1], {}, "--workdir: "),  # a run that comes back wants one
        (SLURM, ARGUMENTS[:1], {}, "--workdir: "),
        (REAL, ["all"], {}, "launch/real_gpu.sh: give prepare, first or go\n"),
        (MACHINE, ARGUMENTS, {"COORDINATOR": "first:8476", "PROCESSES": "2"},
         "COORDINATOR: goes with PROCESSES, how many there are, and PROCESS"),
    ],
)  # fmt: skip
def test_what_a_script_lacks_is_one_line(script, arguments, environment, said):
    result = _run(
        script,
        *arguments,
        **{"TPU": "slice", "ZONE": "here", "DRY_RUN": "1"} | environment,
    )
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_tpu_s_hosts_run_the_program(tmp_path):
    result = _run(TPU, *ARGUMENTS, TPU="slice", ZONE="here", DRY_RUN="1")
    _program(tmp_path / "gcloud", 'printf "%s\\n" "$@"')
    done = subprocess.run(
        ["bash", "-c", f"PATH={tmp_path}:$PATH; {result.stdout}"],
        capture_output=True,
        text=True,
    )
    *front, command = done.stdout.splitlines()
    assert front == [
        "compute",
        "tpus",
        "tpu-vm",
        "ssh",
        "slice",
        "--zone=here",
        "--worker=all",
    ]
    stand_ins = "cd() { :; }; launch/one_machine.sh() { printf '%s|' \"$@\"; }; "
    said = subprocess.run(
        ["bash", "-c", stand_ins + command.partition("=")[2]],
        capture_output=True,
        text=True,
    )
    assert said.stdout == "|".join(["--distributed", *ARGUMENTS, ""])


@pytest.mark.parametrize(
    ("ends", "status", "runs"),
    [("0", 0, 1), ("1 143 0", 0, 3), ("2", 2, 1), ("1 1 1 1 1", 1, 3)],
    ids=["finishes", "is preempted twice", "a mistake", "never works"],
)
def test_tpu_s_run_goes_on_until_it_ends_well(tmp_path, ends, status, runs):
    """Against a stand-in for gcloud, whose slice is ready every second time that it is asked."""
    (tmp_path / "ends").write_text("\n".join(ends.split()) + "\n")
    _program(
        tmp_path / "gcloud",
        f"""cd {tmp_path}
if [[ $* == *describe* ]]; then
    echo >>asked
    (( $(wc -l <asked) % 2 )) && echo CREATING || echo READY
    exit
fi
echo >>runs
exit "$(sed -n "$(wc -l <runs)p" ends)"
""",
    )
    where = {"TPU": "slice", "ZONE": "here", "RESTARTS": "2", "PATIENCE": "0"}
    result = _run(TPU, *ARGUMENTS, PATH=f"{tmp_path}:{os.environ['PATH']}", **where)
    assert result.returncode == status, result.stderr
    assert (tmp_path / "runs").read_text().count("\n") == runs


def _slurm_job(tmp_path: Path, program: str, *, out_of_time: bool) -> tuple[int, bool]:
    """Runs the job under stand-ins for Slurm's programs; gives its exit status and whether it was queued again."""
    programs = {
        "srun": 'shift 2; exec "$@"',
        "scontrol": f'echo "$@" > {tmp_path}/queued',
        "fake": program,
    }
    for name, text in programs.items():
        _program(tmp_path / name, text)
    places = {
        "PYTHON": "fake",
        "JAX_COMPILATION_CACHE_DIR": "xla",
        "STARTED": "started",
    }
    environment = os.environ | {
        name: str(tmp_path / place) for name, place in places.items()
    }
    environment |= {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "42",
    }
    job = subprocess.Popen(
        ["bash", str(SLURM), *ARGUMENTS], env=environment, stderr=subprocess.DEVNULL
    )
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
        (
            f"trap 'sleep 0.5; exit 143' TERM; {BUSY}",
            True,
            0,
            True,
        ),  # writes a last checkpoint first
        (f"trap 'exit 0' TERM; {BUSY}", True, 0, False),  # was done
    ],
    ids=["finishes", "fails", "killed", "stops", "just finishes"],
)
def test_slurm_job_is_queued_again_only_when_out_of_time(
    tmp_path, program, out_of_time, status, queued
):
    assert _slurm_job(tmp_path, program, out_of_time=out_of_time) == (status, queued)
