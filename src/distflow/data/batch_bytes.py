"""A batch as plain bytes for transfer between processes, and a batch from rows of several such
batches.

A buffer holds one column, row after row. Code that transfers buffers needs to know nothing about
tokens, dtypes or texts, and rows are picked by copying bytes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.data.batch import Batch, Column
from distflow.graph.fields import TOKEN_AXES, Axis, Field

Bytes = NDArray[np.uint8]
Buffers = Mapping[str, Bytes]
"""Uint8 arrays `(bytes,)` by name: both lengths, the header, and one per column; for objects
another one with the lengths of their rows."""

_HEADER = "fields"
_LENGTHS = {Axis.PROMPT: "lengths.prompt", Axis.RESPONSE: "lengths.response"}
_to_json = json.JSONEncoder(ensure_ascii=False).encode


def to_buffers(batch: Batch) -> dict[str, Bytes]:
    """The batch's own memory as bytes, without copies of CPU tensors; objects as JSON.

    Raises TypeError for an object that is not a JSON value. As with any JSON, a tuple comes back as
    a list.
    """
    buffers = {name: _as_bytes(batch.lengths(axis)) for axis, name in _LENGTHS.items()}
    fields = [batch.field(name) for name in batch.names]
    header = _to_json([[field.name, field.dtype, field.axis.value] for field in fields])
    buffers[_HEADER] = np.frombuffer(header.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    for field in fields:
        column = batch.flat(field.name)
        if field.axis is Axis.OBJECT:
            rows = [f"{_to_json(value)},".encode("utf-8", "surrogatepass") for value in column]
            buffers[f"column.{field.name}"] = np.frombuffer(b"".join(rows), dtype=np.uint8)
            buffers[f"rows.{field.name}"] = np.array(
                [len(row) for row in rows], dtype=np.int64
            ).view(np.uint8)
        else:
            buffers[f"column.{field.name}"] = _as_bytes(column)
    return buffers


def gather(parts: Sequence[Buffers], picks: Sequence[tuple[int, int]]) -> Batch:
    """The batch of the rows `picks`, each as (part, row), in that order, of several batches.

    Each byte is copied once, from memory that may be read-only and shared. Raises ValueError if the
    parts used differ in the name, dtype or axis of a column.
    """
    used = sorted({part for part, _ in picks}) or [0]
    fields = _common_fields([parts[part] for part in used])
    ends_of = {part: _row_ends(parts[part]) for part in used}
    runs = _runs(picks)

    def picked(name: str, field: Field) -> Tensor:
        ends = {part: of_column(field) for part, of_column in ends_of.items()}
        slices = [
            parts[part][name][ends[part][first] : ends[part][end]] for part, first, end in runs
        ]
        values = np.concatenate(slices) if slices else np.empty(0, np.uint8)
        return torch.from_numpy(values) if values.size else torch.empty(0, dtype=torch.uint8)

    def column(field: Field) -> Column:
        values = picked(f"column.{field.name}", field)
        if field.axis is Axis.OBJECT:
            return json.loads(f"[{_text(values.numpy()[:-1])}]")
        return values.view(getattr(torch, field.dtype))

    prompts, responses = (
        picked(name, Field(name, "int64", Axis.SAMPLE)).view(torch.int64)
        for name in _LENGTHS.values()
    )
    return Batch.from_columns(prompts, responses, ((field, column(field)) for field in fields))


def _row_ends(buffers: Buffers) -> Callable[[Field], Sequence[int]]:
    """For a column of this part: the bytes before each row, followed by the total."""
    lengths = {axis: buffers[name].view(np.int64) for axis, name in _LENGTHS.items()}
    lengths[Axis.SEQUENCE] = lengths[Axis.PROMPT] + lengths[Axis.RESPONSE]

    @cache
    def ends_of_tokens(axis: Axis, itemsize: int) -> list[int]:
        return [0, *accumulate((lengths[axis] * itemsize).tolist())]

    def ends(field: Field) -> Sequence[int]:
        if field.axis is Axis.OBJECT:
            return [0, *accumulate(buffers[f"rows.{field.name}"].view(np.int64).tolist())]
        itemsize = getattr(torch, field.dtype).itemsize
        if field.axis in TOKEN_AXES:
            return ends_of_tokens(field.axis, itemsize)
        return range(0, (lengths[Axis.PROMPT].size + 1) * itemsize, itemsize)

    return ends


def _runs(picks: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs of adjacent rows, which are copied at once: (part, first row, end row)."""
    runs: list[tuple[int, int, int]] = []
    for part, row in picks:
        if runs and (part, row) == (runs[-1][0], runs[-1][2]):
            runs[-1] = (part, runs[-1][1], row + 1)
        else:
            runs.append((part, row, row + 1))
    return runs


def _common_fields(parts: Sequence[Buffers]) -> list[Field]:
    headers = [json.loads(_text(buffers[_HEADER])) for buffers in parts]
    first, *others = [
        {name: Field(name, dtype, Axis(axis)) for name, dtype, axis in header} for header in headers
    ]
    for other in others:
        if other != first:
            odd = sorted({field.name for field in {*other.values()} ^ {*first.values()}})
            raise ValueError(
                f"batches that do not fit together: {odd} not in all, or of different dtype or axis"
            )
    return list(first.values())


def _as_bytes(tensor: Tensor) -> Bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy()


def _text(values: Bytes) -> str:
    return values.tobytes().decode("utf-8", "surrogatepass")
