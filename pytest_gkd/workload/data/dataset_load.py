"""The rows of the train files, as ``datasets`` gives them to a job, table by table.

They are streamed by the readers that ``load_dataset`` itself uses. Nothing is copied
into a cache, no lock is taken, and memory does not grow with the data.
"""

from __future__ import annotations

import contextlib
import itertools
import lzma
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import collector, paths
from pytest_gkd.workload.data.json_lines import (
    corrupt,
    first_bad_line,
    first_changed_type,
    first_late_value,
    first_too_deep,
    is_disguised,
    is_sealed,
    is_spread,
    no_rows,
    objects_of,
    open_text,
    values,
)
from pytest_gkd.workload.data.train_files import LOADERS, DataFile
from pytest_gkd.workload.models import model_paths

if TYPE_CHECKING:
    import pyarrow

TABLE_ROWS = 10_000
# A dataset on the hub comes over the network, so only this many rows of it are read.
HUB_ROWS = 20_000


@contextlib.contextmanager
def _torch_left_out() -> Iterator[None]:
    """Keep datasets from importing torch for the streams created inside.

    It does so to make a stream a torch IterableDataset (datasets 5.2,
    iterable_dataset.py, _maybe_add_torch_iterable_dataset_parent_class), which only a
    DataLoader needs; it costs 1 s of CPU time while an engine is starting.
    """
    with collector.paused():
        from datasets import config
    known = config.TORCH_AVAILABLE
    config.TORCH_AVAILABLE = known and "torch" in sys.modules
    try:
        yield
    finally:
        config.TORCH_AVAILABLE = known


@dataclass(frozen=True)
class Part:
    """Files of one kind as a stream of rows, with the columns of the first file."""

    stream: Any
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """All train files as one stream of rows.

    ``features`` are the column types, None where the reader of a kind of file does not
    tell them. ``cache_dirs`` are where ``load_dataset`` would prepare the files, below
    the cache that ``open_rows`` was given. ``limit`` is the number of rows after which
    the stream is cut off, None for no limit.
    """

    parts: tuple[Part, ...]
    features: Any
    files: tuple[DataFile, ...]
    columns: tuple[str, ...]
    cache_dirs: tuple[Path, ...]
    limit: int | None

    def tables(
        self, columns: Sequence[str], size: int | None = None
    ) -> Iterator[pyarrow.Table]:
        """The rows of these columns, in order, ``size`` or TABLE_ROWS at a time.

        Raises StageFault ``data.corrupt``, ``data.schema`` or ``data.empty`` if the
        reason is found in a file, otherwise the error of ``datasets`` itself.
        """
        left = self.limit
        with _explained(self.files):
            for table in self._aligned(columns, size or TABLE_ROWS):
                yield table if left is None else table.slice(0, left)
                left = left and max(0, left - len(table))
                if left == 0:
                    return

    def _aligned(self, columns: Sequence[str], size: int) -> Iterator[pyarrow.Table]:
        """The tables of every part with all of these columns, null where missing."""
        import datasets.table

        for part in self.parts:
            own = [name for name in columns if name in part.columns]
            with _torch_left_out():
                narrow = part.stream.select_columns(own or list(part.columns[:1]))
                stream = narrow.with_format("arrow")
            for table in stream.iter(batch_size=size):
                if len(self.parts) == 1:
                    yield table
                else:
                    wanted = datasets.Features({c: self.features[c] for c in columns})
                    yield datasets.table.table_cast(
                        table.select(own), wanted.arrow_schema
                    )

    def values(self, table: pyarrow.Table) -> list[dict[str, Any]]:
        """The rows of a table as a job gets them."""
        import datasets

        known = self.features or {}
        features = {c: known[c] for c in table.column_names if c in known} or None
        columns = _dataset(table, features and datasets.Features(features))[:]
        return [
            dict(zip(columns, row, strict=True))
            for row in zip(*columns.values(), strict=True)
        ]


@_torch_left_out()
def open_rows(files: Sequence[DataFile], cache_dir: Path | None) -> Rows:
    """All files as one stream of rows, in their order.

    ``cache_dir`` belongs to the caller, None means the user's; nothing large is written
    there. Raises what ``Rows.tables`` raises, and StageFault ``env.hub-unreachable``.
    """
    import datasets

    datasets.disable_progress_bars()
    filled: list[tuple[DataFile, Any, pyarrow.Table]] = []
    cache_dirs: list[Path] = []
    for kind, group in itertools.groupby(files, key=lambda file: file.kind):
        members = list(group)
        alike = [members] if kind in LOADERS else [[member] for member in members]
        for together in alike:
            with _explained(together):
                stream, prepared = _opened(together, cache_dir)
                for name, feature in (stream.features or {}).items():
                    if getattr(feature, "dtype", "") == "string_view":
                        # It has little to do.
                        stream = stream.cast_column(name, datasets.Value("string"))
                head = next(stream.with_format("arrow").iter(batch_size=1), None)
            cache_dirs += prepared
            if head is not None:
                filled.append((together[0], stream, head))
    if not filled:
        raise _reason(files, ValueError("no rows")) or no_rows(files[0].path)
    _, stream, head = filled[0]
    features = stream.features if len(filled) == 1 else _common_features(filled)
    return Rows(
        tuple(Part(stream, tuple(head.column_names)) for _, stream, head in filled),
        features,
        tuple(files),
        tuple(head.column_names if len(filled) == 1 else features),
        tuple(cache_dirs),
        HUB_ROWS if any(file.kind == "hub" for file in files) else None,
    )


def _common_features(parts: Sequence[tuple[DataFile, Any, pyarrow.Table]]) -> Any:
    """The columns of all parts and their types, as ``concatenate_datasets`` gives them.

    Only the first rows are concatenated: a stream lacks columns that only a later part
    has, and fails on another type only when it gets there. Each part is its first file,
    its stream and its first row. Raises StageFault ``data.schema``.
    """
    import datasets

    heads = [(file, _dataset(table, stream.features)) for file, stream, table in parts]
    for (one, first), (other, second) in itertools.combinations(heads, 2):
        for column in first.column_names:
            if column not in second.column_names:
                continue
            both = [head.select_columns([column]) for head in (first, second)]
            try:
                datasets.concatenate_datasets(both)
            except ValueError as error:
                a, b = (_type(head.features[column]) for head in both)
                raise StageFault(
                    "data.schema",
                    f"column {column!r} is {a} in {one.path} ({one.kind}) and {b} in "
                    f"{other.path} ({other.kind}); datasets does not combine files "
                    "that give a column different types",
                    facts={"path": other.path, "differs": column, "types": [a, b]},
                ) from error
    return datasets.concatenate_datasets([head for _, head in heads]).features


def _dataset(table: pyarrow.Table, features: Any) -> Any:
    import datasets

    info = datasets.DatasetInfo(features=features)
    # The fingerprint names cache files; there are none, and computing one takes time.
    return datasets.Dataset(table, info=info, fingerprint="none")


def _type(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or feature)


def first_rows(files: Sequence[DataFile]) -> Iterator[dict[str, Any]]:
    """The rows one by one, without importing ``datasets`` where possible.

    For the first few prompts of files that the data stage checks in full. Raises
    StageFault if a file cannot be read, and ``data.empty`` if none has a row.
    """
    is_empty = True
    for file in files:
        try:
            for row in _rows_of(file):
                is_empty = False
                # A list of texts has no columns; this is what datasets makes of it.
                yield row if isinstance(row, dict) else {"text": row}
        except _unreadable() as error:
            fault = _reason([file], error)
            raise fault or corrupt(file.path, f"cannot be read: {error}") from error
    if is_empty:
        raise no_rows(files[0].path)


def _unreadable() -> tuple[type[Exception], ...]:
    """What the readers raise for files, and ``datasets`` for requests to the hub."""
    import pyarrow

    packed = EOFError, zlib.error, lzma.LZMAError
    return OSError, ValueError, RecursionError, *packed, pyarrow.ArrowException


def _rows_of(file: DataFile) -> Iterator[Any]:
    if file.local_kind == "parquet":
        import pyarrow.parquet

        parquet = pyarrow.parquet.ParquetFile(file.path)
        for batch in parquet.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    elif file.path not in _local_json([file]):
        rows = open_rows([file], None)
        for table in rows.tables(rows.columns):
            yield from rows.values(table)
    elif is_spread(file.path):
        with open_text(file.path) as opened:
            text = opened.read().decode("utf-8-sig")
        for value in values(text):
            yield from value if isinstance(value, list) else [value]
    else:
        for _, value, _ in objects_of(file.path):
            yield value


def locate(files: Sequence[DataFile], row: int) -> str:
    """Where a row of the whole lies: ``file:line`` in JSON lines, else ``file row n``.

    Rows count from 0, lines from 1.
    """
    for file in files:
        if file.path in _local_json([file]) and not is_spread(file.path):
            count = 0
            for count, (line, _, _) in enumerate(objects_of(file.path), 1):
                if count > row:
                    return f"{file.path}:{line}"
        else:
            count = row + 1 if file is files[-1] else _count(file)
            if row < count:
                return f"{file.path} row {row}"
        row -= count
    return f"row {row} after the last file"


def _count(file: DataFile) -> int:
    """Rows of one file."""
    if file.local_kind == "parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(file.path).num_rows)
    rows = open_rows([file], None)
    return sum(len(table) for table in rows.tables(rows.columns[:1]))


def bad_text(files: Sequence[DataFile]) -> StageFault | None:
    """The first line that is no JSON object in UTF-8, or changes a column's type."""
    lines = [path for path in _local_json(files) if not is_spread(path)]
    for path in lines:
        fault = first_bad_line(path) or first_changed_type(path)
        if fault is not None:
            return fault
    return first_late_value(lines)


def _local_json(files: Sequence[DataFile]) -> list[str]:
    found = (file.path for file in files if file.local_kind == "json")
    return [path for path in found if not is_sealed(path)]


def _opened(
    files: Sequence[DataFile], cache_dir: Path | None
) -> tuple[Any, list[Path]]:
    """Files of one kind as a stream, and where they would be prepared."""
    import datasets

    first = files[0]
    if first.kind in LOADERS:
        paths = [file.path for file in files]
        builder = datasets.load_dataset_builder(
            first.kind, data_files=paths, cache_dir=cache_dir and str(cache_dir)
        )
        if any("://" not in path and is_disguised(path) for path in paths):
            # Unpacked by content, where a stream goes by the name.
            builder.download_and_prepare()
            stream = builder.as_dataset(split="train").to_iterable_dataset()
        else:
            stream = builder.as_streaming_dataset(split="train")
        return stream, [Path(builder.cache_dir)]
    if first.kind == "disk":
        saved = datasets.load_from_disk(first.path)
        if isinstance(saved, datasets.DatasetDict):
            saved = _train(saved, first.path)
        return saved.to_iterable_dataset(), []
    if first.kind == "hub":
        model_paths.reach_hub(first.path, first.origin)
    builder = datasets.load_dataset_builder(first.path)
    return _train(builder.as_streaming_dataset(), first.path), []


def _train(splits: Any, path: str) -> Any:
    """The split ``train``, or the only one with that word in its name."""
    named = [name for name in splits if str(name).startswith("train")]
    if "train" in splits or len(named) == 1:
        return splits["train" if "train" in splits else named[0]]
    raise StageFault(
        "data.schema",
        f"{path} has no split train; it has {', '.join(map(str, splits))}",
        facts={"path": path, "splits": [str(name) for name in splits]},
    )


@contextlib.contextmanager
def _explained(files: Sequence[DataFile]) -> Iterator[None]:
    """Raise a reader's error as the reason that the files show for it."""
    try:
        yield
    except StageFault:
        raise
    except Exception as error:
        raise _reason(files, error) or error from error


def _reason(files: Sequence[DataFile], error: Exception) -> StageFault | None:
    """The cause of a failed load, if the files or the error itself show it."""
    first = files[0]
    said = " ".join(str(error).split())

    def schema(problem: str) -> StageFault:
        return StageFault("data.schema", problem, facts={"path": first.path})

    for file in files:
        if file.local_kind == "parquet":
            fault = _parquet_fault(file.path)
            if fault is not None:
                return fault
    if isinstance(error, RecursionError) or "Recursion level" in str(error):
        return next(filter(None, map(first_too_deep, _local_json(files))), None)
    if str(error).startswith(("Schema at index", "Failed to parse string")):
        what = "the train files do not have the same types in the same columns"
        return schema(f"{what}: {said}")
    twice = re.match(r"Multiple matches for FieldRef\.Name\((.*?)\) in ", str(error))
    if twice is not None:
        return schema(f"{first.path} has two columns of the name {twice[1]!r}")
    if type(error).__name__ in ("CastError", "DatasetGenerationCastError"):
        # It lists both schemas, one field a line.
        why = str(error).strip().rpartition("\n")[2]
        what = f"the train files do not have the same columns: {why}"
        return bad_text(files) or schema(what)
    if "does not have a datasets dtype equivalent" in str(error):
        return schema(f"{first.path}: {error}")
    if str(error).startswith("Config name is missing"):
        what = "holds several configurations of a dataset; name the files of one. "
        facts = {"near": [], "directory": first.path}
        return paths.fault(
            "data.file-missing", first.path, first.origin, what + said, **facts
        )
    if first.kind == "hub" and isinstance(error, ConnectionError):
        return model_paths.unreachable(first.path, first.origin, str(error))
    if type(error).__name__ in ("ParserError", "EmptyDataError", "UnicodeDecodeError"):
        # pandas, which reads csv, and what it decodes
        return corrupt(first.path, f"cannot be read as {first.kind}: {error}".strip())
    return bad_text(files)


def _parquet_fault(path: str) -> StageFault | None:
    """What comes to light when pyarrow reads all of a file, if anything.

    A file without rows loads, unless its writer had no value to infer a type from.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        for _ in file.iter_batches():
            pass
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        return corrupt(path, f"cannot be read: {str(error).splitlines()[0]}")
    return None if file.metadata.num_rows else no_rows(path)
