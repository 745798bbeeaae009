"""A user's own loop over Ray, on the workers: a training rank executes the driver's calls on its
rows, and a rollout worker looks up what the loop submits."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, cast

from distflow.cluster.remote_calls import reply
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow
from distflow.launch.select_pipeline import for_own_loop
from distflow.runtime.sample_queue.protocol import OfGroup, Submissions
from distflow.runtime.spec import Spec
from distflow.runtime.worker import Worker


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
                result.set_result(_carry_out(worker, name, arguments))


class _Errors(AbstractContextManager[None]):
    """Errors inside belong to the call: the driver raises them in the user's loop, which may
    continue."""

    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._result.set_exception(error)
        return isinstance(error, Exception)


def _carry_out(worker: Worker, name: str, arguments: Sequence[Any]) -> tuple[Batch | None, Any]:
    """The columns that the method wrote, if it returns a batch, and the rest of its result."""
    before = dict[str, object]()
    for argument in arguments:
        if isinstance(argument, Batch):
            before |= {key: argument.flat(key) for key in argument.names}
    found = getattr(worker, name)(*arguments)
    batch, rest = found if isinstance(found, tuple) else (found, None)
    if not isinstance(batch, Batch):
        return None, batch
    return batch.only(key for key in batch.names if batch.flat(key) is not before.get(key)), rest


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
