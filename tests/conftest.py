"""What every test runs under. pytest imports this file before any test module, and so before jax starts a backend."""

import atexit
import contextlib
import ctypes
import errno
import gc
import hashlib
import io
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from absl import logging


def _default(variable: str, value: str) -> None:
    """Sets what the user's environment leaves open.

    pytest-xdist's workers inherit what was set here in the process that started them, and must set their own.
    """
    ours = os.environ.get("SLPO_TEST_DEFAULTS", "").split()
    if variable not in os.environ or variable in ours:
        os.environ[variable] = value
        os.environ["SLPO_TEST_DEFAULTS"] = " ".join(dict.fromkeys([*ours, variable]))


def _limit_threads() -> None:
    """Shares the cores out between pytest-xdist's workers; jax, torch and the tests' subprocesses read these."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = str(max(1, (os.cpu_count() or 1) // workers))
    for variable in (
        "NPROC",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
    ):
        _default(variable, cores)
    _default("TOKENIZERS_PARALLELISM", "false")


def _compilation_cache() -> Path:
    """A cache of compiled programs that later runs of the tests, and the programs that they start, find again.

    One for each kind of processor, since a compiled program may use instructions that another lacks. SLPO_TEST_CACHE
    puts it elsewhere.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    instructions = next(
        (line for line in lines if line.startswith(("flags", "Features"))), ""
    )
    digest = hashlib.sha256(instructions.encode()).hexdigest()[:8]
    default = Path(tempfile.gettempdir()) / f"slpo_jax-tests-{os.getuid()}-{digest}"
    return Path(os.environ.get("SLPO_TEST_CACHE") or default)


def _compile_fast() -> None:
    """XLA's older and quicker code generators, here and in the programs that the tests start.

    Compiling takes most of the tests' time, and less than half of it this way; the programs run for milliseconds
    anyhow. With XLA_FLAGS="" the tests run on what XLA generates by default.
    """
    flags = ["--xla_backend_optimization_level=0"]
    if version("jaxlib").startswith("0.10."):
        # XLA aborts at a flag that it does not know. A worker has one core: parts of a program gain nothing.
        flags += [
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",
        ]
    if os.environ["JAX_PLATFORMS"] == "cpu":
        _default("XLA_FLAGS", " ".join(flags))


def _share_runs() -> None:
    """A folder for the runs that several tests look at, which pytest-xdist's workers find here too."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["SLPO_TEST_RUNS"] = tempfile.mkdtemp(prefix="slpo_jax-runs-")
        atexit.register(shutil.rmtree, os.environ["SLPO_TEST_RUNS"], ignore_errors=True)


_limit_threads()
_share_runs()
# The tests are about numbers, so they run on the CPU unless asked otherwise, with JAX_PLATFORMS=cuda,cpu for instance.
_default("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] != "cpu":
    _default("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # as runs have it there
_compile_fast()
_default("JAX_COMPILATION_CACHE_DIR", str(_compilation_cache()))
_default(
    "JAX_COMPILATION_CACHE_MAX_SIZE", str(2**30)
)  # with a limit jax locks it, and no reader meets half an entry
_default("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

# The same examples in every run, however slow the machine.
hypothesis.settings.register_profile("slpo_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("slpo_jax")

import jax  # noqa: E402 - after the variables that it reads on import

from slpo_jax.runtime import hosts  # noqa: E402

jax.config.update(
    "jax_numpy_rank_promotion", "raise"
)  # axes are added where it can be seen

CPU_DEVICES = 4
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # In this process alone: programs that the tests start see one device, unless a test asks for more.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


class _SkippedTests:
    """Writes which tests were skipped, and why, for .ci/run: a line "TEST<tab>REASON" for each.

    A module that skips itself while it is collected stands there as its file.

    One file for each of pytest-xdist's workers: the process that started them hears of a module that couldn't be
    collected only if no other was skipped in the same line for the same reason.
    """

    def __init__(self, folder: Path):
        self._path, self._lines = (
            folder / os.environ.get("PYTEST_XDIST_WORKER", "main"),
            set(),
        )

    def pytest_collectreport(self, report) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report) -> None:
        self._note(report)

    def _note(self, report) -> None:
        if report.skipped:
            reason = (
                report.longrepr[-1]
                if isinstance(report.longrepr, tuple)
                else str(report.longrepr)
            )
            self._lines.add(report.nodeid + "\t" + " ".join(reason.split()))

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(line + "\n" for line in sorted(self._lines)))


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get("SLPO_TEST_SKIPPED"):
        config.pluginmanager.register(_SkippedTests(Path(folder)))


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is nightly is slow. The longest files come first, so that none is left to one worker alone at the end.

    The very first two share nothing that one would have to wait for the other to make.
    """
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
    first = ("test_pipeline.py", "test_hosts.py")
    folders = ("run", "benchmarks", "training", "policy", "models")

    def place(item: pytest.Item) -> tuple[bool, int]:
        of = item.path.parent.name
        return item.path.name not in first, folders.index(of) if of in folders else len(
            folders
        )

    items.sort(key=place)


def _resident() -> float:
    """This process's memory in GiB, where the system tells."""
    status = Path("/proc/self/statm")
    return (
        int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
        if status.exists()
        else 0.0
    )


_most = [1.2]


@pytest.fixture(autouse=True, scope="module")
def memory():
    """Compiled programs of a module are dropped after it where there are many: they would pile up to gigabytes."""
    yield
    if _resident() < _most[0]:
        return
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(
        OSError, AttributeError
    ):  # freed memory goes back to the system only with glibc's help
        ctypes.CDLL(None).malloc_trim(0)
    _most[0] = max(
        _most[0], _resident() + 0.2
    )  # what is left stays, torch for instance; not so after every module


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    """The same global random numbers of torch in every order of the tests and share of a worker.

    By itself torch begins at another seed in every process. Test modules whose outcome depends on them import it as
    they are collected; its import takes too long for the others.
    """
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def cpu_devices() -> list[jax.Device]:
    """Four CPU devices, beside an accelerator too where JAX_PLATFORMS lists both."""
    try:
        devices = jax.devices("cpu")
    except RuntimeError:
        pytest.skip("JAX_PLATFORMS leaves no CPU backend")
    if len(devices) < CPU_DEVICES:
        pytest.skip(f"XLA_FLAGS leaves {len(devices)} of {CPU_DEVICES} CPU devices")
    return devices[:CPU_DEVICES]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the checkout, which a clone elsewhere may not have."""
    path = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no {path}")
    return path


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What is logged as a warning."""
    lines: list[str] = []
    monkeypatch.setattr(
        logging, "warning", lambda message, *args: lines.append(message % args)
    )
    return lines


@pytest.fixture
def second_process(monkeypatch):
    """A context in which this is the second of two processes, of which the first has found all that is asked about."""

    @contextlib.contextmanager
    def begun():
        together = SimpleNamespace(
            broadcast_one_to_all=lambda found: max(found, 1), sync_global_devices=str
        )
        with monkeypatch.context() as patch:
            patch.setattr(hosts, "_count", 2)
            patch.setattr(hosts, "_index", 1)
            patch.setattr(hosts, "_together", lambda: together)
            yield

    return begun


@pytest.fixture
def unreadable(monkeypatch):
    """A context in which a file can't be opened, or a folder not listed: whoever runs the tests may read all."""

    @contextlib.contextmanager
    def denied(path):
        def refuses(own):
            def call(where=".", *rest, **more):
                if isinstance(where, str | os.PathLike) and Path(where) == path:
                    raise PermissionError(errno.EACCES, "Permission denied", str(where))
                return own(where, *rest, **more)

            return call

        with monkeypatch.context() as patch:
            for module, name in ((os, "listdir"), (os, "scandir"), (io, "open")):
                patch.setattr(module, name, refuses(getattr(module, name)))
            yield

    return denied


@pytest.fixture
def datasets_cache(tmp_path_factory, monkeypatch) -> None:
    """`datasets` keeps what it prepares in a folder of the test's own."""
    import datasets

    monkeypatch.setattr(
        datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache"))
    )
