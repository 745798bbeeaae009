"""A batch as plain bytes for transfer between processes, and a batch from rows of several such batches.

A buffer holds one column, row after row. Code that transfers buffers needs to know nothing about tokens, dtypes or
texts, and rows are picked by copying bytes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.batch_columns import Column
from distflow.graph.fields import TOKEN_AXES, Axis, Field

Bytes = NDArray[np.uint8]
Buffers = Mapping[str, Bytes]
"""Uint8 arrays `(bytes,)` by name: both lengths, the header, and one a column; for objects another with the lengths of
their rows."""

_HEADER = "fields"
_LENGTHS = {Axis.PROMPT: "lengths.prompt", Axis.RESPONSE: "lengths.response"}
_to_json = json.JSONEncoder(ensure_ascii=False).encode


def to_buffers(batch: Batch) -> dict[str, Bytes]:
    """The batch's own memory as bytes, without copies of CPU tensors; objects as JSON.

    Raises TypeError for an object that is not a JSON value. As with any JSON, a tuple comes back as a list.
    """
    buffers = {name: _as_bytes(batch.lengths(axis)) for axis, name in _LENGTHS.items()}
    fields = [batch.field(name) for name in batch.names]
    buffers[_HEADER] = _text_bytes(_to_json([[field.name, field.dtype, field.axis.value] for field in fields]))
    for field in fields:
        column = batch.flat(field.name)
        if field.axis is Axis.OBJECT:
            rows = [f"{_to_json(value)},".encode("utf-8", "surrogatepass") for value in column]
            buffers[f"column.{field.name}"] = np.frombuffer(b"".join(rows), dtype=np.uint8)
            buffers[f"rows.{field.name}"] = np.array([len(row) for row in rows], dtype=np.int64).view(np.uint8)
        else:
            buffers[f"column.{field.name}"] = _as_bytes(column)
    return buffers


def from_buffers(buffers: Buffers) -> Batch:
    """The batch from the result of `to_buffers`, in its own memory."""
    num_samples = buffers[_LENGTHS[Axis.PROMPT]].view(np.int64).size
    return gather([buffers], [(0, row) for row in range(num_samples)])


def gather(parts: Sequence[Buffers], picks: Sequence[tuple[int, int]]) -> Batch:
    """The batch of the rows `picks`, each as (part, row), in that order, of several batches.

    Each byte is copied once, from memory that may be read-only and shared. Raises ValueError where parts that
    rows are picked from differ in the name, dtype or axis of a column.
    """
    used = sorted({part for part, _ in picks}) or [0]
    fields = _common_fields([_fields(parts[part]) for part in used])
    layouts = {part: _Layout(parts[part]) for part in used}
    runs = _runs(picks)

    def picked(name: str, ends_of: Callable[[_Layout], list[int]]) -> Tensor:
        columns = {part: parts[part][name] for part in used}
        ends = {part: ends_of(layout) for part, layout in layouts.items()}
        slices = [columns[part][ends[part][first] : ends[part][end]] for part, first, end in runs]
        values = np.concatenate(slices) if slices else np.empty(0, np.uint8)
        return torch.from_numpy(values) if values.size else torch.empty(0, dtype=torch.uint8)

    def column(field: Field) -> Column:
        values = picked(f"column.{field.name}", lambda layout: layout.ends(field))
        if field.axis is Axis.OBJECT:
            objects: list[object] = json.loads(f"[{_text(values.numpy()[:-1])}]")
            return objects
        return values.view(getattr(torch, field.dtype))

    lengths = [
        picked(_LENGTHS[axis], lambda layout: layout.even_ends(8)).view(torch.int64)
        for axis in (Axis.PROMPT, Axis.RESPONSE)
    ]
    return Batch.from_columns(lengths[0], lengths[1], ((field, column(field)) for field in fields))


class _Layout:
    """Start and end of the rows of one part's columns."""

    def __init__(self, buffers: Buffers) -> None:
        lengths = {axis: buffers[name].view(np.int64) for axis, name in _LENGTHS.items()}
        lengths[Axis.SEQUENCE] = lengths[Axis.PROMPT] + lengths[Axis.RESPONSE]
        self._lengths, self._buffers = lengths, buffers
        self._known: dict[tuple[Axis, int], list[int]] = {}

    def ends(self, field: Field) -> list[int]:
        """Bytes before each row of a column, and of all: one entry more than there are rows."""
        if field.axis is Axis.OBJECT:
            return [0, *accumulate(self._buffers[f"rows.{field.name}"].view(np.int64).tolist())]
        itemsize = getattr(torch, field.dtype).itemsize
        if field.axis not in TOKEN_AXES:
            return self.even_ends(itemsize)
        if (field.axis, itemsize) not in self._known:
            ends = [0, *accumulate((self._lengths[field.axis] * itemsize).tolist())]
            self._known[field.axis, itemsize] = ends
        return self._known[field.axis, itemsize]

    def even_ends(self, itemsize: int) -> list[int]:
        """Ends of a column with one entry per row."""
        return list(range(0, (self._lengths[Axis.PROMPT].size + 1) * itemsize, itemsize))


def _runs(picks: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs of adjacent rows, which are copied at once: (part, first row, end row)."""
    runs: list[tuple[int, int, int]] = []
    for part, row in picks:
        if runs and (part, row) == (runs[-1][0], runs[-1][2]):
            runs[-1] = (part, runs[-1][1], row + 1)
        else:
            runs.append((part, row, row + 1))
    return runs


def _fields(buffers: Buffers) -> dict[str, Field]:
    header = json.loads(_text(buffers[_HEADER]))
    return {name: Field(name, dtype, Axis(axis)) for name, dtype, axis in header}


def _common_fields(fields: Sequence[Mapping[str, Field]]) -> list[Field]:
    for other in fields[1:]:
        if other != fields[0]:
            odd = sorted({field.name for field in {*other.values()} ^ {*fields[0].values()}})
            raise ValueError(f"batches that do not fit together: {odd} not in all, or of different dtype or axis")
    return list(fields[0].values())


def _as_bytes(tensor: Tensor) -> Bytes:
    values: Bytes = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return values


def _text_bytes(text: str) -> Bytes:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _text(values: Bytes) -> str:
    return values.tobytes().decode("utf-8", "surrogatepass")
