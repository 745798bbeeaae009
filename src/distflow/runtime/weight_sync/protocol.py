"""The weight edge: versions of the trainer's weights on their way to rollout engines. One file a wire implements it.

The weight edge of one process: tensors by reference.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from torch import Tensor

from distflow.errors import TrustError
from distflow.rollout.engine import Receipt
from distflow.runtime.wait_log import Waits
from distflow.scheduling.groups import Version

Bucket = Sequence[tuple[str, Tensor]]
"""Some of a version's tensors, by their Hugging Face names, in the dtype of the engine."""

Detach = Callable[[], None]
"""Nothing more comes to the engine; a version of which it has a part is broken off."""


class Receive(Protocol):
    """Takes all tensors of a version into an engine, None where they are those that it has. Both ways raise ValueError
    where they do not fit, with nothing changed."""

    def __call__(self, version: Version, weights: Bucket | None) -> Receipt:
        """Blocks the learning thread, which the engine may compute on meanwhile."""
        ...

    def start(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> "Future[Receipt]":
        """Returns at once; the engine computes nothing until `weights`, which may keep it waiting, have ended."""
        ...


class WeightPort(Protocol):
    """Whole versions only: between `begin` and `commit` nobody serves the new one."""

    @property
    def confirmed(self) -> Version | None:
        """What engines of other processes have given receipts for last; None where this port sends to none."""
        ...

    def attach(self, receive: Receive) -> Detach:
        """A worker's rollout engine takes part in every version from now on, until what is returned is called."""
        ...

    def begin(self, version: Version) -> None:
        """The learning thread starts to push a version. One that was begun before and not committed is thrown away."""
        ...

    def put(self, bucket: Bucket) -> None:
        """Some of its tensors; each is pushed once, and not changed before `commit`."""
        ...

    def commit(self, hashes: Mapping[str, str]) -> None:
        """All were pushed: engines take them, and both sides' receipts are compared.

        hashes: of what was pushed, by who pushed it; engines must hold the same. Raises TrustError where they do not;
        the engine then must not serve.
        """
        ...

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """A version whose weights are those of the last one: engines serve them under its number, nothing is sent.

        hashes: of the trainer's weights now. Raises TrustError where an engine holds others.
        """
        ...


def check_receipt(receipt: Receipt, version: Version, hashes: Mapping[str, str], of: str = "") -> None:
    """hashes: what the engine must hold. of: which one, such as " of worker 2". Raises TrustError where it serves
    another version, or holds something else."""
    if receipt.version != version:
        raise TrustError(f"weights of {version} were sent, but the engine's receipt{of} is for {receipt.version}")
    if receipt.shared and not receipt.hashes:
        return
    different = [name for name, own in hashes.items() if receipt.hashes.get(name) != own]
    if different and receipt.alias:
        raise TrustError(
            f"the engine{of} was to serve the weights that it has as version {version.step}, but they are not the "
            f"trainer's; tensors that differ: {', '.join(different[:5])}"
        )
    if different:
        names, where = ", ".join(different[:5]), f" at the engine{of}" if of else ""
        raise TrustError(f"weights of version {version.step} did not arrive whole{where}; tensors that differ: {names}")


def refused(version: Version, reason: Exception) -> TrustError:
    """What to raise where weights do not fit."""
    return TrustError(f"the engine refused the weights of version {version.step}: {reason}")


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
            with self._waits("training", f"weights of step {self._version.step}", on="rollout engine"):
                check_receipt(self._hand_over(receive, self._version), self._version, hashes)
        self._version, self._tensors = None, []

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        for receive in self._receivers:
            with self._waits("training", f"alias of step {version.step}", on="rollout engine"):
                check_receipt(receive(version, None), version, hashes)

    def _hand_over(self, receive: Receive, version: Version) -> Receipt:
        try:
            return receive(version, self._tensors)
        except ValueError as err:
            raise refused(version, err) from err
