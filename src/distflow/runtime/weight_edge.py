"""The weight edge of one process: hands the trainer's weights to the engine and compares receipts."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from distflow.flow.ticket import Version
from distflow.rollout.engine import RolloutEngine
from distflow.rollout.receipts import stripe_hashes
from distflow.runtime.checks import TrustError

Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class WeightEdge:
    """Publishes versions. The trainer's float32 weights arrive in the engine's dtype.

    weights: the tensors to send, by their Hugging Face names; none where the engine needs none.
    """

    def __init__(self, weights: Weights, rollout: RolloutEngine, dtype: torch.dtype) -> None:
        self._weights = weights
        self._rollout = rollout
        self._dtype = dtype
        self._sent: dict[str, str] = {}
        self._received: dict[str, str] = {}

    async def publish(self, version: Version) -> None:
        """Send the weights as `version`. Raises TrustError where what arrived is not what was sent, or where a tensor
        changed on one side only; the engine then must not serve."""
        try:
            receipt = await self._rollout.load_weights(version, self._cast(self._weights()))
        except ValueError as err:
            raise TrustError(f"the engine refused the weights of version {version.step}: {err}") from err
        if receipt.version != version:
            raise TrustError(f"weights of {version} were sent, but the engine's receipt is for {receipt.version}")
        if receipt.shared:
            return
        sent = stripe_hashes(self._weights(), self._dtype)
        different = [name for name in sent if receipt.hashes.get(name) != sent[name]]
        one_sided = [
            name
            for name in sent
            if name in self._sent
            and (sent[name] != self._sent[name]) != (receipt.hashes.get(name) != self._received.get(name))
        ]
        if different or one_sided:
            names = ", ".join((different or one_sided)[:5])
            raise TrustError(f"weights of version {version.step} did not arrive whole; tensors that differ: {names}")
        self._sent, self._received = sent, dict(receipt.hashes)

    def _cast(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self._dtype)) for name, tensor in weights)
