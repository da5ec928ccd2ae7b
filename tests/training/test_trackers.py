"""What is logged reaches each tracker once, and no tracker can stop a run."""

import contextlib
import json
import sqlite3
import struct
import sys
import time
from unittest import mock

import pytest

from slpo_jax import register_tracker
from slpo_jax.errors import UserError
from slpo_jax.io.workdir import Workdir
from slpo_jax.runtime import hosts
from slpo_jax.training.metrics import TRACKERS, MetricsLog, check_trackers


class Memory:
    """Keeps what it is told; may fail at a step."""

    def __init__(self, fails_at: int = -1):
        self.rows = []
        self.fails_at = fails_at
        self.finished = 0

    def log(self, step, scalars):
        if step == self.fails_at:
            raise ConnectionError("no\nroute")
        self.rows.append((step, dict(scalars)))

    def finish(self):
        self.finished += 1


@pytest.fixture
def memory():
    kept = Memory()
    with mock.patch.dict(TRACKERS):
        register_tracker("memory", lambda workdir, config: kept)
        yield kept


def _log(tmp_path, *names):
    log = MetricsLog(Workdir(tmp_path))
    log.start(names, {"seed": 1})
    return log


def test_a_run_that_goes_on_logs_nothing_twice_but_its_last_row(tmp_path, memory):
    """Which a kill may have kept from the trackers."""
    log = _log(tmp_path, "memory")
    for step, loss in ((1, 0.5), (2, float("nan")), (3, 1.5)):
        log.write("slpo", step, {"loss": loss, "seconds": 5.0})
    log.write("slpo", 3, {"valid_accuracy": 0.5})
    log.close()
    log = _log(tmp_path, "memory")
    log.rewind("slpo", 1)
    log.write(
        "slpo", 2, {"loss": float("nan"), "seconds": 7.0}
    )  # the same again, by another clock
    log.write(
        "slpo", 3, {"loss": 9.0, "seconds": 5.0}
    )  # another: begun anew with other settings
    log.write("slpo", 3, {"valid_accuracy": 0.5})
    log.write("slpo", 4, {"loss": float("inf"), "reward": 1.0})
    log.close()
    told = [(step, scalars.get("slpo/loss")) for step, scalars in memory.rows]
    before = [(1, 0.5), (2, None), (3, 1.5), (3, None)]
    assert told == [*before, (3, 9.0), (3, None), (4, None)]
    assert memory.rows[-1] == (4, {"slpo/reward": 1.0})
    assert memory.finished == 2
    rows = [
        json.loads(line, parse_constant=pytest.fail)
        for line in log.path.read_text().splitlines()
    ]
    assert [(row["step"], row.get("loss")) for row in rows] == [
        (1, 0.5),
        (2, None),
        (3, 9.0),
        (3, None),
        (4, None),
    ]


FIGURES = {"test/slpo/acc": 0.5, "test/slpo/pass@2": 0.75}
COMPLETIONS = [
    {"set": "test", "question": "1 | 2", "completion": "3"},
    {"set": "test", "question": "4", "completion": ""},
]


def test_an_evaluation_is_reported_once_and_again_when_it_changes(tmp_path, memory):
    memory.log_completions = mock.Mock()
    evaluated = [
        (0, {"evaluate/test/slpo/acc": 0.5, "evaluate/test/slpo/pass@2": 0.75})
    ]
    for _ in range(2):
        log = MetricsLog(Workdir(tmp_path))  # nothing was left to train
        log.report(("memory",), {}, FIGURES, COMPLETIONS)
        log.close()
    assert memory.rows == evaluated
    memory.log_completions.assert_called_once_with(COMPLETIONS)
    log = _log(tmp_path, "memory")
    log.write("slpo", 1, {"loss": 0.5})
    log.report(("memory",), {}, {"test/slpo/acc": 0.25}, [])
    log.close()
    assert memory.rows == [
        *evaluated,
        (1, {"slpo/loss": 0.5}),
        (0, {"evaluate/test/slpo/acc": 0.25}),
    ]


@pytest.mark.nightly
def test_mlflow_goes_on_with_one_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    for step in (1, 2):
        log = _log(tmp_path / "work", "mlflow")
        log.write("slpo", step, {"loss": 1.0 / step})
        log.report(("mlflow",), {}, FIGURES, COMPLETIONS)
        log.close()
    client = mlflow.MlflowClient()
    (found,) = client.search_runs(
        [client.get_experiment_by_name("slpo_jax").experiment_id]
    )
    assert (found.info.run_name, found.info.status) == ("work", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "slpo/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (1, 1.0),
        (2, 0.5),
    ]
    assert (
        len(client.get_metric_history(found.info.run_id, "evaluate/test/slpo/pass_2"))
        == 1
    )


@pytest.mark.nightly
def test_trackio_goes_on_with_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "TRACKIO_DIR", str(tmp_path / "trackio")
    )  # which it reads when it is imported
    pytest.importorskip("trackio")
    (tmp_path / "work").mkdir()
    for step in (1, 2):
        log = _log(tmp_path / "work", "trackio")
        log.write("slpo", step, {"loss": 1.0 / step})
        log.report(("trackio",), {}, FIGURES, COMPLETIONS)
        log.close()
    (database,) = (tmp_path / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "select run_name, step, metrics from metrics"
        ).fetchall()
    assert len({run for run, _, _ in rows}) == 1
    told = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert (1, {"slpo/loss": 1.0}) in told
    assert (2, {"slpo/loss": 0.5}) in told
    assert (
        told.count((0, {f"evaluate/{name}": value for name, value in FIGURES.items()}))
        == 1
    )
    assert len(told) == 4


def test_a_tracker_that_fails_is_off_with_one_line(
    tmp_path, memory, warnings, monkeypatch
):
    failing = Memory(fails_at=2)
    monkeypatch.setitem(TRACKERS, "failing", lambda workdir, config: failing)
    log = _log(tmp_path, "failing", "memory")
    for step in (1, 2, 3):
        log.write("slpo", step, {"loss": 0.5})
    log.close()
    assert warnings == [
        "config.trackers: failing is off from step 2 of slpo on (ConnectionError: no route); metrics.jsonl has all rows"
    ]
    assert [step for step, _ in failing.rows] == [1]
    assert [step for step, _ in memory.rows] == [1, 2, 3]
    assert len(log.path.read_text().splitlines()) == 3


def test_the_first_of_several_processes_tracks(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(hosts, "_index", 1)
    log = _log(tmp_path, "memory")
    log.write("slpo", 1, {"loss": 0.5})
    log.close()
    assert (memory.rows, memory.finished, log.path.exists()) == ([], 0, False)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("aim",), "config.trackers: 'aim' is unknown; use tensorboard, wandb"),
        (("tensorboard", "tensorboard"), "give each name once"),
        (("wandb",), r"wandb is not installed; pip install 'slpo_jax\[wandb\]'"),
        (("mlflow",), r"mlflow is not installed; pip install 'slpo_jax\[mlflow\]'"),
        (("trackio",), r"trackio is not installed; pip install 'slpo_jax\[trackio\]'"),
    ],
)
def test_a_tracker_that_is_not_there_is_said_before_any_work(
    names, message, monkeypatch
):
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=message):
        check_trackers(names)


def test_a_tracker_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(
        TRACKERS, "closed", mock.Mock(side_effect=PermissionError("not logged in"))
    )
    with pytest.raises(UserError, match=r"config\.trackers: closed: PermissionError"):
        _log(tmp_path, "closed")


def _entries(data: bytes):
    """The entries of a .wandb file: after 7 bytes those of LevelDB's log, none of which is cut in parts here."""
    place = 7
    while place + 7 <= len(data):
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        assert kind == 1
        yield data[place + 7 : place + 7 + size]
        place += 7 + size


def test_wandb_goes_on_with_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for start in (1, 3):
        log = _log(tmp_path / "work", "wandb")
        for step in (start, start + 1):
            log.write("imitate", step, {"loss": 1.0 / step})
        log.write("slpo", start, {"reward": 0.5})
        log.close()
        time.sleep(1)  # an offline run's folder is named by the second
    known = json.loads((tmp_path / "work" / "trackers.json").read_text())["wandb"]
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(
        (tmp_path / "work" / "wandb").glob(f"offline-run-*/run-{known}.wandb")
    ):
        for data in _entries(path.read_bytes()):
            record = Record.FromString(data)
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            if "imitate/loss" in items:
                found.append((items["imitate/step"], items["imitate/loss"]))
    assert found == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
