"""A user's own loop over Ray, on the workers: a training rank executes the driver's calls on rows
in Ray's object store, where it leaves what it writes, and a rollout worker looks up what the loop
submits."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from distflow.cluster.remote_calls import reply
from distflow.cluster.remote_sample_queue import GroupRef, read_groups
from distflow.data.batch import Batch, Column, RemoteColumn
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.data.encoded_prompts import PromptRow
from distflow.graph.fields import Field
from distflow.launch.select_pipeline import for_own_loop
from distflow.runtime.sample_queue.submissions import OfGroup, Submissions
from distflow.runtime.spec import Spec
from distflow.runtime.worker import Worker

if TYPE_CHECKING:
    import ray


_NAME = "column"
"""The name of every column in its object, since columns of different names may be joined."""


@dataclass(frozen=True)
class StoredColumn:
    """A column in Ray's object store."""

    refs: "tuple[ray.ObjectRef[Buffers], ...]"
    """Objects with nothing but this column."""
    picks: Sequence[tuple[int, int]]
    """Of each sample: the number of its object, and its row in the object."""

    def read(self) -> Column:
        import ray

        return cast(Column, gather(ray.get([*self.refs]), self.picks).flat(_NAME))

    def select(self, rows: Sequence[int]) -> "StoredColumn":
        """The column of these samples, without objects that have none of them."""
        picks = [self.picks[row] for row in rows]
        used = sorted({part for part, _ in picks}) or [0]
        number_of = {part: number for number, part in enumerate(used)}
        refs = tuple(self.refs[part] for part in used)
        return StoredColumn(refs, [(number_of[part], row) for part, row in picks])

    def concat(self, others: Sequence[RemoteColumn]) -> "StoredColumn":
        refs = list(self.refs)
        picks = list(self.picks)
        for other in cast(Sequence[StoredColumn], others):
            picks += [(len(refs) + part, row) for part, row in other.picks]
            refs += other.refs
        return StoredColumn(tuple(refs), picks)


def stored(batch: Batch) -> Batch:
    """The batch with all columns in the object store: those that are here are put there."""
    import ray

    lengths = (batch.lengths("prompt"), batch.lengths("response"))
    rows = [(0, row) for row in range(len(batch))]

    columns = []
    for field, column in batch.columns():
        if isinstance(column, Tensor | list):
            alone = Batch.from_columns(*lengths, [(replace(field, name=_NAME), column)])
            column = StoredColumn((ray.put(to_buffers(alone)),), rows)
        columns.append((field, column))

    return Batch.from_columns(*lengths, columns)


def _hold(
    numbers: Sequence[int], groups: Sequence[GroupRef]
) -> tuple[Batch | None, list[int], list[int]]:
    """The rows of these groups, whose columns this process stores, and the group of each row; or
    ids of lost groups. numbers: ids of the groups."""
    batch, lost = read_groups(numbers, groups)
    if batch is None:
        return None, [], lost
    return stored(batch), batch["group_index"].tolist(), []


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
            found: object
            if name == "leave":
                result.set_result(None)
                return worker.step

            try:
                if name == "hold":
                    found = _hold(*arguments)
                else:
                    found = _carry_out(worker, name, arguments)
            except Exception as error:  # raised in the user's loop, which may continue
                result.set_exception(error)
            else:
                result.set_result(found)


def _carry_out(
    worker: Worker, name: str, arguments: Sequence[Any]
) -> tuple[list[tuple[Field, Column | RemoteColumn]] | None, Any]:
    """The columns that the method wrote, if it returns a batch, and the rest of its result. The
    driver knows their lengths."""
    given = []
    before = dict[str, object]()
    for argument in arguments:
        if isinstance(argument, Batch):
            argument = argument.to("cpu")  # reads its columns
            before |= {key: argument.flat(key) for key in argument.names}
        given.append(argument)

    found = getattr(worker, name)(*given)
    rest = None
    if isinstance(found, tuple):
        found, rest = found
    if not isinstance(found, Batch):
        return None, found

    written = found.only(key for key in found.names if found.flat(key) is not before.get(key))

    return [*stored(written).columns()], rest


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
