"""`python launch/kill_test.py [--kills=N] [--processes=P] [--workdir=DIR] [slpo_jax.main's arguments]`.

Trains a run without any trouble in DIR/reference. Then trains it again in DIR/victim, kills it (-9) at random moments,
of several processes one or all, starts it again with the same command until it is finished, and compares what both
left behind bit for bit; and again, until it has killed N times. Status 1 and the differences where there are any.
Without arguments for slpo_jax.main it is the quick start with a few steps of every stage.
"""

import argparse
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from same_run import differences

from slpo_jax.errors import silent_when_unread
from slpo_jax.io.hosts import local_flags

ROOT = Path(__file__).resolve().parents[1]
SHORT = (
    "--config=configs/quickstart.py", "--config.imitate.cot_steps=30", "--config.imitate.stage_steps=10",
    "--config.imitate.final_steps=20", "--config.imitate.optimizer.warmup_steps=5",
    "--config.rl.optimizer.warmup_steps=2", "--config.cold_start.steps=20", "--config.cold_start.evaluate_every=10",
    "--config.rl.objectives=('slpo',)", "--config.rl.steps=20", "--config.evaluate.limit=200",
    "--config.evaluate.batch_size=64", "--config.log_every=2", "--config.checkpoint_every=5",
)  # fmt: skip
SKIPPED = (0, 1, 2, 5, 20)  # moments that pass before a kill
GRACE = 2.0  # seconds in which the processes that are left may notice that one is gone


class Run:
    """The processes of one command.

    Args:
        arguments: of slpo_jax.main.
        workdir: for all of them.
        processes: how many make the run.
    """

    def __init__(self, arguments: list[str], workdir: Path, processes: int):
        self.workdir, self.log = workdir, workdir.with_suffix(".log")
        command = [sys.executable, "-m", "slpo_jax.main", *arguments, f"--workdir={workdir}"]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = os.environ | {"PYTHONPATH": path}
        with self.log.open("a") as log:
            self.processes = [
                subprocess.Popen(command + more, cwd=ROOT, env=environment, stdout=log, stderr=log)
                for more in local_flags(processes)
            ]

    def ended(self) -> bool:
        """Whether all have ended; if one has failed by itself, the others are ended too.

        Raises:
            SystemExit: one has failed.
        """
        states = [process.poll() for process in self.processes]
        if any(state not in (None, 0) for state in states):
            self.kill(self.processes)
            sys.exit(f"{self.log}: a process ended with status {max(filter(None, states))}; its last words:\n"
                     + "\n".join(self.log.read_text().splitlines()[-5:]))  # fmt: skip
        return all(state == 0 for state in states)

    def kill(self, which: list[subprocess.Popen]) -> None:
        """-9 to some, and after a grace to those that are left."""
        for process in which:
            process.send_signal(signal.SIGKILL)
        until = time.monotonic() + (GRACE if len(which) < len(self.processes) else 0)
        while time.monotonic() < until and any(process.poll() is None for process in self.processes):
            time.sleep(0.05)
        for process in self.processes:
            process.kill()
            process.wait()


def signs(workdir: Path, moment: str) -> object:
    """What changes in a workdir when the moment has come."""
    if moment == "at a step":
        metrics = workdir / "metrics.jsonl"
        return metrics.stat().st_size if metrics.exists() else 0
    if moment == "at a save":
        return {path for path in workdir.glob("checkpoints/*/*") if "tmp" in path.name}
    return len(list(workdir.glob("eval/*/*.partial/*")))


def choose(workdir: Path, chance: random.Random) -> str:
    """What to wait for next; evaluation only where it has begun, or else all that is before it would be run at once."""
    if (workdir / "eval").exists():
        return chance.choice(("at the start", *["in evaluation"] * 4))
    return chance.choice(("at the start", *["at a step"] * 3, *["at a save"] * 3))


def wait_for(run: Run, moment: str, chance: random.Random, start_seconds: float) -> bool:
    """Until a moment of that kind is there and a random while has passed; False if the run has ended before."""
    if moment == "at the start":
        until = time.monotonic() + chance.uniform(0, start_seconds)
    else:
        before, late = signs(run.workdir, moment), chance.choice((0.02, 0.1, 0.5))
        for _ in range(chance.choice(SKIPPED)):  # or the first stages would have nearly all the kills
            while (now := signs(run.workdir, moment)) in (before, set()):
                if run.ended():
                    return False
                time.sleep(0.002)
            before = now
        while (now := signs(run.workdir, moment)) in (before, set()):
            if run.ended():
                return False
            time.sleep(0.002)
        until = time.monotonic() + chance.uniform(0, late)
    while time.monotonic() < until:
        if run.ended():
            return False
        time.sleep(0.002)
    return not run.ended()


def finish(run: Run) -> None:
    """Until it has ended by itself."""
    while not run.ended():
        time.sleep(0.05)


def stage_of(workdir: Path) -> str:
    """Where a run is: the stage of its last row, or evaluation."""
    if (workdir / "eval").exists():
        return "evaluate"
    metrics = workdir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return lines[-1].rpartition('"stage": "')[2].partition('"')[0] if lines else "before the first row"


@silent_when_unread()
def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=100, help="how many, at least; default: 100")
    parser.add_argument("--processes", type=int, default=1, help="of each run; default: 1")
    parser.add_argument("--workdir", type=Path, default=Path("runs/kill_test"), help="default: runs/kill_test")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: 0")
    flags, arguments = parser.parse_known_args()
    if flags.kills < 1 or flags.processes < 1:
        parser.error("--kills and --processes: give 1 or more")
    root, chance = flags.workdir.resolve(), random.Random(flags.seed)
    arguments = arguments or list(SHORT)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--workdir: {error.filename}: {error.strerror}; give another")
    for name in ("reference", "victim"):  # an earlier test's, and nothing else that lies there
        shutil.rmtree(root / name, ignore_errors=True)
        (root / f"{name}.log").unlink(missing_ok=True)
    start = time.monotonic()
    reference = Run(arguments, root / "reference", flags.processes)
    wait_for(reference, "at a step", random.Random(0), 0)
    start_seconds = time.monotonic() - start
    finish(reference)
    print(f"reference: {time.monotonic() - start:.0f} s, {start_seconds:.0f} of them to the first rows", flush=True)
    kills: collections.Counter[tuple[str, str]] = collections.Counter()
    victims, failed, begun = 0, 0, time.monotonic()
    while kills.total() < flags.kills:
        victims += 1
        shutil.rmtree(root / "victim", ignore_errors=True)
        while True:
            run = Run(arguments, root / "victim", flags.processes)
            moment = choose(root / "victim", chance)
            if kills.total() >= flags.kills:
                finish(run)
                break
            if not wait_for(run, moment, chance, start_seconds):
                break
            kills[stage_of(root / "victim"), moment] += 1
            run.kill(run.processes if chance.random() < 0.5 else [chance.choice(run.processes)])
        found = differences(root / "reference", root / "victim")
        failed += bool(found)
        print(
            f"victim {victims}: {kills.total()} kills so far; {'; '.join(found) or 'the same, bit for bit'}", flush=True
        )
    spent = time.monotonic() - begun
    for (stage, moment), count in sorted(kills.items()):
        print(f"{count:4d}  {stage}, {moment}")
    print(f"{kills.total()} kills, {victims} runs, {failed} of them not the reference's; {spent:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
