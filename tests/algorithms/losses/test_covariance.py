"""Which tokens clip_cov and kl_cov choose, by sorting lists."""

from typing import Any

import pytest
import torch

from distflow.algorithms.losses.covariance import largest, token_covariance, token_draws
from distflow.algorithms.registry import find_policy_loss


def covariances(batch: Any) -> dict[tuple[int, int], float]:
    """(A − mean A)(log π − mean log π) of each token under the mask."""
    a = batch.rows("advantages")
    lp = batch.rows("old_log_probs")
    tokens = [(i, t) for i, keep in enumerate(batch.mask.tolist()) for t, m in enumerate(keep) if m]
    mean_a = sum(a[i][t] for i, t in tokens) / len(tokens)
    mean_lp = sum(lp[i][t] for i, t in tokens) / len(tokens)
    return {(i, t): (a[i][t] - mean_a) * (lp[i][t] - mean_lp) for i, t in tokens}


def uids(batch: Any) -> list[str]:
    return [f"7-{row}" for row in range(len(batch.mask))]


def select(name: str, batch: Any, **options: float) -> set[tuple[int, int]]:
    selector = find_policy_loss(name).selects
    assert selector is not None
    chosen = selector(
        batch["advantages"], batch["old_log_probs"], batch.mask, uids(batch), **options
    )
    assert chosen.dtype == torch.float32 and set(chosen.flatten().tolist()) <= {0.0, 1.0}
    return {(int(i), int(t)) for i, t in chosen.nonzero()}


@pytest.mark.parametrize("seed", range(5))
def test_covariance(case: Any, seed: int) -> None:
    batch = case(seed)
    found = token_covariance(batch["advantages"], batch["old_log_probs"], batch.mask)
    wanted = covariances(batch)
    for i, row in enumerate(found.tolist()):
        for t, value in enumerate(row):
            assert value == pytest.approx(wanted.get((i, t), 0.0), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("share", [0.0002, 0.1, 0.34, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_takes_the_largest(case: Any, seed: int, share: float) -> None:
    batch = case(seed)
    wanted = covariances(batch)
    count = max(1, int(share * len(wanted)))
    assert select("kl_cov", batch, kl_cov_ratio=share) == set(
        sorted(wanted, key=wanted.__getitem__)[-count:]
    )


@pytest.mark.parametrize(
    ("share", "low", "high"), [(0.0002, 0.1, 5.0), (0.2, -0.5, 1.0), (1.0, 0.3, 0.6)]
)
@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_draws_from_those_within_the_bounds(
    case: Any, seed: int, share: float, low: float, high: float
) -> None:
    batch = case(seed)
    found = select("clip_cov", batch, clip_cov_ratio=share, clip_cov_lb=low, clip_cov_ub=high)
    wanted = covariances(batch)
    within = {token for token, value in wanted.items() if low < value < high}
    assert found <= within
    assert len(found) == min(max(1, int(share * len(wanted))), len(within))


@pytest.mark.slow
def test_every_token_within_the_bounds_is_drawn_alike() -> None:
    mask = torch.ones(1, 4)
    flat = torch.zeros(1, 4, dtype=torch.float64)
    counts = [0, 0, 0, 0]
    selector: Any = find_policy_loss("clip_cov").selects
    for step in range(2000):
        chosen = selector(flat, flat, mask, [f"{step}-0"], clip_cov_ratio=0.25, clip_cov_lb=-1.0)
        counts[int(chosen.argmax())] += 1
        assert float(chosen.sum()) == 1.0
    assert all(abs(count - 500) < 80 for count in counts), counts  # 4 standard deviations


def test_equal_covariances_give_no_more_than_the_share(case: Any) -> None:
    """All advantages of a batch may be equal; a penalty on every token would be another loss."""
    batch = case(1)
    batch.columns["advantages"] = torch.where(batch.mask > 0, 1.0, batch["advantages"])
    share = 0.2
    assert len(select("kl_cov", batch, kl_cov_ratio=share)) == int(share * len(covariances(batch)))


def test_a_draw_hangs_on_the_sample_and_the_position_alone() -> None:
    one = token_draws(["3-1", "0-0"], torch.ones(2, 5))
    two = token_draws(["0-0"], torch.ones(1, 3))
    assert torch.equal(one[1, :3], two[0])
    assert not torch.equal(one[0], one[1])
    assert bool(((one >= 0) & (one < 1)).all())


def test_largest_orders_signs_zeros_and_infinities() -> None:
    values = torch.tensor([[-1e300, -0.0, 0.0, 1e-310, 3.0, float("inf")]], dtype=torch.float64)
    ties = torch.tensor([[0.0, 0.9, 0.1, 0.0, 0.0, 0.0]], dtype=torch.float64)
    everywhere = torch.ones_like(values, dtype=torch.bool)
    for count, wanted in (
        (1, {5}),
        (2, {4, 5}),
        (4, {1, 3, 4, 5}),
        (5, {1, 2, 3, 4, 5}),
        (9, set(range(6))),
    ):
        chosen = largest(values, ties, everywhere, count)[0]
        assert set(chosen.nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_nothing_outside_the_mask_is_read_and_an_empty_batch_selects_nothing(
    case: Any, name: str
) -> None:
    poisoned = case(2)
    clean = case(2)
    clean.columns = {
        n: torch.where(clean.mask > 0, c, torch.zeros_like(c)) for n, c in clean.columns.items()
    }
    options = {
        "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": -9.0},
        "kl_cov": {"kl_cov_ratio": 0.3},
    }[name]
    assert select(name, poisoned, **options) == select(name, clean, **options) != set()
    poisoned.mask = torch.zeros_like(poisoned.mask)
    assert select(name, poisoned) == set()
    selector: Any = find_policy_loss(name).selects
    assert selector(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0), []).shape == (0, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clip_cov", {"clip_cov_ratio": 0.0}, "clip_cov_ratio"),
        ("clip_cov", {"clip_cov_lb": 5.0, "clip_cov_ub": 1.0}, "below clip_cov_ub"),
        ("kl_cov", {"kl_cov_ratio": 1.5}, "kl_cov_ratio"),
        ("kl_cov", {"kl_cov_ration": 0.1}, "did you mean 'kl_cov_ratio'"),
    ],
)
def test_options_without_sense_are_refused_before_the_start(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_policy_loss(name).call_options(options)
