"""Prompt groups in Ray's object store: references, and the columns that they refer to as plain buffers."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayTaskError

from distflow.data.batch import Batch
from distflow.data.buffers import gather, to_buffers

GroupRef = tuple["ray.ObjectRef[Any]"]
"""Of a group's buffers; in a tuple, so that Ray passes the reference and not the object."""


class GroupLost(RuntimeError):
    """A group is gone with the process that held it in memory."""


def to_group(batch: Batch) -> tuple[GroupRef, int]:
    """Store the group's columns where every process of this machine reads them without a copy; returns their size."""
    buffers = to_buffers(batch)
    return (ray.put(buffers),), sum(column.nbytes for column in buffers.values())


def to_batch(groups: Sequence[GroupRef]) -> Batch:
    """The rows of the groups in order. Raises GroupLost."""
    try:
        parts = ray.get([group[0] for group in groups])
    except ObjectLostError as err:
        raise GroupLost("a worker that held prompt groups has died") from err
    rows = [(part, row) for part, buffers in enumerate(parts) for row in range(buffers["lengths.prompt"].size // 8)]
    return gather(parts, rows)


def lost_among(groups: Mapping[int, GroupRef]) -> list[int]:
    """Those that cannot be read any more."""
    return [number for number, group in groups.items() if _is_lost(group)]


def _is_lost(group: GroupRef) -> bool:
    try:
        ray.get(group[0])
    except ObjectLostError:
        return True
    return False


MOST_TEXT = 2000
"""Characters of a text that is sent to the coordinator or the driver."""


def shortened(text: str) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text):,} characters)"


def shorten(error: BaseException) -> None:
    """Shorten the message of an exception, and of its causes."""
    link: BaseException | None = error
    while link is not None:
        link.args = tuple(shortened(arg) if isinstance(arg, str) else arg for arg in link.args)
        link = link.__cause__ or link.__context__


def reply(ref: "ray.ObjectRef[Any]") -> Any:
    """Wait for the result of an actor's call. Raises what the actor raised."""
    try:
        return ray.get(ref)
    except RayTaskError as err:
        raise err.cause from err
