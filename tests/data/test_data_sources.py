"""Where data sets come from: parquet files, directories as on the hub, hub ids, and caches without a network."""

import gzip
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from pyarrow import parquet

from data_sets import rows, write_jsonl, write_parquet, write_set
from refused import one_line
from slpo_jax.config import read_config
from slpo_jax.config.overrides import merge_settings
from slpo_jax.data import dataset_rows
from slpo_jax.data.problem import Problem
from slpo_jax.data.problems import load_problems
from slpo_jax.data.synthetic import SyntheticConfig, synthetic_problems
from slpo_jax.errors import UserError
from slpo_jax.run.experiment import build
from small_run import load_config


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """Empty caches, and a hub that can't be reached."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))

    def unreachable(*_: object) -> None:
        raise OSError("no name service")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    return folder


def _answers(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.answer for problem in problems]


def _error(source: str, role: Any = "train") -> str:
    return one_line(lambda: load_problems(source, role=role))


def test_rows_of_all_row_groups_in_order(tmp_path):
    path = tmp_path / "set.parquet"
    parquet.write_table(
        pa.Table.from_pylist(rows(*range(2500))), path, row_group_size=1000
    )
    assert _answers(load_problems(str(path))) == [str(number) for number in range(2500)]
    parquet.write_table(
        pa.Table.from_pylist(rows(*range(2500)) + [{"question": " ", "answer": 1}]),
        path,
    )
    assert f"{path}, row 2501: the question is empty" in _error(str(path))
    directory = write_set(
        tmp_path / "set",
        {"train": rows(*range(2500)) + [{"question": " ", "answer": 1}]},
    )
    assert f"{directory}, split train, row 2501: the question is empty" in _error(
        directory
    )


def test_a_directory_gives_the_split_of_the_role(tmp_path, cache, capfd):
    directory = write_set(
        tmp_path / "set", {"train": rows(1), "validation": rows(2), "test": rows(3, 4)}
    )
    by_role = {
        role: _answers(load_problems(directory, role=role))
        for role in ("train", "validation", "test")
    }
    assert by_role == {"train": ["1"], "validation": ["2"], "test": ["3", "4"]}
    assert _answers(load_problems(f"{directory}@test", role="train")) == ["3", "4"]
    assert _answers(load_problems(f"{directory}@test+train")) == ["3", "4", "1"]
    assert (cache / "datasets").is_dir()
    assert sorted(path.name for path in Path(directory).rglob("*.*")) == [
        f"{split}-00000-of-00001.parquet" for split in ("test", "train", "validation")
    ]
    assert capfd.readouterr() == ("", "")


def test_missing_splits_list_those_there_are(tmp_path):
    directory = write_set(tmp_path / "set", {"train": rows(1), "test": rows(3)})
    assert _error(directory, "validation") == (
        f"{directory}: has no split 'validation', only train, test; name one, e.g. {directory}@train"
    )
    assert "has no split 'tests', only train, test" in _error(
        f"{directory}@train+tests"
    )


def _with_configs(folder: Path) -> str:
    configs = ""
    for number, config in enumerate(("main", "socratic")):
        write_parquet(folder / config / "train-00000-of-00001.parquet", rows(number))
        configs += f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/train-*\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return str(folder)


def test_configs(tmp_path):
    directory = _with_configs(tmp_path / "set")
    assert _answers(load_problems(f"{directory}:socratic")) == ["1"]
    assert _answers(load_problems(f"{directory}:main@train", role="test")) == ["0"]
    message = _error(directory)
    assert message.startswith(
        f"{directory}: can't be loaded as a data set (Config name is missing."
    )
    assert "'main', 'socratic'" in message
    assert "PLACE:CONFIG" in message
    # A copy that is kept under its id has the id's defaults.
    assert _answers(load_problems(_with_configs(tmp_path / "openai" / "gsm8k"))) == [
        "0"
    ]


def test_published_test_sets(tmp_path):
    svamp = write_set(
        tmp_path / "ChilleD" / "SVAMP", {"train": rows(1, 2), "test": rows(3)}
    )
    assert _answers(load_problems(svamp, role="test")) == ["1", "2", "3"]
    assert _answers(load_problems(f"{svamp}@test", role="test")) == ["3"]
    assert _answers(load_problems(svamp, role="train")) == ["1", "2"]
    hard = write_set(tmp_path / "juyoung-trl" / "gsm-hard", {"train": rows(7)})
    assert _answers(load_problems(hard, role="test")) == ["7"]


def test_an_existing_path_comes_before_all_else(tmp_path, monkeypatch):
    odd = write_set(tmp_path / "a:b@c", {"train": rows(5)})
    assert _answers(load_problems(odd)) == ["5"]
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "owner" / "name", {"train": rows(6)})
    assert _answers(load_problems("owner/name")) == ["6"]


def test_files_that_are_broken(tmp_path, capfd, caplog):
    logging.getLogger("datasets").addHandler(caplog.handler)  # which doesn't propagate
    path = tmp_path / "set.parquet"
    whole = Path(write_parquet(path, rows(*range(1000)))).read_bytes()
    for data in (b"", b"garbage", whole[: len(whole) // 2], b"\0" * 200 + whole[200:]):
        path.write_bytes(data)
        assert _error(str(path)).startswith(f"{path}: not a readable parquet file (")
    assert (
        _error(str(tmp_path / "none.parquet"))
        == f"{tmp_path}/none.parquet: no such file; check the path"
    )
    directory = write_set(tmp_path / "set", {"train": rows(1), "test": rows(2)})
    broken = tmp_path / "set" / "data" / "test-00000-of-00001.parquet"
    broken.write_bytes(whole[:-50])
    assert _error(directory, "test").startswith(
        f"{directory}: can't be loaded as a data set ("
    )
    write_jsonl(tmp_path / "lines" / "train.jsonl", rows(1))
    (tmp_path / "lines" / "train.jsonl").write_text('{"question": "Q?", "answer"')
    assert _error(str(tmp_path / "lines")).startswith(
        f"{tmp_path}/lines: can't be loaded as a data set ("
    )
    (tmp_path / "empty").mkdir()
    assert "empty doesn't contain any data files" in _error(str(tmp_path / "empty"))
    logging.getLogger("datasets").removeHandler(caplog.handler)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_sets_without_a_problem(tmp_path):
    empty = pa.table(
        {"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())}
    )
    parquet.write_table(empty, tmp_path / "set.parquet")
    assert "set.parquet: holds no problems" in _error(str(tmp_path / "set.parquet"))


def test_sources_that_name_nothing(tmp_path):
    path = write_parquet(tmp_path / "set.parquet", rows(1))
    assert (
        _error(f"{path}@train")
        == f"{path}@train: a file has no configs or splits; give {path} alone"
    )
    assert _error("gsm8k").startswith(
        "gsm8k: no such file or directory, and no hub id owner/name"
    )
    for path in (f"{tmp_path}/none", "../none", "a/b/c"):
        assert "no such file or directory, and no hub id owner/name" in _error(path)


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_a_hub_id_is_one_line_at_once(monkeypatch, offline):
    if offline:  # an address is no reason to ask, if the user doesn't want it
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [()])
    start = time.monotonic()
    assert _error("nobody-at-all/no-such-set:main@test") == (
        "nobody-at-all/no-such-set: can't be loaded as a data set from the Hugging Face hub (the hub can't be reached, "
        "nor is it in its cache); check the path or id, or name a config as PLACE:CONFIG"
    )
    assert time.monotonic() - start < 5


def test_without_a_network_the_cache_is_read(cache, tmp_path, capfd):
    # As `datasets` prepares a set of the hub ...
    files = {
        "train": [write_parquet(tmp_path / "train.parquet", rows(1))],
        "test": [write_parquet(tmp_path / "b.parquet", rows(2))],
    }
    for config in ("main", "socratic"):
        builder = Parquet(
            str(cache / "datasets"),
            "gsm8k",
            config,
            hash="0",
            data_files=files,
            config_id=config,
        )
        builder.download_and_prepare()
    (cache / "datasets" / "gsm8k").rename(cache / "datasets" / "openai___gsm8k")
    capfd.readouterr()
    assert _answers(load_problems("openai/gsm8k", role="test")) == ["2"]
    assert "can't be reached" in _error("openai/gsm8k:other")
    assert "openai/gsm8k: has no split 'validation', only train, test" in _error(
        "openai/gsm8k", "validation"
    )
    # ... and as the hub's own client keeps its files.
    repository = cache / "hub" / "datasets--zen-E--GSM8k-Aug"
    write_set(repository / "snapshots" / ("0" * 40), {"train": rows(3)})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert _answers(load_problems("zen-E/GSM8k-Aug")) == ["3"]
    assert capfd.readouterr() == ("", "")


def test_hub_ids_go_to_the_library_with_config_and_split(tmp_path, monkeypatch):
    # Stands in for the hub: the library's own loader, on directories under the ids' names.
    load = datasets.load_dataset
    asked = []

    def load_dataset(hub_id: str, config: str | None) -> Any:
        asked.append((hub_id, config))
        return load(str(tmp_path / hub_id), config)

    monkeypatch.setattr(dataset_rows, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    _with_configs(tmp_path / "openai" / "gsm8k")
    write_set(tmp_path / "ChilleD" / "SVAMP", {"train": rows(1), "test": rows(2)})
    assert _answers(load_problems("openai/gsm8k")) == ["0"]
    assert _answers(load_problems("openai/gsm8k:socratic@train", role="test")) == ["1"]
    assert _answers(load_problems("ChilleD/SVAMP", role="test")) == ["1", "2"]
    assert asked == [
        ("openai/gsm8k", "main"),
        ("openai/gsm8k", "socratic"),
        ("ChilleD/SVAMP", None),
    ]
    message = _error("nobody/nothing")
    assert message.startswith(
        "nobody/nothing: can't be loaded as a data set from the Hugging Face hub ("
    )


def test_config_keys_take_their_own_split(tmp_path):
    config = load_config()
    synthetic = merge_settings(SyntheticConfig(), config.data.synthetic)
    train = synthetic_problems("train", synthetic)[:5]
    other = synthetic_problems("test", synthetic)
    splits = {
        "train": train,
        "validation": train[2:3],
        "test": other[:2],
        "extra": other[2:5],
    }
    records = {
        name: [vars(problem) | {"columns": None} for problem in split]
        for name, split in splits.items()
    }
    source = write_set(tmp_path / "set", records)
    config.data.update(train=source, valid=source)
    config.data.eval.update(same=source, large=f"{source}@extra")
    experiment = build(read_config(config), tmp_path / "work")
    # Those of the validation split are left out.
    assert experiment.train.problems == train[:2] + train[3:]
    assert experiment.valid.problems == train[2:3]
    assert experiment.test_set("same").problems == other[:2]
    assert experiment.test_set("large").problems == other[2:5]


def test_compressed_files_and_other_names_of_them(tmp_path):
    records = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    lines = "\n".join(map(json.dumps, records)).encode()
    texts = {"set.ndjson": lines, "set.jsonl.gz": gzip.compress(lines), "set.json.GZ": gzip.compress(lines),
             "set.csv.gz": gzip.compress(b"question,answer\na,1\nb,2\n")}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
        assert load_problems(str(tmp_path / name)) == load_problems(records)
    for text in (b"no gzip", texts["set.csv.gz"][:-9]):
        (tmp_path / "bad.csv.gz").write_bytes(text)
        with pytest.raises(UserError, match=r"bad.csv.gz: not a readable gzip file"):
            load_problems(str(tmp_path / "bad.csv.gz"))


def test_a_cell_may_be_long(tmp_path):
    (tmp_path / "set.csv").write_text("question,answer\n" + "x" * 200_000 + ",1\n")
    assert len(load_problems(str(tmp_path / "set.csv"))[0].question) == 200_000


def test_folders_that_the_library_has_saved(tmp_path, capfd):
    rows = datasets.Dataset.from_list(
        [{"question": str(n), "answer": n} for n in range(20)]
    )
    rows.save_to_disk(tmp_path / "alone")
    datasets.DatasetDict(train=rows, test=rows.select([3])).save_to_disk(
        tmp_path / "splits"
    )
    for role in ("train", "validation", "test"):
        assert len(load_problems(str(tmp_path / "alone"), role=role)) == 20
    assert len(load_problems(f"{tmp_path}/alone[test]")) == 2
    assert [
        each.answer for each in load_problems(str(tmp_path / "splits"), role="test")
    ] == ["3"]
    assert len(load_problems(f"{tmp_path}/splits@train", role="test")) == 20
    with pytest.raises(
        UserError, match="alone@test: was saved without configs or splits; give "
    ):
        load_problems(f"{tmp_path}/alone@test")
