"""Estimators on scores that are large and differ by little, against rationals: nothing is lost on
the way."""

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import masked_whiten
from distflow.algorithms.normalization import Moments, Normalization
from distflow.algorithms.registry import find_adv_est

OFFSETS = {
    "0.01 k": (0.0, 0.01),
    "1e6": (1e6, 0.01),
    "2^24": (2.0**24, 1.0),
    "-1e9": (-1e9, 1e-3),
    "1e37": (0.0, 1e37),
}
Reference = Callable[[Fraction, list[Fraction], list[int], int], Fraction]


def made(offset: float, unit: float, seed: int) -> dict[str, Any]:
    """Groups of one to six samples in no order, some invalid; rows with holes, the score on the
    last policy token."""
    rng = random.Random(seed)
    groups = [group for group, size in enumerate((6, 2, 4, 1, 5)) for _ in range(size)]
    rng.shuffle(groups)
    mask = torch.tensor([[1.0] + [float(rng.random() < 0.7) for _ in range(5)] for _ in groups])
    scores = torch.tensor([offset + unit * rng.randrange(5) for _ in groups], dtype=torch.float64)
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    for row, own in enumerate(mask):
        rewards[row, int(own.nonzero().max())] = scores[row]
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "group_index": torch.tensor(groups),
        "valid": torch.tensor([rng.random() < 0.85 for _ in groups]),
        "scores": scores,
    }


def root(value: Fraction) -> Fraction:
    """A square root to far more digits than float64 has."""
    scale = 10**60
    size = value.numerator * scale * scale // value.denominator

    low = 0
    high = 1 << (size.bit_length() // 2 + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle * middle <= size else (low, middle - 1)

    return Fraction(low, scale)


def std(group: list[Fraction]) -> Fraction:
    middle = sum(group, Fraction(0)) / len(group)
    return root(sum(((each - middle) ** 2 for each in group), Fraction(0)) / (len(group) - 1))


def grpo(own: Fraction, group: list[Fraction], lengths: list[int], place: int) -> Fraction:
    epsilon = Fraction(1e-6)
    if len(group) == 1:
        return own / (1 + epsilon)
    return (own - sum(group) / len(group)) / (std(group) + epsilon)


def centred(own: Fraction, group: list[Fraction], lengths: list[int], place: int) -> Fraction:
    return own - sum(group) / len(group) if len(group) > 1 else own


def rloo(own: Fraction, group: list[Fraction], lengths: list[int], place: int) -> Fraction:
    return own - (sum(group) - own) / (len(group) - 1) if len(group) > 1 else Fraction(0)


def opo(own: Fraction, group: list[Fraction], lengths: list[int], place: int) -> Fraction:
    if len(group) == 1:
        return own
    return own - sum(n * each for n, each in zip(lengths, group, strict=True)) / sum(lengths)


def passk(own: Fraction, group: list[Fraction], lengths: list[int], place: int) -> Fraction:
    best = sorted(group)
    if len(group) < 2 or own != best[-1] or best[-1] == best[-2]:
        return Fraction(0)
    return (best[-1] - best[-2]) / (std(group) + Fraction(1e-6))


def by_group(columns: dict[str, Any], rule: Reference) -> list[Fraction]:
    groups = columns["group_index"].tolist()
    valid = columns["valid"].tolist()
    scores = [Fraction(score) for score in columns["scores"].tolist()]
    lengths = [int(own) for own in columns["response_mask"].sum(-1)]

    found = []
    for row, group in enumerate(groups):
        peers = [i for i, other in enumerate(groups) if other == group and valid[i]]
        own = (
            rule(scores[row], [scores[i] for i in peers], [lengths[i] for i in peers], row)
            if valid[row]
            else 0
        )
        found.append(Fraction(own))

    return found


def check(found: Tensor, wanted: list[Fraction], mask: Tensor, relative: float) -> None:
    assert found.dtype is torch.float64
    size = max(map(abs, wanted))

    for row, own in enumerate(wanted):
        for value, counts in zip(found[row].tolist(), mask[row].tolist(), strict=True):
            assert abs(Fraction(value) - own * int(counts)) <= relative * size, (
                row,
                value,
                float(own),
            )


def estimate(name: str, columns: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    names = ("token_level_rewards", "response_mask", "group_index", "valid")
    takes = find_adv_est(name).fn.__code__.co_varnames
    found: tuple[Tensor, Tensor] = find_adv_est(name).fn(
        **{n: columns[n] for n in names if n in takes}, **options
    )
    return found


ESTIMATORS: dict[str, tuple[str, Reference, dict[str, Any]]] = {
    "grpo": ("grpo", grpo, {}),
    "dr_grpo": ("grpo", centred, {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", rloo, {}),
    "opo": ("opo", opo, {}),
    "passk": ("grpo_passk", passk, {}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_of_groups(name: str, offset: str, seed: int) -> None:
    estimator, rule, options = ESTIMATORS[name]
    columns = made(*OFFSETS[offset], seed)
    columns["valid"] |= columns["group_index"] == 3  # the group of one, which keeps its reward
    alone = columns["group_index"] == 3
    wanted, (found, _) = by_group(columns, rule), estimate(estimator, columns, **options)
    rows = (~alone).nonzero()[:, 0].tolist()
    check(found[rows], [wanted[row] for row in rows], columns["response_mask"][rows], 1e-6)
    check(
        found[alone],
        [wanted[row] for row in alone.nonzero()[:, 0].tolist()],
        columns["response_mask"][alone],
        1e-12,
    )


@pytest.mark.parametrize("offset", OFFSETS)
def test_whitening_and_normalisation(offset: str) -> None:
    columns = made(*OFFSETS[offset], 5)
    values = columns["scores"][:, None]
    mask = torch.ones(len(columns["scores"]), 1)
    exact = [Fraction(each) for each in columns["scores"].tolist()]
    middle = sum(exact) / len(exact)
    scale = std(exact)
    check(
        masked_whiten(values, mask),
        [(e - middle) / root(scale**2 + Fraction(1e-8)) for e in exact],
        mask,
        1e-6,
    )
    unbiased = Normalization(mean_level="batch", std_level="batch", eps=0.0)(
        values, mask, columns["group_index"]
    )
    check(unbiased, [(e - middle) / scale for e in exact], mask, 1e-6)
    others = [e - (sum(exact) - e) / (len(exact) - 1) for e in exact]
    left_out = Normalization(mean_level="batch", mean_leave1out=True)(
        values, mask, columns["group_index"]
    )
    check(left_out, others, mask, 1e-6)
    assert Moments().with_values(values, mask).std() == pytest.approx(float(scale), rel=1e-5)
