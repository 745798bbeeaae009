"""Small batches as a rollout leaves them, and engines that only hold weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.training.engine import LossFn, TrainState

LENGTHS = (5, 1, 4, 6)


def sampled_batch(version: int = 0, tool_tokens: int = 0) -> Batch:
    """Two groups of two samples, with log-probs that differ from token to token.

    tool_tokens: number of tokens in the middle of each response that are not the policy's.
    """
    generator = torch.Generator().manual_seed(3)
    samples = []
    for i, length in enumerate(LENGTHS):
        segments = [Segment("prompt", (7, 8, 9 + i // 2)), _policy(length, version, generator)]
        if tool_tokens:
            segments += [Segment("tool", (1,) * tool_tokens), _policy(2, version, generator)]
        samples.append(Sample(f"{i // 2}-{i % 2}", i // 2, segments, episode=i % 2))

    batch = Batch.from_samples(samples)
    batch["old_log_probs"] = batch.flat("rollout_log_probs")
    return batch


def _policy(length: int, version: int, generator: torch.Generator) -> Segment:
    log_probs = tuple((-3 * torch.rand(length, generator=generator)).tolist())
    return Segment("policy", tuple(range(length)), log_probs, log_probs, (version,) * length)


class WeightsOnly:
    """A train engine in name: its weights and moments are what the test puts there."""

    def __init__(self, **weights: Tensor) -> None:
        self.tensors = weights
        self.moments = {name: torch.ones_like(weight) for name, weight in weights.items()}

    def state(self) -> TrainState:
        moments = {f"optimizer.exp_avg/{name}": tensor for name, tensor in self.moments.items()}
        return TrainState(
            {f"model.{name}": tensor for name, tensor in self.tensors.items()} | moments
        )

    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        raise AssertionError("not asked here")

    def train_step(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        raise AssertionError("not asked here")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def load_state(self, state: TrainState) -> None:
        raise AssertionError("not asked here")
