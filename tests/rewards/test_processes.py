"""Verifiers in processes of their own: what they are sent as, what is cut off, and what nothing happens to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from slpo_jax.config.registry import read_registrations
from slpo_jax.data.problem import Problem
from slpo_jax.rewards.processes import _WORKER, CantRun, Failed, Limits, Processes
from slpo_jax.rewards.reward import REWARDS, Reward, RewardEntry

OWN = """
import functools, os, re, signal, subprocess, sys, time
import jax.numpy as jnp
import numpy as np
import slpo_jax
from beside import seven

PATTERN, LEFT = re.compile("[0-9]+"), (n for n in ())

def twice(number):
    return 2 * number

class Judge:
    def __init__(self):
        self.more = 1
    def __call__(self, completion):
        return float(twice(len(completion)) + self.more)

def decorated(function):
    return functools.wraps(function)(lambda **given: function(**given) + 1)

@decorated
def plain(completion):
    assert not {"jax", "slpo_jax"} & {*sys.modules}, "heavy"
    return float(len(PATTERN.findall(completion)) + seven() + (twice(completion.count("a")) if completion else 0))

def numbers(completion):
    return np.float32(len(completion))

def used_up(completion):
    return next(LEFT)

def pooled(numbers):
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        total = sum(pool.map(abs, numbers))
        pool.map_async(time.sleep, [600, 600])  # is under way when the pool is ended
        time.sleep(0.5)
        return total

def odd(case):
    if case == "raises":
        raise ValueError("two\\nlines")
    if case == "leaves":
        sys.exit(2)
    if case == "ends":
        os._exit(3)
    if case == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case == "reads":
        return print("said to nobody") or input()
    if case == "sleeps":
        time.sleep(60)
    if case == "computes":
        return 10 ** 10 ** 10
    if case == "waits":
        subprocess.run(["sleep", "60.25"])
    return case
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "beside.py").write_text("def seven():\n    return 7\n")
    (folder / "verdicts.py").write_text(OWN)
    read_registrations(str(folder / "verdicts.py"))
    yield sys.modules["slpo_jax_verdicts"]
    del sys.modules["slpo_jax_verdicts"]


def asked(function, *requests, most=1, **limits):
    processes = Processes(function, most, Limits(**limits))
    return processes.ask([dict(request) for request in requests])


def test_functions_of_a_file_are_sent_with_all_they_name(own):
    """Helpers, what lies beside the file, closures, objects; without what the file imports for others."""
    text = {"completion": "1 a 22 a"}
    twice = own.twice
    assert asked(own.plain, text, {"completion": ""}) == [2 + 7 + 4 + 1, 8]
    assert asked(own.Judge(), text) == [17]
    assert asked(own.numbers, text) == [8]
    assert asked(lambda completion, more=3: twice(more), text) == [6]
    assert "slpo_jax_verdicts" in sys.modules


def test_a_function_may_have_a_pool_of_its_own(own):
    """Whose processes obey SIGTERM, by which it ends them."""
    assert asked(own.pooled, {"numbers": [3, -4]}, {"numbers": [1]}, seconds=20) == [
        7,
        1,
    ]


def test_what_can_not_be_sent_or_loaded_is_said(own, monkeypatch):
    with pytest.raises(CantRun, match=r"^TypeError: cannot pickle 'generator' object$"):
        Processes(own.used_up, 1)
    processes = Processes(own.plain, 1)
    monkeypatch.setattr(
        "slpo_jax.rewards.processes._path",
        lambda: [each for each in sys.path if "own" not in each],
    )
    with pytest.raises(
        CantRun, match=r"^ModuleNotFoundError: No module named 'beside'$"
    ):
        processes.ask([{"completion": ""}])


def test_a_script_s_function_is_sent_without_running_the_script_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from slpo_jax.rewards.processes import Processes\nprint('begins')\ndef once(n):\n    return n + 1\n"
        "def more(n):\n    return once(n) + 1\nprint(Processes(more, 2).ask([{'n': n} for n in range(4)]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["begins", "[2, 3, 4, 5]"]


@pytest.mark.slow
def test_whatever_a_function_does_costs_its_own_verdict_alone(own):
    cases = {
        "raises": "ValueError: two lines", "leaves": "SystemExit: 2", "ends": "its process ended with status 3",
        "crashes": "its process ended with SIGSEGV", "reads": "EOFError: EOF when reading a line",
        "sleeps": "it took more than 0.6 s", "computes": "it took more than 0.6 s", "waits": "it took more than 0.6 s",
    }  # fmt: skip
    requests = [{"case": case} for name in cases for case in (name, f"after {name}")]
    begun = time.monotonic()
    found = asked(own.odd, *requests, most=2, seconds=0.6)
    assert found == [
        each
        for name, reason in cases.items()
        for each in (Failed(reason), f"after {name}")
    ]
    assert time.monotonic() - begun < 20
    running = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert "sleep 60.25" not in running, "what it has started ends too"


def test_processor_time_is_a_limit_of_what_computes_alone():
    found = asked(lambda n: n or sum(iter(int, 1)), {"n": 0}, {"n": 1}, processor=0.3)
    assert found == [Failed("it took more than 0.3 s of processor time"), 1]
    assert asked(lambda: __import__("time").sleep(0.6), {}, processor=0.3) == [None]


@pytest.mark.parametrize("most", [1, 4])
def test_order_is_kept_and_processes_are_used_again(most):
    def slow(n):
        import os
        import time

        time.sleep(0.05 * (n % 3))
        return n, os.getpid()

    processes = Processes(slow, most)
    found = [processes.ask([{"n": n} for n in range(12)]) for _ in range(2)]
    assert [[n for n, _ in each] for each in found] == [[*range(12)]] * 2
    assert len({pid for each in found for _, pid in each}) == most
    assert processes.ask([]) == []


def test_a_signal_to_all_leaves_the_verdicts_as_they_are():
    processes = Processes(lambda n: n, 1)
    assert processes.ask([{"n": 1}]) == [1]
    (worker,) = processes._idle
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    assert os.getsid(worker.process.pid) != os.getsid(0), "nor is Ctrl-C for it"
    assert processes.ask([{"n": 2}]) == [2]
    assert [*processes._idle] == [worker]
    worker.process.kill()
    worker.process.wait()
    assert processes.ask([{"n": 3}]) == [3], (
        "one that died without being asked is replaced"
    )
    pid = processes._idle[0].process.pid
    del processes, worker
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("busy", ["time.sleep(60)", "10 ** 10 ** 10"])
def test_no_process_outlives_the_one_who_asked(tmp_path, end, busy, platform):
    """Nor does anybody wait for it: whether Python is able to interrupt it or not."""
    script = tmp_path / "script.py"
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER.read_text().replace("sys.platform", repr(platform)))
    script.write_text(
        "import os, signal, sys, time, pathlib\nfrom slpo_jax.rewards import processes\n"
        # A background job's tests ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"processes._WORKER = pathlib.Path({str(worker)!r})\n"
        f"def busy(path):\n    open(path, 'w').write(str(os.getpid()))\n    {busy}\n"
        "processes.Processes(busy, 1).ask([{'path': sys.argv[1]}])\n"
    )
    told = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, str(script), str(told)], stderr=subprocess.DEVNULL
    ) as asking:
        _wait(lambda: told.exists() and told.read_text())
        os.kill(asking.pid, end)
        asking.wait(10)
    _wait(lambda: not Path(f"/proc/{told.read_text()}").exists())


@pytest.mark.slow
def test_a_reward_s_verdicts_are_those_of_its_processes(monkeypatch, warnings):
    """Of one number or of lists; what fails is not judged, and is counted."""
    pid = os.getpid()

    def judge(completion, pair):
        assert os.getpid() != pid
        return pair[0] / (completion != "8")

    def judges(completions, pair):
        assert len(completions) == 1
        return [judge(*each) for each in zip(completions, pair, strict=True)]

    def sleeps(completion):
        time.sleep(60)

    for function in (judge, judges, sleeps):
        monkeypatch.setitem(REWARDS, function.__name__, RewardEntry(function))
    token_bytes = [b"", b"7", b"8"]
    problems = [Problem("?", (), "7", {"pair": [n, 0]}) for n in range(40)]
    tokens = np.array([[1 + (n % 4 == 2), 0] for n in range(40)])
    for name in ("judge", "judges"):
        reward = Reward(name, "last_number", token_bytes, (0,), processes=3)
        found = reward.judge([reward.read(row) for row in tokens], problems)
        assert found.total.tolist() == [0.0 if n % 4 == 2 else n for n in range(40)]
        assert found.failed.tolist() == [n % 4 == 2 for n in range(40)]
        assert found.unjudged.tolist() == found.failed.tolist()
        assert (
            f"{name} failed on a completion, which isn't judged: ZeroDivisionError"
            in warnings[-1]
        )
    begun = time.monotonic()
    reward = Reward("sleeps", "last_number", token_bytes, (0,), 8, 0.1)
    found = reward.judge([reward.read(row) for row in tokens], problems)
    assert found.failed.all()
    assert warnings[-1].endswith("it took more than 0.1 s")
    assert time.monotonic() - begun < 10


def _wait(ready):
    until = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.02)
