"""Random batches: ragged rows with holes and rows without a token, unequal groups in any order,
samples without a score, and poison wherever nothing may be read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

POISON = (float("nan"), float("inf"), float("-inf"), 1e30)
LOG_PROBS = ("log_probs", "old_log_probs", "prox_log_probs", "ref_log_prob", "rollout_log_probs")
OTHERS = ("rewards", "scores", "values", "returns", "advantages", "entropy", "is_weights")


@dataclass
class Drawn:
    """Columns are float64 `(bs, length)`; outside the mask they are poison."""

    mask: Tensor
    group: Tensor
    valid: Tensor
    columns: dict[str, Tensor]
    turns: Tensor
    """The number of each token's turn; -1 outside the mask."""
    orders: Tensor
    """The place of each token's turn among those of all agents; -1 outside the mask."""
    truncated: Tensor
    baselines: Tensor
    domains: list[str]
    parts: list[dict[str, float]]
    acc: Tensor

    def __len__(self) -> int:
        return len(self.mask)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def of_tokens(self, row: int, name: str) -> Tensor:
        """The column of a row, under the mask."""
        return self.columns[name][row][self.mask[row] > 0]

    def rows(self) -> Iterator[int]:
        """Rows with a score."""
        return (row for row, is_valid in enumerate(self.valid.tolist()) if is_valid)


SEEDS = st.integers(0, 2**32 - 1)
"""All else is drawn by one, evenly: what is drawn of many small strategies is mostly alike."""


def batches(longest: int = 6, all_valid: bool = False) -> st.SearchStrategy[Drawn]:
    return SEEDS.map(lambda seed: drawn_batch(seed, longest, all_valid))


def drawn_batch(seed: int, longest: int, all_valid: bool) -> Drawn:
    rng = Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.choice((0, 1, 2, 3, 3, 4, 4)))]
    length = rng.randint(1, longest)
    bs = sum(sizes)

    # a row without a token now and then
    bits = [rng.getrandbits(length) * (rng.random() < 0.9) for _ in range(bs)]
    valid = [all_valid or rng.random() < 0.75 for _ in range(bs)]
    spread = rng.choice((1.0, 1.0, 0.1, 0.0, 15.0))
    has_ties = rng.random() < 0.5
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    mask = torch.tensor([[float(own >> t & 1) for t in range(length)] for own in bits])
    mask = mask.double().view(bs, length)
    columns = {}
    for name in LOG_PROBS:
        columns[name] = -1.5 + spread * normal(bs, length)
    for name in OTHERS:
        columns[name] = normal(bs, length)
    columns["is_weights"] = columns["is_weights"].exp()

    # some tokens have no advantage
    columns["advantages"] *= uniform(bs, length) < 0.8
    columns["selected"] = (uniform(bs, length) < 0.3).double()

    if has_ties:
        columns["rewards"] = torch.randint(3, (bs, length), generator=generator).double() / 2.0
        columns["rewards"] *= uniform(bs, length) < 0.3

    noise = torch.tensor(POISON)[torch.randint(len(POISON), (bs, length), generator=generator)]
    for name, column in columns.items():
        # a batch stores float32
        columns[name] = torch.where(mask > 0, column.float().double(), noise)

    turns, orders = drawn_turns(mask, uniform(bs, length))
    shuffled = torch.randperm(bs, generator=generator)
    groups = torch.tensor(
        [11 - 17 * number for number, size in enumerate(sizes) for _ in range(size)]
    )
    has_part = uniform(bs, 2) < 0.7
    part_scores = torch.randint(3, (bs, 2), generator=generator).double() / 2.0

    return Drawn(
        mask,
        groups.long()[shuffled],
        torch.tensor(valid, dtype=torch.bool),
        columns,
        turns,
        orders,
        uniform(bs) < 0.5,
        normal(bs).float().double(),
        [
            ("maths", "code", "chat")[number]
            for number in torch.randint(3, (bs,), generator=generator)
        ],
        [
            {
                name: float(part_scores[row, place])
                for place, name in enumerate(("right", "form"))
                if has_part[row, place]
            }
            for row in range(bs)
        ],
        torch.randint(2, (bs,), generator=generator).double(),
    )


def drawn_turns(mask: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """(turns, their places in time): a turn may end at any token, and ends at a hole."""
    turns = torch.full(mask.shape, -1)
    orders = torch.full(mask.shape, -1)
    for row, own in enumerate(mask.tolist()):
        turn = -1
        is_inside = False
        for token, counts in enumerate(own):
            if not counts:
                is_inside = False
                continue

            if not is_inside or chances[row, token] < 0.3:
                turn += 1
            is_inside = True
            turns[row, token] = turn

            # 7 is prime to the number of turns: a permutation
            orders[row, token] = turn * 5 % 7

    return turns, orders


def parts_of(batch: Drawn, is_first: Sequence[bool]) -> tuple[list[int], list[int]]:
    """The rows of two ranks: whole groups each. is_first: of each group, whether rank 0 has it."""
    groups = batch.group.tolist()
    known = sorted({*groups})
    ranks = {group: is_first[number % len(is_first)] for number, group in enumerate(known)}
    first = [row for row, group in enumerate(groups) if ranks[group]]
    second = [row for row, group in enumerate(groups) if not ranks[group]]
    return first, second


def find_reference(references: dict[str, Any], name: str, what: str, file: str) -> Any:
    """The reference of a built-in name."""
    if name not in references:
        pytest.fail(
            f"{what} '{name}' has no reference: write it a second time, for "
            f"one sample after another, and add it to REFERENCES in {file}"
        )
    return references[name]


def choose(options: Mapping[str, Sequence[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A value for about half of the options; the others keep their defaults."""

    def chosen(seed: int) -> dict[str, Any]:
        rng = Random(seed)
        found = {}
        for name, values in options.items():
            if rng.random() < 0.6:
                found[name] = rng.choice(values)
        return found

    return SEEDS.map(chosen)
