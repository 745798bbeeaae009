"""Which tokens Clip-Cov and KL-Cov select, on two ranks, against sorted lists."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algorithms.losses.token_selection import token_covariance, token_draws
from distflow.algorithms.registry import find_policy_loss
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.algorithms.two_ranks import run_on_ranks
from tests.references import token_selection as reference

RANKS = st.lists(st.booleans(), min_size=1, max_size=4)
SHARES = st.sampled_from((0.0002, 0.1, 0.34, 1.0))
Token = tuple[int, int]


def tokens_of(batch: Drawn) -> list[Token]:
    return [(int(row), int(token)) for row, token in (batch.mask > 0).nonzero()]


def covariances_of(batch: Drawn) -> list[float]:
    columns = []
    for name in ("advantages", "old_log_probs"):
        columns.append([float(batch[name][token]) for token in tokens_of(batch)])
    return reference.covariances(*columns)


def select(name: str, batch: Drawn, first: list[bool], options: dict[str, Any]) -> set[Token]:
    """What two ranks select together."""
    selector: Any = find_policy_loss(name).selects
    shares = parts_of(batch, first)

    def of_rank(rows: list[int]) -> Any:
        uids = [f"7-{row}" for row in rows]
        columns = [batch[name][rows].float() for name in ("advantages", "old_log_probs")]
        return lambda ranks: selector(*columns, batch.mask[rows], uids, ranks, **options)

    chosen = set()
    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        assert found.dtype is torch.float32 and {*found.flatten().tolist()} <= {0.0, 1.0}
        chosen |= {(rows[int(row)], int(token)) for row, token in found.nonzero()}

    return chosen


@settings(max_examples=40)
@given(batch=batches())
def test_covariance(batch: Drawn) -> None:
    found = token_covariance(
        batch["advantages"].float(), batch["old_log_probs"].float(), batch.mask
    )
    assert not found[batch.mask == 0].any()
    wanted = torch.tensor(covariances_of(batch), dtype=torch.float64)
    torch.testing.assert_close(found[batch.mask > 0], wanted, rtol=1e-9, atol=1e-12)


@settings(max_examples=40)
@given(batch=batches(), first=RANKS, share=SHARES, unit=st.sampled_from((1.0, 2.0**-60)))
def test_kl_cov_selects_the_largest(
    batch: Drawn, first: list[bool], share: float, unit: float
) -> None:
    batch.columns["advantages"] = batch["advantages"] * unit
    found = select("kl_cov", batch, first, {"kl_cov_ratio": share})
    covariances = covariances_of(batch)
    tokens = tokens_of(batch)
    count = reference.num_selected(share, len(tokens)) if tokens else 0
    assert len(found) == count
    values = sorted(covariances, reverse=True)
    if len(values) > count and values[count - 1] - values[count] < 1e-9 * unit:
        return  # ties are drawn
    assert found == {tokens[place] for place in reference.kl_cov(covariances, share)}


@settings(max_examples=40)
@given(
    batch=batches(),
    first=RANKS,
    share=SHARES,
    bounds=st.sampled_from((None, (0.1, 5.0), (-0.5, 1.0), (0.3, 0.6))),
)
def test_clip_cov_draws_within_its_bounds(
    batch: Drawn, first: list[bool], share: float, bounds: tuple[float, float] | None
) -> None:
    options = {"clip_cov_ratio": share}
    if bounds is not None:
        options |= {"clip_cov_lb": bounds[0], "clip_cov_ub": bounds[1]}
    found = select("clip_cov", batch, first, options)
    tokens = tokens_of(batch)
    within = sorted(reference.within(covariances_of(batch), *(bounds or (1.0, 5.0))))
    draws = token_draws([f"7-{row}" for row in range(len(batch))], batch.mask)
    ranked = sorted(within, key=lambda place: -float(draws[tokens[place]]))
    count = min(reference.num_selected(share, len(tokens)), len(within))
    assert found == {tokens[place] for place in ranked[:count]}


def test_equal_covariances_give_no_more_than_the_share() -> None:
    selector: Any = find_policy_loss("kl_cov").selects
    flat = torch.zeros(2, 5, dtype=torch.float64)
    chosen = selector(flat, flat, torch.ones(2, 5), ["0-0", "0-1"], kl_cov_ratio=0.2)
    assert int(chosen.sum()) == 2


def test_a_draw_depends_on_the_sample_and_the_position_alone() -> None:
    one = token_draws(["3-1", "0-0"], torch.ones(2, 5))
    two = token_draws(["0-0"], torch.ones(1, 3))
    assert torch.equal(one[1, :3], two[0])
    assert len(one.unique()) == 10


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
