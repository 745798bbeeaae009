"""The weight edge: versions of the trainer's weights on their way to rollout engines. One file a wire implements it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import Receipt

Bucket = Sequence[tuple[str, Tensor]]
"""Some of a version's tensors, by their Hugging Face names, in the dtype of the engine."""

Receive = Callable[[Version, Bucket | None], Receipt]
"""Takes all tensors of a version into an engine, None where they are those that it has; blocks. Raises ValueError where
they do not fit."""


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
