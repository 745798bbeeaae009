"""The weight edge: versions of the trainer's weights on their way to rollout engines. One file a wire implements it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt
from distflow.runtime.checks import TrustError

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
