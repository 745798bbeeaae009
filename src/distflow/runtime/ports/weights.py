"""The weight edge: versions of the trainer's weights on their way to rollout engines. One file a wire implements it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt

Bucket = Sequence[tuple[str, Tensor]]
"""Some of a version's tensors, by their Hugging Face names, in the dtype of the engine."""

Receive = Callable[[Version, Bucket], Receipt]
"""Takes all tensors of a version into an engine; blocks. Raises ValueError where they do not fit."""


class WeightPort(Protocol):
    """Whole versions only: between `begin` and `commit` nobody serves the new one."""

    def attach(self, receive: Receive) -> None:
        """A worker's rollout engine takes part in every version from now on."""
        ...

    def begin(self, version: Version) -> None:
        """The learning thread starts to push a version."""
        ...

    def put(self, bucket: Bucket) -> None:
        """Some of its tensors; each is pushed once."""
        ...

    def commit(self) -> None:
        """All were pushed: engines take them, and both sides' receipts are compared.

        Raises TrustError where what arrived is not what was sent; the engine then must not serve.
        """
        ...
