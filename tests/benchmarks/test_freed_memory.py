"""What the allocator's settings do to freed blocks, in processes of their own; and the benchmark's figures."""

import ctypes
import functools
import platform
import resource
import threading

import pytest
import test_benchmarks
import test_passk_benchmark
from flag_errors import check_one_line

from benchmarks import freed_memory
from benchmarks.report import page_faults, summary
from slpo_jax.errors import UserError

GLIBC, KEPT, ONE_HEAP, HUGE = freed_memory.SETTINGS
SIZE = 1_000_000_000
PAGES = SIZE // resource.getpagesize()

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")


def use_block() -> None:
    """Allocates a block, writes to every page and frees them."""
    libc = ctypes.CDLL(None)  # not numpy, which asks for huge pages itself
    libc.malloc.restype = ctypes.c_void_p
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(SIZE)))
    libc.memset(block, 1, ctypes.c_size_t(SIZE))
    libc.free(block)


def probe(in_thread: bool, shapes: str, runs: int) -> dict:
    """Blocks one after the other, in the main thread or in another; the first counts too."""
    faults = []

    def work():
        for _ in range(1 + runs):
            before = page_faults()
            use_block()
            faults.append(page_faults() - before)

    if in_thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    return {"seconds": summary([1.0] * runs), "page_faults": summary(faults)}


@glibc
@pytest.mark.parametrize(
    ("setting", "in_thread", "again"),
    [(GLIBC, False, True), (KEPT, False, False), (KEPT, True, True), (ONE_HEAP, True, False)],
    ids=["glibc's own", "kept", "kept, in a thread", "one heap, in a thread"],
)
def test_a_freed_block_is_faulted_in_again(setting, in_thread, again):
    found = freed_memory.measure_apart(setting, functools.partial(probe, in_thread), "quickstart", 2)
    assert SIZE < found["peak_bytes"] < 2 * SIZE
    first, *later = found["page_faults"]["values"]
    if first < PAGES / 2:
        pytest.skip("the system doesn't count page faults, or pages are larger than it says")
    for faults in later:
        assert (faults > PAGES / 2) == again


@glibc
def test_work_is_measured(monkeypatch, cpu_devices):
    """In this process, at tiny shapes."""
    monkeypatch.setitem(freed_memory.SHAPES, "quickstart", test_benchmarks.TINY)
    monkeypatch.setitem(freed_memory.passk_work.SHAPES, "quickstart", test_passk_benchmark.TINY)
    for work in ("step_4", "evaluation"):
        found = freed_memory.WORK[work]("quickstart", 2)
        assert len(found["page_faults"]["values"]) == len(found["seconds"]["values"]) == 2
        assert found["seconds"]["min"] > 0


@glibc
def test_report(monkeypatch):
    """Rounds are put together; nothing is measured here."""
    calls = []

    def measured(setting, measure, shapes, runs):
        calls.append((setting, measure))
        size = len(calls)
        return {"seconds": summary([size, size + 2.0]), "page_faults": summary([0, size]), "peak_bytes": size * 10**6}

    monkeypatch.setattr(freed_memory, "measure_apart", measured)
    flags = freed_memory.parse(["--shapes", "quickstart", "--work", "evaluation", "--rounds", "2", "--runs", "2"])
    result = freed_memory.benchmark(None, None, flags)
    assert calls == [(setting, freed_memory.evaluation) for setting in (GLIBC, KEPT, ONE_HEAP, HUGE)] * 2
    first = result["rows"][0]
    assert (first["work"], first["setting"], first["peak_bytes"]) == ("evaluation", GLIBC, 5 * 10**6)
    assert first["seconds"] == summary([1, 3.0, 5, 7.0])
    assert first["page_faults"]["values"] == [0, 1, 0, 5]
    lines = freed_memory.markdown(result).splitlines()
    assert f"page size {resource.getpagesize()}" in lines[1]
    assert f"| evaluation | {GLIBC} | 4.000 (1.000-7.000) | 0 (0-5) | 5 |" in lines
    assert len([line for line in lines if line.startswith("| evaluation |")]) == 4


def test_elsewhere_it_is_one_line(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(UserError, match="run it on Linux with glibc"):
        freed_memory.benchmark(None, None, freed_memory.parse([]))


@pytest.mark.parametrize(("flags", "fault"), [(["--work", "play"], "--work"), (["--rounds", "0"], "--rounds: 0")])
def test_bad_flags_end_with_one_line_and_status_2(flags, fault, capsys):
    check_one_line(freed_memory.main, flags, fault, capsys)
