"""GDPO against loops in plain Python: parts normalised by group, summed by weight, whitened."""

from typing import Any

import pytest
import torch

from distflow.algorithms.registry import describe_estimator, find_adv_est
from tests.algorithms.test_advantages import assert_close, grpo, std, whiten

WEIGHTS = {"default": {"math": 1.0, "format": 0.2}, "code": {"tests": 3.0, "format": 0.5}}


def parts_of(case: Any) -> tuple[list[dict[str, float]], list[str]]:
    """Parts and domain of each sample: groups 0 and 2 are maths, group 1 is code; all are given an
    overlong penalty."""
    domains = ["code" if row // 3 == 1 else "maths" for row in range(len(case.group))]
    parts = [
        {
            ("tests" if domain == "code" else "math"): float(row * 7 % 3),
            "format": float(row % 2) / 4,
            "overlong": -(row % 4) / 8,
        }
        for row, domain in enumerate(domains)
    ]
    return [
        part if ok else {} for part, ok in zip(parts, case.valid.tolist(), strict=True)
    ], domains


def reference(case: Any, whiten_over: str, norm: bool = True) -> list[list[float]]:
    parts, domains = parts_of(case)
    total = [0.0] * len(parts)
    for name in ("math", "tests", "format", "overlong"):
        own = [[part.get(name, 0.0)] for part in parts]
        alone = type(case)(
            torch.ones(len(own), 1), case.group, case.valid, {"rewards": torch.tensor(own)}
        )
        for row, (advantage,) in enumerate(grpo(alone, norm)):
            weights = WEIGHTS["code"] if domains[row] == "code" else WEIGHTS["default"]
            total[row] += weights.get(name, 1.0) * advantage * (name in parts[row])
    counted = case.counted.tolist()
    if whiten_over == "tokens":
        return whiten(
            [[value] * len(keep) for value, keep in zip(total, counted, strict=True)], counted
        )
    judged = [value for value, ok in zip(total, case.valid.tolist(), strict=True) if ok]
    mean = sum(judged) / len(judged)
    scale = (std(judged) ** 2 + 1e-8) ** -0.5
    return [
        [(v - mean) * scale if m else 0.0 for m in keep]
        for v, keep in zip(total, counted, strict=True)
    ]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("whiten_over", ["tokens", "samples"])
@pytest.mark.parametrize("seed", range(5))
def test_against_loops(case: Any, seed: int, whiten_over: Any, norm: bool) -> None:
    batch = case(seed)
    parts, domains = parts_of(batch)
    found, returns = find_adv_est("gdpo").fn(
        batch.mask,
        batch.group,
        parts,
        domains,
        batch.valid,
        reward_weights=WEIGHTS,
        whiten_over=whiten_over,
        norm_adv_by_std_in_grpo=norm,
    )
    assert_close(found, reference(batch, whiten_over, norm))
    assert torch.equal(found, returns) and returns is not found


def test_parts_that_cancel_in_the_sum_still_teach() -> None:
    """The paper's case: with rewards (1, 0) and (0, 1) GRPO sees two equal sums, and so no
    advantage in any group."""
    mask = torch.ones(4, 1)
    groups = torch.tensor([0, 0, 1, 1])
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.5}, {"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 0.0}]
    found, _ = find_adv_est("gdpo").fn(mask, groups, parts)
    # ±1/√2 for each part: 0, 0, √2, −√2; of which the standard deviation is √(4/3).
    assert found.flatten().tolist() == pytest.approx([0, 0, 1.5**0.5, -(1.5**0.5)], abs=1e-5)


def test_a_part_that_a_sample_lacks_is_in_no_mean_of_its() -> None:
    mask = torch.ones(3, 1)
    groups = torch.zeros(3)
    with_it, _ = find_adv_est("gdpo").fn(
        mask, groups, [{"a": 2.0}, {"a": 0.0}, {}], whiten_over="samples"
    )
    assert with_it.flatten().tolist() == pytest.approx([1, -1, 0], abs=1e-6)


def test_its_description() -> None:
    assert describe_estimator("gdpo", {"whiten_over": "samples"}) == (
        "gdpo: Σ weight · ((reward − mean of its group) / (std of its group + 1e-06)) over the "
        "parts of the reward, "
        "whitened over the batch's samples"
    )
