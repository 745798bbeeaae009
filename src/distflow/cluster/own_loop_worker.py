"""A user's own loop over Ray, on the workers: a training rank executes the driver's calls on rows
in Ray's object store, where it leaves what it writes, and a rollout worker looks up what the loop
submits."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from distflow.cluster.remote_calls import reply, shorten
from distflow.cluster.remote_sample_queue import GroupRef, read_groups
from distflow.data.batch import Batch, Column, RemoteColumn
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.data.encoded_prompts import PromptRow
from distflow.launch.select_pipeline import for_own_loop
from distflow.runtime.sample_queue.protocol import OfGroup, Submissions
from distflow.runtime.spec import Spec
from distflow.runtime.worker import Worker

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class StoredColumn:
    """A column in Ray's object store. refs: of objects with nothing else. picks: (object, row) of
    each sample."""

    refs: "tuple[ray.ObjectRef[Any], ...]"
    picks: Sequence[tuple[int, int]]

    def read(self) -> Column:
        import ray

        found = gather(ray.get([*self.refs]), self.picks)
        return cast(Column, found.flat(found.names[0]))

    def select(self, rows: Sequence[int]) -> "StoredColumn":
        """These rows, without the objects that have none of them."""
        used = sorted({self.picks[row][0] for row in rows}) or [0]
        place = {part: number for number, part in enumerate(used)}
        picks = [(place[part], row) for part, row in (self.picks[row] for row in rows)]
        return StoredColumn(tuple(self.refs[part] for part in used), picks)

    def concat(self, others: Sequence[RemoteColumn]) -> "StoredColumn":
        parts = [self, *cast(Sequence[StoredColumn], others)]
        firsts = accumulate((len(part.refs) for part in parts), initial=0)
        picks = [
            (first + part, row)
            for first, of in zip(firsts, parts, strict=False)
            for part, row in of.picks
        ]
        return StoredColumn(tuple(ref for part in parts for ref in part.refs), picks)


Stored = Mapping[str, "tuple[Any, tuple[ray.ObjectRef[Any]]]"]
"""Columns by name, each with its field and as a separate object; references are in tuples as in
`GroupRef`."""


def stored(batch: Batch) -> Stored:
    """The batch's columns, in the object store."""
    import ray

    return {
        name: (batch.field(name), (ray.put(to_buffers(batch.only([name]))),))
        for name in batch.names
    }


def _hold(
    numbers: Sequence[int], groups: Sequence[GroupRef]
) -> tuple[Stored, Buffers, Sequence[int]]:
    """The rows of these groups, which stay here, and for the driver their lengths and groups; or
    ids of lost ones."""
    batch, lost = read_groups(numbers, groups)
    return (
        ({}, {}, lost)
        if batch is None
        else (stored(batch), to_buffers(batch.only(["group_index"])), ())
    )


class RankCalls:
    """The calls of the driver's loop on one training rank: methods of its worker, on its training
    thread, in order."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]]] = SimpleQueue()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method from another thread; returns the result of `_carry_out`, or raises what the
        method raised."""
        result: Future[Any] = Future()
        self._calls.put((name, arguments, result))
        return result.result()

    def serve(self, worker: Worker) -> int:
        """Serve calls on the training thread until the driver leaves its loop; returns the steps
        consumed in total."""
        while True:
            name, arguments, result = worker.wait_for_call(self._calls.get)
            if name == "leave":
                result.set_result(None)
                return worker.step
            with _Errors(result):
                result.set_result(
                    _hold(*arguments) if name == "hold" else _carry_out(worker, name, arguments)
                )


class _Errors(AbstractContextManager[None]):
    """Errors inside belong to the call: the driver raises them in the user's loop, which may
    continue."""

    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            shorten(error)
            self._result.set_exception(error)
        return isinstance(error, Exception)


def _carry_out(worker: Worker, name: str, arguments: Sequence[Any]) -> tuple[Stored | None, Any]:
    """The columns that the method wrote, if it returns a batch, and the rest of its result."""
    # `to` reads its columns
    given = [each.to("cpu") if isinstance(each, Batch) else each for each in arguments]
    before = {
        key: each.flat(key) for each in given if isinstance(each, Batch) for key in each.names
    }
    found = getattr(worker, name)(*given)
    batch, rest = found if isinstance(found, tuple) else (found, None)
    if not isinstance(batch, Batch):
        return None, batch
    return stored(
        batch.only(key for key in batch.names if batch.flat(key) is not before.get(key))
    ), rest


class RemoteSubmissions(Submissions):
    """Submissions of the driver's loop, looked up at the coordinator, which has references to its
    functions."""

    def __init__(self, coordinator: Any) -> None:
        import ray

        self._coordinator = coordinator
        self._get = lru_cache(ray.get)

    def row(self, number: int) -> PromptRow:
        return cast(PromptRow, reply(self._coordinator.submitted_row.remote(number)))

    def of_group(self, number: int) -> OfGroup:
        stored = reply(self._coordinator.of_group.remote(number))
        return cast(OfGroup, stored if isinstance(stored, OfGroup) else self._get(*stored))


def with_submissions(spec: Spec, coordinator: Any) -> Spec:
    return for_own_loop(spec, RemoteSubmissions(coordinator))
