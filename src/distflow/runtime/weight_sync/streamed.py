"""The weight edge of one process where weights are gathered from ranks: bucket by bucket into the engine's copy."""

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from distflow.rollout.engine import Receipt
from distflow.rollout.weights import TakenInPart
from distflow.runtime.wait_log import Waits
from distflow.runtime.weight_sync.protocol import Bucket, Detach, Receive, check_receipt, refused
from distflow.scheduling.groups import Version

_Handed = tuple[Bucket, "Future[None]"]
"""A bucket, and what is settled when the engine has all of it."""


class BrokenOff(RuntimeError):
    """No more of a version comes; what came of it is not to be served."""


@dataclass(frozen=True)
class _Load:
    """An engine that takes a version. handed: None at its end."""

    handed: "SimpleQueue[_Handed | None | BrokenOff]"
    receipt: "Future[Receipt]"


class StreamedWeights:
    """Each bucket goes straight into the weights that an engine of this process has for itself, and `put` returns when
    it is there: no more than one is held, beside the tensor that is gathered next. From `begin` to `commit` the engine
    computes nothing, so no token is of two versions. One that has a part of a version does not serve before it has the
    whole of a later one.

    Used by the learning thread alone.
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
            handed: SimpleQueue[_Handed | None | BrokenOff] = SimpleQueue()
            self._loads.append(_Load(handed, receive.start(version, _tensors(handed))))

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is pushed"
        for load in self._loads:
            taken: Future[None] = Future()
            load.handed.put((bucket, taken))
            with self._waits("training", f"weights of step {self._version.step}", on="rollout engine"):
                either: list[Future[Any]] = [taken, load.receipt]
                wait(either, return_when=FIRST_COMPLETED)
            if load.receipt.done():  # before it has all: it failed
                self._receipt(load, self._version)

    def commit(self, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is committed"
        for load in self._loads:
            load.handed.put(None)
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
        except (ValueError, TakenInPart) as err:
            raise refused(version, err) from err

    def _detach(self, receive: Receive) -> None:
        self._break_off()
        self._receivers.remove(receive)

    def _break_off(self) -> list[_Load]:
        """No engine waits any more for what is not to come. Those that did."""
        loads, self._loads, self._version = self._loads, [], None
        for load in loads:
            load.handed.put(BrokenOff("the version was not pushed to its end"))
        return loads


def _tensors(handed: "SimpleQueue[_Handed | None | BrokenOff]") -> Iterator[tuple[str, Tensor]]:
    """What is handed over, as it comes, on the engine's thread. Holds nothing while it waits. Raises BrokenOff."""
    while (item := handed.get()) is not None:
        if isinstance(item, BrokenOff):
            raise item
        bucket, taken = item
        yield from bucket
        del item, bucket
        taken.set_result(None)
