"""Do the train files load with ``datasets``, and if not, which line is to blame?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_gkd.fault import StageFault
from pytest_gkd.workload import collector
from pytest_gkd.workload.datafiles import DataFile
from pytest_gkd.workload.jsonlines import (
    corrupt,
    first_bad_line,
    first_changed_type,
    is_one_value,
    nonblank_lines,
)


def load(files: Sequence[DataFile], cache_dir: Path) -> Any:
    """All files as one ``datasets.Dataset``, in their order, cached in ``cache_dir``.

    The cache is the caller's own, so no lock or leftover of another run is met.
    Raises StageFault ``data.corrupt``, ``data.schema`` or ``data.empty`` where the
    reason is found in a file; else the error of ``datasets`` itself.
    """
    with collector.paused():
        import datasets

    datasets.disable_progress_bars()
    parts = []
    for kind, group in itertools.groupby(files, key=lambda file: file.kind):
        members = list(group)
        try:
            parts.append(
                datasets.load_dataset(
                    kind,
                    data_files=[file.path for file in members],
                    split="train",
                    cache_dir=str(cache_dir),
                )
            )
        except Exception as error:
            fault = _reason(members, error)
            if fault is None:
                raise
            raise fault from error
    if len(parts) == 1:
        return parts[0]
    try:
        return datasets.concatenate_datasets(parts)
    except ValueError as error:
        raise StageFault(
            "data.schema",
            f"the train files do not have the same columns: {error}",
            facts={"columns": [list(part.column_names) for part in parts]},
        ) from error


def locate(files: Sequence[DataFile], row: int) -> str:
    """Where a row of the whole lies: ``file:line`` in JSON lines, else ``file row n``.

    Rows count from 0, lines from 1.
    """
    for file in files:
        if file.kind == "parquet":
            import pyarrow.parquet

            count = pyarrow.parquet.read_metadata(file.path).num_rows
            if row < count:
                return f"{file.path} row {row}"
        elif "://" in file.path or is_one_value(file.path):
            return f"{file.path} row {row}"  # the last one, or alone: not counted
        else:
            count = 0
            for line, _ in nonblank_lines(file.path):
                if count == row:
                    return f"{file.path}:{line}"
                count += 1
        row -= count
    return f"row {row} after the last file"


def bad_text(files: Sequence[DataFile]) -> StageFault | None:
    """The first line that is no JSON object in UTF-8, or changes a column's type."""
    for file in files:
        if file.kind != "json" or "://" in file.path or is_one_value(file.path):
            continue
        fault = first_bad_line(file.path) or first_changed_type(file.path)
        if fault is not None:
            return fault
    return None


def _reason(files: Sequence[DataFile], error: Exception) -> StageFault | None:
    """The cause of a failed load, where the files themselves show it."""
    if "corresponds to no data" in str(error):
        return _no_rows(files[0].path)
    if type(error).__name__ == "DatasetGenerationCastError":
        return StageFault(
            "data.schema",
            f"the train files do not have the same columns: {error}".split("\n")[0],
            facts={"path": files[0].path},
        )
    for file in files:
        if file.kind == "parquet" and "://" not in file.path:
            fault = _parquet_fault(file.path)
            if fault is not None:
                return fault
    return bad_text(files)


def _no_rows(path: str) -> StageFault:
    return StageFault(
        "data.empty", f"{path} has no rows", facts={"path": path, "rows": 0}
    )


def _parquet_fault(path: str) -> StageFault | None:
    """What shows when pyarrow reads all of one file, if anything.

    A file without rows loads, unless its writer had no value to tell a type by.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        for _ in file.iter_batches():
            pass
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        return corrupt(path, f"cannot be read: {str(error).splitlines()[0]}")
    return None if file.metadata.num_rows else _no_rows(path)
