"""The protocol of the weight sync from trainer to rollout engines, which one file for each transport implements, and
its implementation in one process, where tensors are passed by reference."""

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
"""Nothing more is sent to the engine; a partly received version is aborted."""


class Receive(Protocol):
    """Loads all tensors of a version into an engine; None means that it has them already. Both methods raise ValueError
    if they do not fit, with nothing changed."""

    def __call__(self, version: Version, weights: Bucket | None) -> Receipt:
        """Blocks the training thread, on which the engine may compute meanwhile."""
        ...

    def start(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> "Future[Receipt]":
        """Returns at once; the engine computes nothing until `weights`, which may block, has ended."""
        ...


class WeightPort(Protocol):
    """Complete versions only: between `begin` and `commit` no engine uses the new one."""

    @property
    def confirmed(self) -> Version | None:
        """The version of the last receipts of engines of other processes; None if this port sends to none."""
        ...

    def attach(self, receive: Receive) -> Detach:
        """A worker's rollout engine gets every version from now on, until the returned function is called."""
        ...

    def begin(self, version: Version) -> None:
        """The training thread starts to send a version. One that was begun before and not committed is discarded."""
        ...

    def put(self, bucket: Bucket) -> None:
        """Some of its tensors; each is sent once, and not changed before `commit`."""
        ...

    def commit(self, hashes: Mapping[str, str]) -> None:
        """All were sent: engines load them, and the hashes of both sides are compared.

        hashes: of the sent tensors, computed by the sender; engines must have the same. Raises TrustError if they do
        not; the engine then must not generate.
        """
        ...

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """A version with the weights of the last one: engines use them under its number, nothing is sent.

        hashes: of the trainer's weights now. Raises TrustError if an engine has others.
        """
        ...


def check_receipt(receipt: Receipt, version: Version, hashes: Mapping[str, str], of: str = "") -> None:
    """hashes: of the weights that the engine must have. of: which one, such as " of worker 2". Raises TrustError if it
    has another version, or other weights."""
    if receipt.version != version:
        raise TrustError(f"weights of {version} were sent, but the engine's receipt{of} is for {receipt.version}")
    if receipt.shared and not receipt.hashes:
        return
    different = [name for name, own in hashes.items() if receipt.hashes.get(name) != own]
    if different and receipt.version_only:
        raise TrustError(
            f"the engine{of} was to serve the weights that it has as version {version.step}, but they are not the "
            f"trainer's; tensors that differ: {', '.join(different[:5])}"
        )
    if different:
        names, where = ", ".join(different[:5]), f" at the engine{of}" if of else ""
        raise TrustError(f"weights of version {version.step} did not arrive whole{where}; tensors that differ: {names}")


def refused(version: Version, reason: Exception) -> TrustError:
    """The error to raise if weights do not fit."""
    return TrustError(f"the engine refused the weights of version {version.step}: {reason}")


class LocalWeights:
    """Collects the buckets of a version until it is complete, then passes them to the engines of this process. Without
    engines it collects nothing.

    Used by the training thread alone, so it needs no lock. An engine reads the trainer's own tensors on a thread of its
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
                check_receipt(self._pass_to(receive, self._version), self._version, hashes)
        self._version, self._tensors = None, []

    def alias(self, version: Version, hashes: Mapping[str, str]) -> None:
        """See `WeightPort`."""
        for receive in self._receivers:
            with self._waits("training", f"alias of step {version.step}", on="rollout engine"):
                check_receipt(receive(version, None), version, hashes)

    def _pass_to(self, receive: Receive, version: Version) -> Receipt:
        try:
            return receive(version, self._tensors)
        except ValueError as err:
            raise refused(version, err) from err
