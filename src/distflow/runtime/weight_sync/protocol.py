"""The two ports of the weight sync: a trainer sends versions through one, and a worker's engine
receives them through the other. `same_process_weights.py` implements both, `receiver.py` and
`cluster` those between processes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from distflow.errors import TrustError
from distflow.rollout.engine import WeightReceipt
from distflow.scheduling.group_states import Version

Bucket = Sequence[tuple[str, Tensor]]
"""Some of a version's tensors, by their Hugging Face names, in the dtype of the engine."""

Detach = Callable[[], None]
"""Stops sending to the engine; a partly received version is aborted."""


class Receive(Protocol):
    """Loads all tensors of a version into an engine; None means that it already has them. Both
    methods raise ValueError if they do not fit, with nothing changed."""

    def __call__(self, version: Version, weights: Bucket | None) -> WeightReceipt:
        """Blocks the training thread, on which the engine may compute meanwhile."""

    def start(
        self, version: Version, weights: Iterable[tuple[str, Tensor]]
    ) -> "Future[WeightReceipt]":
        """Returns at once; the engine computes nothing until `weights`, which may block, has
        ended."""


class EnginePort(Protocol):
    """Where a worker's rollout engine gets its weights."""

    def attach(self, receive: Receive) -> Detach:
        """Pass every version to the engine from now on, until the returned function is called."""


class WeightPort(Protocol):
    """Where a trainer sends its weights. It sends only complete versions: between `begin` and
    `commit` no engine uses the new one."""

    @property
    def confirmed(self) -> Version | None:
        """The version of the last receipts of engines of other processes; None if this port sends
        to none."""

    def begin(self, version: Version) -> None:
        """Begin to send a version, from the training thread. An earlier one that was not committed
        is discarded."""

    def put(self, bucket: Bucket) -> None:
        """Send some of its tensors; each is sent once, and not changed before `commit`."""

    def commit(self, hashes: Mapping[str, str]) -> None:
        """Finish the version: engines load it, and the hashes of both sides are compared.

        hashes: of the sent tensors, computed by the sender; engines must have the same. Raises
        TrustError, which ends the run, if they do not.
        """

    def renumber(self, version: Version, hashes: Mapping[str, str]) -> None:
        """Start a version with the weights of the last one: engines use them under its number, and
        nothing is sent.

        hashes: of the trainer's current weights. Raises TrustError if an engine has others.
        """


def check_receipt(
    receipt: WeightReceipt, version: Version, hashes: Mapping[str, str], of: str = ""
) -> None:
    """hashes: of the weights that the engine must have. of: names the engine, e.g. " of worker 2".
    Raises TrustError if the engine has another version or other weights."""
    if receipt.version != version:
        raise TrustError(
            f"weights of {version} were sent, but the engine's receipt{of} is for {receipt.version}"
        )

    different = [name for name, own in hashes.items() if receipt.hashes.get(name) != own]
    if not different:
        return

    names = ", ".join(different[:5])
    if receipt.version_only:
        raise TrustError(
            f"the engine{of} was to use the weights that it has as version {version.step}, but "
            f"they are not the trainer's; tensors that differ: {names}"
        )

    where = f" at the engine{of}" if of else ""
    raise TrustError(
        f"weights of version {version.step} arrived incompletely{where}; different tensors: {names}"
    )


def refused(version: Version, reason: Exception) -> TrustError:
    """The error to raise if weights do not fit."""
    return TrustError(f"the engine rejected the weights of version {version.step}: {reason}")
