"""The smallest representative slice of a training file, with the same schema."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pytest_gkd import sanitize
from pytest_gkd.job.findings import CheckError
from pytest_gkd.language import tr_filled

NO_JSON = "a line that is not valid JSON"
LINES = (".jsonl", ".ndjson", ".json")
TABLES = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc", ".csv": "csv"}
# The most kinds of rows of which one is kept.
MOST_KINDS = 64


class Kept(NamedTuple):
    """A row that is kept: its index from 0, its number of characters, and why."""

    row: int
    characters: int
    why: str


@dataclass
class Slice:
    """What was kept of a file with that many ``rows``, and where it was written."""

    file: str
    output: str
    rows: int
    kept: list[Kept]

    def to_json(self) -> dict[str, Any]:
        """As ``gkd tiny-data --format=json`` prints it."""
        kept = [one._asdict() for one in self.kept]
        return {"schema": 1, **asdict(self), "kept": kept}


def write(path: Path, output: Path, most: int) -> Slice:
    """Write at most ``most`` rows of ``path`` to ``output``, in the file's order.

    The shortest, the longest and the typical row, one of each kind (which columns are
    empty, which types and roles they hold), then evenly spaced rows. JSON lines are
    copied verbatim. Raises CheckError if the file cannot be read or if ``output``
    already exists.
    """
    if output.exists():
        raise CheckError(f"{output} already exists and is kept: name another --output")
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise CheckError(f"{path} {what}; give a train file")
    rows = _lines(path) if path.suffix in LINES else _table_rows(path)
    try:
        kept, total = _chosen(rows, most)
        if not total:
            raise CheckError(f"{path} has no rows")
        numbers = {one.row for one in kept}
        if path.suffix in LINES:
            with output.open("xb") as file:
                wanted = (line for n, line in enumerate(_raw(path)) if n in numbers)
                file.writelines(line.rstrip(b"\r\n") + b"\n" for line in wanted)
        else:
            _write_table(path, output, sorted(numbers))
    except OSError as error:
        raise CheckError(f"{path}: {error.strerror or error}") from None
    return Slice(str(path), str(output), total, kept)


def _chosen(rows: Iterable[Any], most: int) -> tuple[list[Kept], int]:
    sizes = array("q")
    kinds: dict[str, int] = {}
    for number, row in enumerate(rows):
        sizes.append(_characters(row))
        kind = _kind(row)
        if kind not in kinds and len(kinds) < MOST_KINDS:
            kinds[kind] = number
    if not sizes:
        return [], 0
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    why = {order[0]: "the shortest"}
    why.setdefault(order[-1], "the longest")
    why.setdefault(order[len(order) // 2], "of typical length")
    for kind, number in kinds.items():
        if len(why) < most:
            why.setdefault(number, f"the first with {kind}")
    step = max(1, len(sizes) // most)
    for number in range(0, len(sizes), step):
        if len(why) < most:
            why.setdefault(number, "at an even distance")
    broken = {number for kind, number in kinds.items() if NO_JSON in kind}
    for number in broken & why.keys():
        if NO_JSON not in why[number]:
            why[number] += f", {NO_JSON}"
    kept = [Kept(n, sizes[n], why[n]) for n in sorted(why)]
    return kept[:most], len(sizes)


def _characters(value: Any) -> int:
    """The number of characters of all texts in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return 0


def _kind(value: Any) -> str:
    """A row's shape, apart from its texts: columns, types, roles, emptiness."""
    if isinstance(value, dict):
        parts = (f"{key}:{_kind(one)}" for key, one in value.items() if key != "role")
        role = [str(value["role"])] if isinstance(value.get("role"), str) else []
        return f"{{{','.join([*role, *parts])}}}"
    if isinstance(value, list):
        kinds = list(dict.fromkeys(map(_kind, value)))
        return f"[{','.join(kinds)}]"
    if value is None or value in ("", b""):
        return "nothing"
    return type(value).__name__


# -- JSON lines --------------------------------------------------------------------


def _raw(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def _lines(path: Path) -> Iterator[Any]:
    """Each line's value; for one that is not valid JSON, a text that says so."""
    for line in _raw(path):
        if path.suffix == ".json" and line.lstrip().startswith(b"["):
            raise CheckError(
                f"{path} is one JSON list; write a row a line (.jsonl), as in "
                "jq -c '.[]' FILE"
            )
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield {NO_JSON: line.decode("utf-8", "replace")}


# -- tables ------------------------------------------------------------------------


def _scanner(path: Path) -> Any:
    kind = TABLES.get(path.suffix)
    if kind is None:
        known = ", ".join([*LINES, *TABLES])
        raise CheckError(f"{path}: {path.suffix or 'no suffix'} is not one of {known}")
    try:
        from pyarrow import dataset
    except ImportError:
        raise CheckError(
            f"{path} needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    return dataset.dataset(path, format=kind)


def _table_rows(path: Path) -> Iterator[Any]:
    try:
        for batch in _scanner(path).to_batches(batch_size=1024):
            yield from batch.to_pylist()
    except ValueError as error:  # pyarrow's own are
        raise CheckError(f"{path} cannot be read: {error}") from None


def _write_table(path: Path, output: Path, numbers: list[int]) -> None:
    import pyarrow
    from pyarrow import csv, ipc, parquet

    table = _scanner(path).take(pyarrow.array(numbers))
    with output.open("xb") as file:
        if path.suffix == ".parquet":
            parquet.write_table(table, file)
        elif path.suffix == ".csv":
            csv.write_csv(table, file)
        else:
            with ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


def text(found: Slice) -> str:
    """For people: which rows were kept, and why."""
    told = [f"{found.output}: {len(found.kept)} of {found.rows} rows of {found.file}"]
    told += [
        f"row {one.row}: {one.why}, {one.characters} characters" for one in found.kept
    ]
    return "\n".join(sanitize.line(tr_filled(line)) for line in told)
