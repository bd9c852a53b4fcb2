"""Rows of a data set, wherever it lies, each with the place it came from. Nothing is ever held whole.

Light on purpose: `identity` and `check` import neither datasets nor pyarrow.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from loram.artifact import file_digest
from loram.data import files, stdlib
from loram.data.files import Row
from loram.errors import DataError, did_you_mean
from loram.recipe import DatasetSection

# Words in file names that say which split a file belongs to, as the Hub reads them.
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
# `path: json, data_files: rows.jsonl` is how the datasets library names local files.
_BUILDERS = ("json", "csv", "parquet", "text")
# Files of a folder that `datasets.save_to_disk` wrote: of one split, and of several.
_SAVED = ("state.json", "dataset_dict.json")
# Rows among which a Hub set is shuffled when only some are taken; its files are shuffled as a whole.
SHUFFLE_BUFFER = 10_000


def _kind(dataset: DatasetSection) -> Literal["stdlib", "files", "saved", "hub"]:
    path = Path(dataset.path).expanduser()
    if dataset.path.startswith("stdlib:"):
        return "stdlib"
    if any((path / name).is_file() for name in _SAVED):
        return "saved"
    local = path.suffix in files.SUFFIXES or path.exists() or dataset.path.startswith((".", "/", "~"))
    return "files" if local or (dataset.path in _BUILDERS and dataset.data_files) else "hub"


def identity(dataset: DatasetSection) -> dict[str, Any]:
    """What the rows depend on, for fingerprints: file contents, the Python version, or the Hub revision."""
    known = {**dataset.settings()}
    del known["weight"]  # of the mixture, not of the rows
    kind = _kind(dataset)
    if kind == "stdlib":
        known["content"] = stdlib.version()
    elif kind != "hub":
        with contextlib.suppress(DataError):  # what is not there is refused where it is read
            known["content"] = [_digest(str(path), *_stamp(path)) for path in _paths(dataset)]
            del known["path"], known["data_files"]
    return known


def _paths(dataset: DatasetSection) -> list[Path]:
    """The files of a local data set; DataError as `check`."""
    return _saved_files(dataset) if _kind(dataset) == "saved" else _local_files(dataset)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@functools.cache
def _digest(path: str, size: int, modified: int) -> str:
    """A file's sha256, read once a process as long as the file is not written to."""
    return file_digest(Path(path))


def check(dataset: DatasetSection) -> None:
    """Refuses a data set that cannot exist (DataError), without reading or downloading it."""
    kind = _kind(dataset)
    if kind == "stdlib":
        if dataset.path not in stdlib.NAMES:
            raise DataError(f"No data set '{dataset.path}'{did_you_mean(dataset.path, stdlib.NAMES)}.")
        if dataset.split not in stdlib.SPLITS:
            raise DataError(f"{dataset.path} has the splits {list(stdlib.SPLITS)}, not '{dataset.split}'.")
    elif kind != "hub":
        _paths(dataset)


def load_rows(dataset: DatasetSection) -> Iterator[Row]:
    """The rows one by one, columns renamed; a random `limit` of them (in source order) when the recipe sets one.

    Of a Hub set with a limit the first `limit` rows of a shuffled stream are taken, so that not all of it is fetched.

    Raises:
        DataError: file missing or unreadable, named by line; or no rows.
    """
    check(dataset)
    empty = True
    for row in _hub(dataset) if _kind(dataset) == "hub" else _chosen(dataset):
        empty = False
        yield Row(_renamed(row, dataset), row.place, row.opens, row.closes) if dataset.columns else row
    if empty:
        raise DataError(f"{dataset.path} has no rows.", fix="Check the file and the split.")


def _chosen(dataset: DatasetSection) -> Iterator[Row]:
    if dataset.limit is None:
        yield from _read(dataset)
        return
    total = _count(dataset)
    if dataset.limit >= total:
        yield from _read(dataset)
        return
    wanted = iter(sorted(random.Random(dataset.seed).sample(range(total), dataset.limit)))
    following = next(wanted, None)
    for number, row in enumerate(_read(dataset)):
        if number == following:
            yield row
            following = next(wanted, None)
            if following is None:
                return


def _renamed(row: Row, dataset: DatasetSection) -> dict[str, Any]:
    renamed = dict(row.values)
    for target, source in dataset.columns.items():
        if source not in row.values:
            raise DataError(
                f"{row.place} has no column '{source}'{did_you_mean(source, row.values)}.",
                fix=f"Its columns are {sorted(row.values)}; correct `columns`.",
            )
        renamed[target] = row.values[source]
    return renamed


def _read(dataset: DatasetSection) -> Iterator[Row]:
    kind = _kind(dataset)
    if kind == "stdlib":
        for values in stdlib.rows(dataset.path, dataset.split):
            yield Row(values, f"{dataset.path} {values['source']}")
    elif kind == "saved":
        for number, values in enumerate(_saved(dataset)):
            yield Row(dict(values), f"{dataset.path}[{number}]")
    else:
        for path in _local_files(dataset):
            yield from files.read(path)


def _count(dataset: DatasetSection) -> int:
    kind = _kind(dataset)
    if kind == "stdlib":
        return len(stdlib.rows(dataset.path, dataset.split))
    if kind == "saved":
        return len(_saved(dataset))
    return sum(files.count(path) for path in _local_files(dataset))


def _local_files(dataset: DatasetSection) -> list[Path]:
    """The files of a path, a folder, or patterns inside a folder, sorted by name.

    Raises:
        DataError: nothing there, files of several kinds, or none of the split.
    """
    path = Path(dataset.path).expanduser()
    if dataset.data_files:
        return _matching(Path() if dataset.path in _BUILDERS and not path.exists() else path, dataset)
    if path.is_dir():
        return _of_folder(path, dataset.split)
    if path.suffix not in files.SUFFIXES and path.exists():
        raise DataError(f"{path} is no data file that can be read.", fix=f"Use one of {', '.join(files.SUFFIXES)}.")
    if not path.is_file():
        raise DataError(f"No data file at {dataset.path}.", fix="Check the path in the recipe.")
    return [path]


def _matching(folder: Path, dataset: DatasetSection) -> list[Path]:
    found: list[Path] = []
    for pattern in dataset.data_files:
        try:
            matches = [path for path in folder.glob(pattern) if path.is_file()]
        except (NotImplementedError, ValueError) as error:
            raise DataError(f"data_files '{pattern}': {error}.", fix="Give patterns inside the folder.") from error
        if not matches:
            raise DataError(f"No file matches {folder / pattern}.", fix="Correct path and data_files.")
        found += sorted(matches)
    for path in found:
        if path.suffix not in files.SUFFIXES:
            raise DataError(f"{path} is no data file that can be read.", fix=f"Use one of {', '.join(files.SUFFIXES)}.")
    return list(dict.fromkeys(found))


def _of_folder(folder: Path, split: str) -> list[Path]:
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in files.SUFFIXES
        and path.name != "README.md"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise DataError(f"{folder} holds no data file.", fix=f"It may hold {', '.join(files.SUFFIXES)}.")
    splits = {path: _split_of(path.relative_to(folder)) for path in found}
    if any(splits.values()):
        wanted = next((name for name, words in _SPLIT_WORDS.items() if split in words), split)
        named = sorted({name for name in splits.values() if name})
        found = [path for path in found if splits[path] == wanted]
        if not found:
            raise DataError(f"{folder} has the splits {named}, not '{split}'.", fix="Set split, or data_files.")
    kinds = sorted({path.suffix for path in found})
    if len(kinds) > 1:
        raise DataError(f"{folder} holds files of several kinds: {', '.join(kinds)}.", fix="Choose with data_files.")
    return found


def _split_of(name: Path) -> str | None:
    words = set(re.split(r"[^a-z]+", name.with_suffix("").as_posix().lower()))
    return next((split for split, known in _SPLIT_WORDS.items() if words & known), None)


def _saved_files(dataset: DatasetSection) -> list[Path]:
    return sorted(path for path in _saved_folder(dataset).iterdir() if path.is_file())


def _saved_folder(dataset: DatasetSection) -> Path:
    """Where a saved data set's split lies: the folder itself, or one below it."""
    folder = Path(dataset.path).expanduser()
    if (folder / "state.json").is_file():
        return folder
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    if dataset.split not in splits:
        raise DataError(f"{folder} has the splits {splits}, not '{dataset.split}'.", fix="Set split.")
    return folder / dataset.split


def _saved(dataset: DatasetSection) -> Any:
    """A data set saved by the datasets library; its rows stay on disk until they are read."""
    from datasets import load_from_disk

    folder = _saved_folder(dataset)
    try:
        return load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder} cannot be read: {error}", fix="Save the data set again.") from error


def hub_revision(dataset: DatasetSection) -> str | None:
    """The commit that a Hub set's revision stands for now; None for what is not on the Hub, or without network."""
    if _kind(dataset) != "hub":
        return None
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(dataset.path, revision=dataset.revision, timeout=10).sha
    except Exception:  # whatever is wrong will be said when the rows are read
        return None


def _hub(dataset: DatasetSection) -> Iterator[Row]:
    from datasets import load_dataset

    # A slice of a split (`train[:10%]`) can only be cut from what is there whole.
    streaming = not re.search(r"[\[+]", dataset.split)
    patterns = list(dataset.data_files) or None

    def load(streaming: bool) -> Any:
        return load_dataset(
            dataset.path, dataset.name, split=dataset.split, revision=dataset.revision, data_files=patterns,
            streaming=streaming,
        )  # fmt: skip

    number = 0
    try:
        try:
            loaded = load(streaming)
        except ConnectionError:
            loaded = load(False)  # what an earlier run left in the library's cache
        if dataset.limit is not None:
            loaded = _some(loaded, dataset.limit, dataset.seed)
        for values in loaded:
            yield Row(dict(values), f"{dataset.path}[{number}]")
            number += 1
    except DataError:
        raise
    except Exception as error:
        where = f" at row {number:,}" if number else ""
        raise DataError(
            f"Cannot get the data set '{dataset.path}' ({dataset.split}){where}: {error}",
            fix="Check the id, split and network, or give a local file.",
        ) from error


def _some(loaded: Any, limit: int, seed: int) -> Any:
    if hasattr(loaded, "select"):  # all of it is on disk
        total = len(loaded)
        return loaded.select(sorted(random.Random(seed).sample(range(total), min(limit, total))))
    return loaded.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER).take(limit)
