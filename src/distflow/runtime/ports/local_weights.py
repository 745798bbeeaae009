"""The weight edge of one process: tensors by reference."""

from collections.abc import Mapping

from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt
from distflow.runtime.checks import TrustError
from distflow.runtime.ports.weights import Bucket, Receive
from distflow.runtime.waits import Waits


class LocalWeights:
    """Holds the buckets of a version until it is whole, then hands them to the engines of this process.

    Used by the learning thread alone, so it needs no lock. An engine reads the trainer's own tensors on a thread of its
    own, while `commit` waits for its receipt: no optimizer step can change them meanwhile.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._receivers: list[Receive] = []
        self._version: Version | None = None
        self._tensors: list[tuple[str, Tensor]] = []

    def attach(self, receive: Receive) -> None:
        """See `WeightPort`."""
        self._receivers.append(receive)

    def begin(self, version: Version) -> None:
        """See `WeightPort`."""
        self._version, self._tensors = version, []

    def put(self, bucket: Bucket) -> None:
        """See `WeightPort`."""
        self._tensors += bucket

    def commit(self, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        assert self._version is not None, "a version is begun before it is committed"
        for receive in self._receivers:
            with self._waits("learner", f"weights of step {self._version.step}", on="rollout engine"):
                _check(self._hand_over(receive, self._version), self._version, hashes)
        self._version, self._tensors = None, []

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        for receive in self._receivers:
            with self._waits("learner", f"alias of step {version.step}", on="rollout engine"):
                _check(receive(version, None), version, hashes)

    def _hand_over(self, receive: Receive, version: Version) -> Receipt:
        try:
            return receive(version, self._tensors)
        except ValueError as err:
            raise TrustError(f"the engine refused the weights of version {version.step}: {err}") from err


def _check(receipt: Receipt, version: Version, hashes: Mapping[str, str]) -> None:
    """hashes: what the engine must hold."""
    if receipt.version != version:
        raise TrustError(f"weights of {version} were sent, but the engine's receipt is for {receipt.version}")
    if receipt.shared and not receipt.hashes:
        return
    different = [name for name, own in hashes.items() if receipt.hashes.get(name) != own]
    if different and receipt.alias:
        raise TrustError(
            f"the engine was to serve the weights that it has as version {version.step}, but they are not the "
            f"trainer's; tensors that differ: {', '.join(different[:5])}"
        )
    if different:
        names = ", ".join(different[:5])
        raise TrustError(f"weights of version {version.step} did not arrive whole; tensors that differ: {names}")
