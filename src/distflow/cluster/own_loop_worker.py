"""A user's own loop over Ray, on the workers: a training rank carries out the driver's calls, on rows that it reads
from Ray's object store, and a rollout worker looks up what the loop submits."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from distflow.cluster.actor_calls import reply, shorten
from distflow.data.batch import Batch
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.data.prompts import PromptRow
from distflow.launch.select_pipeline import for_own_loop
from distflow.runtime.sample_queue.submitted_rows import ShouldAccept, Submissions
from distflow.runtime.spec import Spec
from distflow.runtime.worker import Worker

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class Part:
    """A rank's rows of a batch, as an argument of a call. stored: its buffers, in a tuple as in `GroupRef`."""

    stored: "tuple[ray.ObjectRef[Any]]"
    rows: Sequence[int]

    def batch(self) -> Batch:
        import ray

        return gather([ray.get(self.stored[0])], [(0, row) for row in self.rows])


class RankCalls:
    """The calls of the driver's loop on one training rank: methods of its worker, on its training thread, in order."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]]] = SimpleQueue()

    def call(self, name: str, *arguments: Any) -> Any:
        """For other threads: returns the result in two parts (`_split`), or raises what the method raised."""
        result: Future[Any] = Future()
        self._calls.put((name, arguments, result))
        return result.result()

    def serve(self, worker: Worker) -> int:
        """For the training thread, until the driver leaves its loop; returns the steps consumed in all."""
        while True:
            name, arguments, result = worker.wait_for_call(self._calls.get)
            if name == "leave":
                result.set_result(None)
                return worker.step
            with _Errors(result):
                found = getattr(worker, name)(*(each.batch() if isinstance(each, Part) else each for each in arguments))
                result.set_result(_split(found))


class _Errors(AbstractContextManager[None]):
    """An error inside is one of the call: the driver raises it in the user's loop, which may go on."""

    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            shorten(error)
            self._result.set_exception(error)
        return isinstance(error, Exception)


def _split(found: Any) -> tuple[Buffers | None, Any]:
    """The batch of a result, as buffers, and the rest."""
    batch, rest = found if isinstance(found, tuple) else (found, None)
    return (to_buffers(batch), rest) if isinstance(batch, Batch) else (None, batch)


class RemoteSubmissions(Submissions):
    """The coordinator has what the driver's loop submits, and references to its functions."""

    def __init__(self, coordinator: Any) -> None:
        import ray

        self._coordinator, self._get = coordinator, lru_cache(ray.get)

    def row(self, number: int) -> PromptRow:
        return cast(PromptRow, reply(self._coordinator.submitted_row.remote(number)))

    def should_accept(self, number: int) -> ShouldAccept | None:
        stored = reply(self._coordinator.should_accept.remote(number))
        return None if stored is None else cast(ShouldAccept, self._get(*stored))


def with_submissions(spec: Spec, coordinator: Any) -> Spec:
    return for_own_loop(spec, RemoteSubmissions(coordinator))
