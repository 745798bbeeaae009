"""The weight edge of one process: tensors by reference."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt
from distflow.runtime.ports.weights import Bucket, Detach, Receive, check_receipt, refused
from distflow.runtime.waits import Waits


class LocalWeights:
    """Holds the buckets of a version until it is whole, then hands them to the engines of this process. Where there are
    none it holds nothing.

    Used by the learning thread alone, so it needs no lock. An engine reads the trainer's own tensors on a thread of its
    own, while `commit` waits for its receipt: no optimizer step can change them meanwhile.
    """

    confirmed = None  # there are no other processes

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._receivers: list[Receive] = []
        self._version: Version | None = None
        self._tensors: list[tuple[str, Tensor]] = []

    def attach(self, receive: Receive) -> Detach:
        """See `WeightPort`."""
        self._receivers.append(receive)
        return partial(self._receivers.remove, receive)

    def begin(self, version: Version) -> None:
        """See `WeightPort`."""
        self._version, self._tensors = version, []

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        if self._receivers:
            self._tensors += bucket

    def commit(self, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is committed"
        for receive in self._receivers:
            with self._waits("learner", f"weights of step {self._version.step}", on="rollout engine"):
                check_receipt(self._hand_over(receive, self._version), self._version, hashes)
        self._version, self._tensors = None, []

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        for receive in self._receivers:
            with self._waits("learner", f"alias of step {version.step}", on="rollout engine"):
                check_receipt(receive(version, None), version, hashes)

    def _hand_over(self, receive: Receive, version: Version) -> Receipt:
        try:
            return receive(version, self._tensors)
        except ValueError as err:
            raise refused(version, err) from err
