"""The weight sync within one process, from a trainer to the engine beside it: by reference, or
bucket by bucket."""

from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from distflow.observe.writing.timing import ENGINE, Waits
from distflow.rollout.engine import WeightReceipt
from distflow.rollout.engine_weights import PartialWeightsError
from distflow.runtime.weight_sync.protocol import Bucket, Detach, Receive, check_receipt, refused
from distflow.scheduling.group_states import Version


class LocalWeights:
    """A `WeightPort`, and the `EnginePort` of the same process: it collects the buckets of a
    version, then passes them to the engine. Without an engine it collects nothing.

    Only the training thread uses it, so it needs no lock. An engine reads the trainer's tensors on
    its own thread while `commit` waits for its receipt, so no optimizer step can change them
    meanwhile.
    """

    confirmed = None  # there are no other processes

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._receive: Receive | None = None
        self._version: Version | None = None
        self._tensors: list[tuple[str, Tensor]] = []

    def attach(self, receive: Receive) -> Detach:
        assert self._receive is None, "one engine takes the weights"
        self._receive = receive
        return self._detach

    def begin(self, version: Version) -> None:
        self._version = version
        self._tensors = []

    def put(self, bucket: Bucket) -> None:
        if self._receive is not None:
            self._tensors += bucket

    def commit(self, hashes: Mapping[str, str]) -> None:
        version = self._begun()
        if self._receive is not None:
            with self._waits("training", f"weights of step {version.step}", on=ENGINE):
                try:
                    receipt = self._receive(version, self._tensors)
                except ValueError as err:
                    raise refused(version, err) from err
                check_receipt(receipt, version, hashes)

        self._version = None
        self._tensors = []

    def renumber(self, version: Version, hashes: Mapping[str, str]) -> None:
        if self._receive is not None:
            with self._waits("training", f"version number of step {version.step}", on=ENGINE):
                check_receipt(self._receive(version, None), version, hashes)

    def _begun(self) -> Version:
        assert self._version is not None, "a version is begun before it is sent"
        return self._version

    def _detach(self) -> None:
        self._receive = None


_Item = tuple[Bucket, "Future[None]"]
"""A bucket, and a future that is set when the engine has loaded all of it."""


class BrokenOff(RuntimeError):
    """The rest of a version will not come; the received part must not be used."""


@dataclass(frozen=True)
class _Load:
    """A load of a version into an engine. items: None marks the end."""

    items: "SimpleQueue[_Item | None | BrokenOff]"
    receipt: "Future[WeightReceipt]"

    def result(self, version: Version) -> WeightReceipt:
        """The engine's receipt. Raises TrustError if the weights do not fit."""
        try:
            return self.receipt.result()
        except (ValueError, PartialWeightsError) as err:
            raise refused(version, err) from err


class StreamedWeights(LocalWeights):
    """For weights gathered from ranks: each bucket is loaded directly into the weights of this
    process's engine, and `put` returns when that is done, so at most one bucket is in memory beside
    the tensor being gathered next. From `begin` to `commit` the engine computes nothing, so no
    token mixes versions. An engine with a part of a version does not generate before it has all of
    a later one.
    """

    def __init__(self, waits: Waits) -> None:
        super().__init__(waits)
        self._load: _Load | None = None

    def begin(self, version: Version) -> None:
        if (broken_off := self._break_off()) is not None:
            wait([broken_off.receipt])
        self._version = version
        if self._receive is not None:
            items: SimpleQueue[_Item | None | BrokenOff] = SimpleQueue()
            self._load = _Load(items, self._receive.start(version, _tensors(items)))

    def put(self, bucket: Bucket) -> None:
        version = self._begun()
        load = self._load
        if load is None:
            return

        loaded: Future[None] = Future()
        load.items.put((bucket, loaded))

        with self._waits("training", f"weights of step {version.step}", on=ENGINE):
            either: list[Future[Any]] = [loaded, load.receipt]
            wait(either, return_when=FIRST_COMPLETED)

        if load.receipt.done():  # finished before the end: it failed
            load.result(version)

    def commit(self, hashes: Mapping[str, str]) -> None:
        version = self._begun()
        load = self._load
        if load is not None:
            load.items.put(None)
            with self._waits("training", f"weights of step {version.step}", on=ENGINE):
                check_receipt(load.result(version), version, hashes)

        self._version = self._load = None

    def _detach(self) -> None:
        self._break_off()
        super()._detach()

    def _break_off(self) -> _Load | None:
        """End the load of an incomplete version; returns it."""
        load = self._load
        self._load = None
        self._version = None
        if load is not None:
            load.items.put(BrokenOff("the version was not sent completely"))
        return load


def _tensors(items: "SimpleQueue[_Item | None | BrokenOff]") -> Iterator[tuple[str, Tensor]]:
    """The tensors as they arrive, on the engine's thread. References none while it waits. Raises
    BrokenOff."""
    while (item := items.get()) is not None:
        if isinstance(item, BrokenOff):
            raise item
        bucket, loaded = item
        yield from bucket
        del item, bucket
        loaded.set_result(None)
