"""Rows of data sets on the Hugging Face hub, in its cache, or in directories laid out like there."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slpo_jax.data.file_rows import Rows, arrow_records, csv_rows, json_rows, parquet_rows
from slpo_jax.errors import UserError
from slpo_jax.io.hub import hub_reachable, is_hub_id

# The records of each split.
_Splits = Mapping[str, Callable[[], Iterator[Any]]]
Role = Literal["train", "validation", "test"]
_SOURCE = re.compile(r"(?P<place>.+?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[^:@/]+))?")


class _Published(NamedTuple):
    """What to take of a published set where the source doesn't say: a name, or several joined by +."""

    config: str | None = None
    test: str = "test"


# By lower-case id. Sets that aren't here have one config, and splits that are named as their role.
_PUBLISHED = {
    "openai/gsm8k": _Published(config="main"),
    # Its only split is the test set.
    "juyoung-trl/gsm-hard": _Published(test="train"),
    # The 1,000 problems of the original set, on which results are reported; the hub's owner split them 700 + 300.
    "chilled/svamp": _Published(test="train+test"),
    # 15 problems each.
    "opencompass/aime2025": _Published(config="AIME2025-I+AIME2025-II"),
    # The others are "cn" and "all".
    "open-r1/dapo-math-17k-processed": _Published(config="en"),
}


def dataset_rows(source: str, role: Role) -> Iterator[tuple[str, Any]]:
    """Read a data set's rows.

    Args:
        source: PLACE, PLACE:CONFIG, PLACE@SPLIT or PLACE:CONFIG@SPLIT, with a directory or a hub id as PLACE, and
            configs or splits to read one after the other as CONFIG+CONFIG, SPLIT+SPLIT.
        role: what it is for, which gives the split if `source` doesn't.
    Yields:
        (where, record), `where` being source, config if there are several, split and row, for messages.
    Raises:
        UserError: the set isn't there, can't be reached or read, or has no such config or split.
    """
    place, configs, splits = _parse(source, role)
    if place.is_file():
        raise UserError(f"{source}: a file has no configs or splits; give {place} alone")
    for config in configs:
        with _quiet():
            found = _from_directory(place, config) if place.is_dir() else _from_hub(str(place), config)
        yield from _of_splits(source, place if len(configs) == 1 else f"{place}:{config}", found, splits)


def _of_splits(source: str, where: object, found: _Splits, splits: list[str]) -> Iterator[tuple[str, Any]]:
    missing = [split for split in splits if split not in found]
    if missing:
        there = list(found)
        raise UserError(
            f"{source}: has no split '{missing[0]}', only {', '.join(there)}; name one, e.g. {where}@{there[0]}"
        )
    for split in splits:
        for number, record in enumerate(found[split](), start=1):
            yield f"{where}, split {split}, row {number}", record


def source_path(source: str) -> Path:
    """Where a source's files are, if it is one of files: what is before its config and split."""
    return _parse(source, "train")[0]


def _parse(source: str, role: Role) -> tuple[Path, Sequence[str | None], list[str]]:
    """Place, configs (None is the only one) and splits."""
    whole = Path(source).expanduser()
    match = None if whole.exists() else _SOURCE.fullmatch(source)
    place = Path(match["place"]).expanduser() if match else whole
    # A copy of a published set is kept under its id as a rule, and is then taken as that set.
    hub_id = "/".join((place.resolve() if place.is_dir() else place).parts[-2:])
    published = _PUBLISHED.get(hub_id.lower(), _Published())
    config = (match and match["config"]) or published.config
    split = (match and match["split"]) or (published.test if role == "test" else role)
    return place, config.split("+") if config else [None], split.split("+")


def _loaded(place: str, config: str | None) -> _Splits:
    """What `datasets` finds there. Its usual files we read, as it rounds the numbers of JSON and CSV to 64 bits."""
    import datasets

    builder = datasets.load_dataset_builder(place, config)
    if (reader := _reader(builder)) is None:
        builder.download_and_prepare()
        return _prepared(builder.as_dataset())
    downloads = datasets.DownloadConfig(cache_dir=str(Path(datasets.config.HF_DATASETS_CACHE) / "downloads"))
    manager = datasets.DownloadManager(builder.dataset_name, download_config=downloads)
    files = manager.download_and_extract(builder.config.data_files)
    lists = {str(split): list(manager.iter_files(paths)) for split, paths in files.items()}
    return {split: functools.partial(_from_files, reader, paths) for split, paths in lists.items()}


def _reader(builder: Any) -> Callable[[Path], Rows] | None:
    """What reads a builder's files as they stand; None where its config asks for something else."""
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet

    config = builder.config
    if isinstance(builder, Csv) and config.header == "infer" and not config.names:
        return functools.partial(csv_rows, delimiter=config.sep.strip(","))  # "" is the usual one
    if isinstance(builder, Json) and config.field is None:
        return json_rows
    return parquet_rows if isinstance(builder, Parquet) and config.columns is config.filters is None else None


def _prepared(found: Mapping[Any, Any]) -> _Splits:
    return {str(split): functools.partial(from_arrow, dataset) for split, dataset in found.items()}


def from_arrow(dataset: Any) -> Iterator[Any]:
    """The records of a `datasets.Dataset`."""
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        yield from arrow_records(table)


def _from_files(reader: Callable[[Path], Rows], paths: Sequence[str]) -> Iterator[Any]:
    for path in paths:
        for _, record in reader(Path(path)):
            yield record


def _from_directory(directory: Path, config: str | None) -> _Splits:
    try:
        return _loaded(str(directory), config)
    except Exception as error:  # the library passes on what its readers, arrow and the file system raise
        raise UserError(
            f"{directory}: can't be loaded as a data set ({_reason(error)}); "
            "give a directory with parquet or jsonl files, a config as DIRECTORY:CONFIG, or a file"
        ) from error


def _from_hub(hub_id: str, config: str | None) -> _Splits:
    if "/" not in hub_id or not is_hub_id(hub_id):
        raise UserError(f"{hub_id}: no such file or directory, and no hub id owner/name; check the path")
    if not hub_reachable():
        return _from_cache(hub_id, config)
    try:
        return _loaded(hub_id, config)
    except Exception as error:  # as above, and what the hub's client raises
        raise UserError(
            f"{hub_id}: no such file or directory, and can't be loaded from the Hugging Face hub ({_reason(error)}); "
            "check the path or id, or name a config as OWNER/NAME:CONFIG"
        ) from error


def _from_cache(hub_id: str, config: str | None) -> _Splits:
    """A set that `datasets` has prepared before, or whose files the hub's client has fetched."""
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import snapshot_download

    with contextlib.suppress(ValueError, OSError):  # not prepared; its files may be there all the same
        builder = Cache(
            repo_id=hub_id, dataset_name=hub_id.split("/")[1], config_name=config, version="auto", hash="auto"
        )
        return _prepared(builder.as_dataset())
    try:
        directory = snapshot_download(hub_id, repo_type="dataset", local_files_only=True)
    except (ValueError, OSError):
        raise UserError(
            f"{hub_id}: no such file or directory, and the Hugging Face hub can't be reached nor is it in its cache; "
            "give a local file or directory, or check the network"
        ) from None
    return _from_directory(Path(directory), config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without log lines for errors that become ours."""
    import datasets

    level, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _reason(error: BaseException) -> str:
    """The first cause on one line, without the library's advice about its own functions."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split("Example of usage")[0].split())
    return text or type(error).__name__
