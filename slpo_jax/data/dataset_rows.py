"""Rows of data sets on the Hugging Face hub, in its cache, or in directories laid out like there."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slpo_jax.data.record_readers import dataset_records
from slpo_jax.errors import UserError
from slpo_jax.io.files import file_digest, hub_reachable, is_hub_id

Role = Literal["train", "validation", "test"]
_SOURCE = re.compile(r"(?P<place>.+?)(?::(?P<config>[^:@/]+))?(?:@(?P<split>[^:@/]+))?")
_PART = re.compile(r"(.+)\[(train|valid|test)\]")


class Split(NamedTuple):
    """An opened split.

    Attributes:
        where: the place of its rows, for messages.
        rows: a `datasets.Dataset`.
    """

    where: str
    rows: Any

    @property
    def content(self) -> Any:
        """Digests of the files that its rows are in; equal to nothing else where they are in memory."""
        digests: list[str] = []
        for file in self.rows.cache_files:
            path = Path(file["filename"])
            digests.append(file_digest(path))
        return tuple(digests) or object()


class _Published(NamedTuple):
    """The config and test split of a published set where the source doesn't say: a name, or several joined by +."""

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


class NoSplit(UserError):
    """An error: a data set is there, and hasn't the split."""


def open_splits(source: str, role: Role) -> list[Split]:
    """Open a data set.

    Args:
        source: PLACE, PLACE:CONFIG, PLACE@SPLIT or PLACE:CONFIG@SPLIT, with a directory or a hub id as PLACE, and
            configs or splits to read one after the other as CONFIG+CONFIG, SPLIT+SPLIT. A directory may also be what
            `save_to_disk` of the library writes.
        role: what it is for, which gives the split if `source` doesn't.
    Raises:
        UserError: the set isn't there, can't be reached or read, or has no such config.
        NoSplit: it has no such split.
    """
    place, configs, splits = _parse(source, role)
    if place.is_file():
        raise UserError(
            f"{source}: a file has no configs or splits; give {place} alone"
        )
    opened = []
    for config in configs:
        with _quiet():
            dataset = _splits(place, config)
        if is_saved_alone(place):
            if not Path(source).expanduser().exists():
                raise UserError(
                    f"{source}: was saved without configs or splits; give {place} alone"
                )
            return [Split(str(place), dataset)]
        where = str(place)
        if len(configs) > 1:
            where = f"{place}:{config}"
        available = list(map(str, dataset))
        missing = [split for split in splits if split not in available]
        if missing:
            raise NoSplit(
                f"{source}: has no split '{missing[0]}', only {', '.join(available)}; name one, e.g. "
                f"{where}@{available[0]}"
            )
        for split in splits:
            rows = dataset[split]
            opened.append(Split(f"{where}, split {split}", rows))
    return opened


def is_saved_alone(place: Path) -> bool:
    """Tell whether a folder is what `datasets.Dataset.save_to_disk` writes: one set, without splits."""
    names = ("state.json", "dataset_info.json")
    return all((place / name).is_file() for name in names)


def split_rows(splits: Sequence[Split]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of opened splits: (where, record), `where` being source, config if several, split and row."""
    for split in splits:
        records = dataset_records(split.rows)
        for number, record in enumerate(records, start=1):
            yield f"{split.where}, row {number}", record


def part_of(source: str) -> tuple[str, str]:
    """Return a source without "[train]", "[valid]" or "[test]" at its end, and which of these it has, or ""."""
    path = Path(source).expanduser()
    match = None if path.exists() else _PART.fullmatch(source)
    if match is None:
        return source, ""
    return match[1], match[2]


def place_of(source: str, role: Role) -> tuple[Path, str]:
    """Return where a source of files is, and what of the files it takes, in one form; "" is all of a file.

    Args:
        source: as `problems.load_problems` takes it.
        role: what it is for.
    """
    whole_source, part = part_of(source)
    split_role: Role = "train" if part else role
    place, configs, splits = _parse(whole_source, split_role)
    selection = f"{configs}{splits}" if place.is_dir() else ""
    return place, selection + part


def _parse(source: str, role: Role) -> tuple[Path, Sequence[str | None], list[str]]:
    """Return place, configs (None is the only one) and splits."""
    place = Path(source).expanduser()
    config = None
    split = None
    match = None if place.exists() else _SOURCE.fullmatch(source)
    if match:
        place = Path(match["place"]).expanduser()
        config = match["config"]
        split = match["split"]

    # A copy of a published set is kept under its id as a rule, and is then taken as that set.
    whole_place = place.resolve() if place.is_dir() else place
    owner_and_name = whole_place.parts[-2:]
    hub_id = "/".join(owner_and_name)
    published = _PUBLISHED.get(hub_id.lower(), _Published())
    config = config or published.config
    configs: Sequence[str | None] = [None]
    if config:
        configs = config.split("+")
    if not split:
        split = published.test if role == "test" else role
    return place, configs, split.split("+")


def _splits(place: Path, config: str | None) -> Any:
    """Load the splits that `datasets` finds in a directory, on the hub, or in its cache; a set saved alone as it is.

    Raises:
        UserError: it can't be had.
    """
    import datasets

    hub_id = "" if place.is_dir() else str(place)
    if hub_id and ("/" not in hub_id or not is_hub_id(hub_id)):
        raise UserError(
            f"{hub_id}: no such file or directory, and no hub id owner/name; check the path"
        )
    try:
        # Written by `save_to_disk`.
        if is_saved_alone(place) or (place / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(place))
        cached = hub_id and not hub_reachable()
        if cached:
            return _from_cache(hub_id, config)
        return datasets.load_dataset(str(place), config)
    except Exception as error:
        # The library passes on what its readers, arrow, the file system and the hub raise.
        source = " from the Hugging Face hub" if hub_id else ""
        raise UserError(
            f"{place}: can't be loaded as a data set{source} ({_reason(error)}); "
            "check the path or id, or name a config as PLACE:CONFIG"
        ) from error


def _from_cache(hub_id: str, config: str | None) -> Mapping[Any, Any]:
    """Load a set that `datasets` has prepared before, or whose files the hub's client has fetched."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import snapshot_download

    # It may not be prepared, but its files may be there all the same.
    with contextlib.suppress(ValueError, OSError):
        _, name = hub_id.split("/")
        return Cache(
            repo_id=hub_id,
            dataset_name=name,
            config_name=config,
            version="auto",
            hash="auto",
        ).as_dataset()
    try:
        directory = snapshot_download(
            hub_id, repo_type="dataset", local_files_only=True
        )
    except (ValueError, OSError):
        raise UserError("the hub can't be reached, nor is it in its cache") from None
    return datasets.load_dataset(directory, config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out progress bars, and log lines for errors that become ours."""
    import datasets

    level = datasets.logging.get_verbosity()
    bars = datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _reason(error: BaseException) -> str:
    """Return the first cause on one line, without the library's advice about its own functions."""
    while error.__cause__ is not None:
        error = error.__cause__
    message, _, _ = str(error).partition("Example of usage")
    text = " ".join(message.split())
    return text or type(error).__name__
