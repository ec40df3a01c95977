"""Tells which prompts of a table are plainly usable, and how large each of them is.

Works on whole columns with pyarrow: a million conversations take seconds, where a
Python value for each would take ten times as long. Doubtful ones are left to
``prompts.problem``, value by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload.data.prompts import (
    ENCODED,
    SILENT,
    UNASKED,
    Sizes,
    contents,
)

if TYPE_CHECKING:
    import pyarrow

    from pytest_gkd.workload.data.prompts import Numbers


@dataclass(frozen=True)
class Survey:
    """The survey of one column of a table; ``kind`` is text, messages, or empty.

    ``controlled`` are the rows with a control token outside of an answer. ``odd`` are
    the rows that have to be checked one by one. ``answered`` are those whose last
    message is the assistant's. ``roles`` are all roles that occur, each with the first
    row that has it.
    """

    kind: str
    sizes: Sizes
    odd: Sequence[int]
    answered: Sequence[int]
    roles: dict[str, int]
    controlled: Sequence[int] = ()


def survey(column: pyarrow.Array, controls: str = "") -> Survey | None:
    """Look at a column of text, or of lists of objects with role and content.

    ``controls`` is a pattern of control tokens, empty for none. Returns None for a
    column of another type.
    """
    import pyarrow.types as types

    kind = column.type
    if _is_text(kind):
        return _texts(column, controls)
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return None
    message = kind.value_type
    if not types.is_struct(message) or not all(
        message.get_field_index(name) >= 0 and _is_text(message.field(name).type)
        for name in ("role", "content")
    ):
        return None
    return _messages(column, controls)


def survey_values(values: Sequence[Any], controls: str = "") -> Survey:
    """Look at prompts of any form; each of them is odd."""
    import numpy
    import pyarrow

    texts = [contents(value) for value in values]
    flat = pyarrow.array([text for row in texts for text in row], pyarrow.string())
    counts = numpy.array([len(row) for row in texts], dtype=numpy.int64)
    parents: Numbers = numpy.repeat(numpy.arange(len(values)), counts)
    lists = [
        [message for message in value if isinstance(message, dict)]
        for value in (value if isinstance(value, list) else () for value in values)
    ]
    asked = [
        "\n".join(
            contents([m for m in messages if m.get("role") != "assistant"] or value)
        )
        for messages, value in zip(lists, values, strict=True)
    ]
    return Survey(
        kind="",
        sizes=_sizes(flat, parents, len(values)),
        odd=range(len(values)),
        answered=[
            row
            for row, messages in enumerate(lists)
            if messages and messages[-1].get("role") == "assistant"
        ],
        roles={
            message["role"]: row
            for row, messages in reversed(list(enumerate(lists)))
            for message in messages
            if isinstance(message.get("role"), str)
        },
        controlled=_hits(pyarrow.array(asked, pyarrow.string()), controls),
    )


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _hits(texts: pyarrow.Array, controls: str) -> Any:
    """Indices of the texts that hold what the pattern names."""
    import pyarrow.compute as pc

    if not controls:
        return ()
    return _where(pc.match_substring_regex(pc.fill_null(texts, ""), controls))


def _texts(column: pyarrow.Array, controls: str) -> Survey:
    import numpy
    import pyarrow.compute as pc

    start = pc.utf8_ltrim_whitespace(pc.fill_null(column, ""))
    encoded = pc.match_substring_regex(start, "^" + ENCODED)
    odd = pc.or_(pc.equal(start, ""), encoded)
    rows = numpy.arange(len(column))
    sizes = _sizes(column, rows, len(column))
    return Survey("text", sizes, _where(odd), (), {}, _hits(column, controls))


def _messages(column: pyarrow.Array, controls: str) -> Survey:
    import numpy
    import pyarrow
    import pyarrow.compute as pc

    count = len(column)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype("int64")
    flat = pc.list_flatten(column)
    parents = pc.list_parent_indices(column).to_numpy().astype("int64")
    role, content = pc.struct_field(flat, "role"), pc.struct_field(flat, "content")
    by_name = pc.fill_null(role, "")
    silent = pc.equal(pc.utf8_ltrim_whitespace(pc.fill_null(content, "")), "")
    speechless = pc.is_in(by_name, pyarrow.array(SILENT))
    wrong = pc.or_(
        pc.equal(by_name, ""),
        pc.or_(pc.is_null(content), pc.and_(silent, pc.invert(speechless))),
    )
    theirs = pc.not_equal(by_name, "assistant").to_numpy(zero_copy_only=False)
    mute = pc.is_in(by_name, pyarrow.array(UNASKED)).to_numpy(zero_copy_only=False)
    asked = numpy.bincount(parents[~mute], minlength=count) > 0
    odd = numpy.union1d(parents[_where(wrong)], numpy.flatnonzero(~asked))
    last = numpy.cumsum(lengths) - 1
    filled = numpy.flatnonzero(lengths)
    answered = filled[~theirs[last[filled]]]
    roles = {
        role: int(parents[pc.index(by_name, role).as_py()])
        for role in pc.unique(by_name).to_pylist()
    }
    sizes = _sizes(content, parents, count)
    hits = numpy.asarray(_hits(content, controls), dtype="int64")
    controlled = numpy.unique(parents[hits[theirs[hits]]])
    return Survey("messages", sizes, odd, answered, roles, controlled)


def _sizes(texts: pyarrow.Array, rows: Numbers, count: int) -> Sizes:
    """Sizes of ``count`` rows from their texts; ``rows`` tells whose each text is."""
    import numpy
    import pyarrow.compute as pc

    length = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    is_ascii = pc.fill_null(pc.string_is_ascii(texts), fill_value=True)
    plain = is_ascii.to_numpy(zero_copy_only=False).astype(bool)

    def total(weights: Any) -> Numbers:
        counts: Numbers = numpy.bincount(rows, weights, minlength=count).astype("int64")
        return counts

    return Sizes(total(length * plain), total(length * ~plain), total(None))


def _where(mask: pyarrow.Array) -> Any:
    """Indices at which a mask is true."""
    import numpy

    return numpy.flatnonzero(mask.to_numpy(zero_copy_only=False).astype(bool))
