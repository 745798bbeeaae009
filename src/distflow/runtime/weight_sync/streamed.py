"""The weight sync in one process with weights gathered from ranks: bucket by bucket into the engine's copy."""

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from distflow.rollout.engine import Receipt
from distflow.rollout.weights import PartialWeightsError
from distflow.runtime.wait_log import Waits
from distflow.runtime.weight_sync.protocol import Bucket, Detach, Receive, check_receipt, refused
from distflow.scheduling.groups import Version

_Item = tuple[Bucket, "Future[None]"]
"""A bucket, and a future that is set when the engine has loaded all of it."""


class BrokenOff(RuntimeError):
    """The rest of a version does not come; the received part is not to be used."""


@dataclass(frozen=True)
class _Load:
    """An engine that loads a version. items: None at the end."""

    items: "SimpleQueue[_Item | None | BrokenOff]"
    receipt: "Future[Receipt]"


class StreamedWeights:
    """Each bucket is loaded directly into the copy of an engine of this process, and `put` returns when it is there: at
    most one bucket is in memory, beside the tensor that is gathered next. From `begin` to `commit` the engine computes
    nothing, so no token is of two versions. An engine with a part of a version does not generate before it has all of a
    later one.

    Used by the training thread alone.
    """

    confirmed = None  # there are no other processes

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._receivers: list[Receive] = []
        self._loads: list[_Load] = []
        self._version: Version | None = None

    def attach(self, receive: Receive) -> Detach:
        """See `WeightPort`."""
        self._receivers.append(receive)
        return partial(self._detach, receive)

    def begin(self, version: Version) -> None:
        """See `WeightPort`."""
        wait([load.receipt for load in self._break_off()])
        self._version = version
        for receive in self._receivers:
            items: SimpleQueue[_Item | None | BrokenOff] = SimpleQueue()
            self._loads.append(_Load(items, receive.start(version, _tensors(items))))

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is sent"
        for load in self._loads:
            taken: Future[None] = Future()
            load.items.put((bucket, taken))
            with self._waits("training", f"weights of step {self._version.step}", on="rollout engine"):
                either: list[Future[Any]] = [taken, load.receipt]
                wait(either, return_when=FIRST_COMPLETED)
            if load.receipt.done():  # before it has all: it failed
                self._receipt(load, self._version)

    def commit(self, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is committed"
        for load in self._loads:
            load.items.put(None)
            with self._waits("training", f"weights of step {self._version.step}", on="rollout engine"):
                check_receipt(self._receipt(load, self._version), self._version, hashes)
        self._version, self._loads = None, []

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        for receive in self._receivers:
            with self._waits("training", f"alias of step {version.step}", on="rollout engine"):
                check_receipt(receive(version, None), version, hashes)

    def _receipt(self, load: _Load, version: Version) -> Receipt:
        try:
            return load.receipt.result()
        except (ValueError, PartialWeightsError) as err:
            raise refused(version, err) from err

    def _detach(self, receive: Receive) -> None:
        self._break_off()
        self._receivers.remove(receive)

    def _break_off(self) -> list[_Load]:
        """End the loads of an incomplete version; returns them."""
        loads, self._loads, self._version = self._loads, [], None
        for load in loads:
            load.items.put(BrokenOff("the version was not sent completely"))
        return loads


def _tensors(items: "SimpleQueue[_Item | None | BrokenOff]") -> Iterator[tuple[str, Tensor]]:
    """The tensors as they come, on the engine's thread. References none while it waits. Raises BrokenOff."""
    while (item := items.get()) is not None:
        if isinstance(item, BrokenOff):
            raise item
        bucket, taken = item
        yield from bucket
        del item, bucket
        taken.set_result(None)
