"""The protocols of train engines, which do not depend on the algorithm (a loss is a callable), and
of collectives."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from distflow.data.batch import Batch

Counts = dict[str, float]
Sums = Mapping[str, Tensor | float]
"""Scalars by name; tensors may not be computed yet."""


TOP_IDS = {"top_log_probs": "top_ids", "teacher_top_log_probs": "teacher_top_ids"}
"""Outputs that are log-probs of several tokens in place of each token, with the column of their
ids."""


class LossFn(Protocol):
    """A loss over one mini-batch (one optimizer step), exact however the mini-batch is split.

    outputs: those of "log_probs", "entropy", "values", "text_scores" and `TOP_IDS` that the engine
    must compute.
    A loss that compares the samples of a prompt group has the attribute `whole_groups`, which is
    true: its micro-batches then hold whole groups.
    """

    outputs: tuple[str, ...]

    def counts(self, batch: Batch) -> Counts:
        """Denominators of the loss. They add up over micro-batches and ranks. `tokens`: those that
        count; a mini-batch without any takes no optimizer step."""

    def __call__(
        self, outputs: Mapping[str, Tensor], micro: Batch, counts: Counts
    ) -> tuple[Tensor, Sums]:
        """The micro-batch's share of the loss under the whole mini-batch's counts (shares add up to
        the loss),
        and sums of statistics that add in the same way. `outputs` are padded
        `(bs, response_length)` tensors.

        A statistic that stays a tensor on the device is read after all micro-batches; converting it
        to a number here waits for the device."""

    def finish(self, sums: Counts, counts: Counts) -> dict[str, float]:
        """Metrics of the mini-batch from the summed statistics."""


def compares_samples(loss: LossFn) -> bool:
    """Whether the loss of a sample depends on the others of its prompt group."""
    return bool(getattr(loss, "whole_groups", False))


MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class TrainState:
    """Everything that a train engine needs to resume: tensors by name, and JSON data.

    Names of trained weights begin with `MODEL_PREFIX`; those of the optimizer's entries for a
    weight are `OPTIMIZER_PREFIX`, the entry, "/" and the weight. Sharded tensors are DTensors.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def trained_weights(self) -> dict[str, Tensor]:
        """The weights that training changes, by the names of the model's parameters."""
        weights = dict[str, Tensor]()
        for name, tensor in self.tensors.items():
            if name.startswith(MODEL_PREFIX):
                weights[name.removeprefix(MODEL_PREFIX)] = tensor
        return weights

    def layout(self, name: str) -> Tensor | None:
        """A tensor sharded like the one of that name: an optimizer's entries are sharded like their
        weight, even before the first step, when there are none."""
        if name.startswith(OPTIMIZER_PREFIX):
            name = MODEL_PREFIX + name.partition("/")[2]
        return self.tensors.get(name)


class Scorer(Protocol):
    """Computes log-probs and values: the frozen reference, and every train engine."""

    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """The wanted per-token outputs as response columns, without gradient."""


class Offloadable(Protocol):
    """Weights that may leave the device while they are not in use."""

    def offload(self, weights: bool = True, moments: bool = True) -> None:
        """Move the weights, the optimizer's moments or both to host memory. Until `onload`, an
        engine without its weights is asked only for `weights` and `state`. Both are restored bit
        for bit."""

    def onload(self) -> None:
        """Restore the weights; moments return with the next optimizer step."""


class TrainEngine(Scorer, Offloadable, Protocol):
    """Computes log-probs and values, and takes optimizer steps."""

    def train_step(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        """One optimizer step over `batch`."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by their Hugging Face names."""

    def state(self) -> TrainState: ...

    def load_state(self, state: TrainState) -> None: ...


Named = dict[str, float]

# The result has the argument's type: a tensor, a number, or numbers by name.
Reducible = TypeVar("Reducible", Tensor, float, Named)
Plain = TypeVar("Plain")


class Collective(Protocol):
    """Sums and maxima over the ranks of a group, elementwise, and a gather; the result is the same
    on every rank.

    All ranks make the same calls in the same order, with tensors of one shape and numbers of the
    same names. The argument is unchanged.
    """

    @property
    def rank(self) -> int:
        """This process's place in the group, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, value: Reducible) -> Reducible: ...

    def max(self, value: Reducible) -> Reducible: ...

    def gather(self, value: Plain) -> list[Plain]:
        """The values of all ranks, in order: plain data and small tensors."""


class OneRank:
    """The collective of one rank: sums and maxima over a group of one are the value itself."""

    rank = 0
    size = 1

    def sum(self, value: Reducible) -> Reducible:
        return value

    def max(self, value: Reducible) -> Reducible:
        return value

    def gather(self, value: Plain) -> list[Plain]:
        return [value]
