"""Batches as algorithm functions see them: ragged rows with holes, poison outside the mask, invalid
samples."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

Rows = list[list[float]]


@dataclass
class Case:
    """Float64 tensors `(bs, length)` and `(bs,)`; whatever stands outside `mask` is NaN or
    infinite."""

    mask: Tensor
    group: Tensor
    valid: Tensor
    columns: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def rows(self, name: str) -> Rows:
        return self.columns[name].tolist()

    @property
    def counted(self) -> Tensor:
        """The mask less invalid samples."""
        return self.mask * self.valid[:, None]


COLUMNS = (
    *(
        "rewards",
        "values",
        "log_probs",
        "old_log_probs",
        "prox_log_probs",
        "ref_log_prob",
        "advantages",
        "scores",
    ),
    *("rollout_log_probs", "selected"),
)


def make_case(seed: int, bs: int = 9, length: int = 7, spread: float = 1.0) -> Case:
    """Row 1 has no token at all, row 2 a hole; groups of three, the last row a group of one, some
    samples invalid."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(bs, length, dtype=torch.float64)
    for row in range(bs):
        end = rng.randint(3, length)
        mask[row, :end] = torch.tensor([float(rng.random() < 0.75) for _ in range(end)])
        mask[row, end - 1] = 1.0
    mask[1] = 0.0
    mask[2] = torch.tensor([1.0, 0.0, 1.0] + [0.0] * (length - 3))
    group = torch.tensor([row // 3 for row in range(bs - 1)] + [100]) * 17
    valid = torch.tensor([rng.random() < 0.8 for _ in range(bs)])
    valid[2] = valid[-1] = True
    poison = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=torch.float64)
    columns = {}
    for name in COLUMNS:
        values = torch.randn(bs, length, dtype=torch.float64, generator=generator)
        if name.endswith(("log_probs", "log_prob")):
            values = -1.5 + spread * values
        if name == "selected":
            values = (values > 0.3).double()
        noise = poison[torch.randint(3, (bs, length), generator=generator)]
        columns[name] = torch.where(mask > 0, values, noise)
    return Case(mask, group, valid, columns)


@pytest.fixture
def case() -> Callable[..., Case]:
    return make_case
