"""Policy losses of the seed's signature: exact where they use our `agg_loss`, weighted by tokens
where not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms import agg_loss, masked_mean, register_policy_loss
from distflow.algorithms.masked_reductions import LOSS_AGG_MODES
from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.registry import POLICY_LOSSES, takes_weights
from tests.algorithms.toy_policy import gradient, random_split, scale_of, toy_batch

ROWS = 13
ACTOR = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}


def seed_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As a user of the seed would write it."""
    low = config.clip_ratio_low or config.clip_ratio
    high = config.clip_ratio_high or config.clip_ratio
    difference = log_prob - old_log_prob
    ratio = torch.exp(difference)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    worst = torch.maximum(plain, clipped)
    bound = -advantages * config.get("clip_ratio_c", 3.0)
    losses = torch.where(advantages < 0, torch.min(bound, worst), worst)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    lower = torch.gt(worst, bound) * (advantages < 0).float()

    return (
        agg_loss(losses, response_mask, loss_agg_mode),
        masked_mean(torch.gt(clipped, plain).float(), response_mask),
        masked_mean(-difference.detach(), response_mask),
        masked_mean(lower, response_mask),
    )


def seed_mean(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **kwargs: Any
) -> Any:
    """A scalar made without `agg_loss`; it would be NaN on a micro-batch without tokens."""
    if kwargs["rollout_is_weights"] is not None:
        advantages = advantages * kwargs["rollout_is_weights"]
    loss = -(log_prob * advantages * response_mask).sum() / response_mask.sum()
    zero = torch.tensor(0.0)
    return loss, zero, zero, zero


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_policy_loss("test_seed_vanilla")(seed_vanilla)
    register_policy_loss("test_seed_mean")(seed_mean)
    yield
    del POLICY_LOSSES["test_seed_vanilla"], POLICY_LOSSES["test_seed_mean"]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_with_agg_loss_it_equals_the_built_in_one_for_every_split(
    mode: str, corrected: bool
) -> None:
    batch = toy_batch(seed=20, bs=ROWS)
    common: dict[str, Any] = {
        "loss_agg_mode": mode,
        "loss_scale_factor": scale_of(mode),
        "entropy_coef": 0.02,
        "weights_field": "rollout_is_weights" if corrected else None,
    }
    built_in = PolicyObjective("vanilla", **common)
    seed = PolicyObjective("test_seed_vanilla", actor=ACTOR, **common)
    assert seed.policy_loss.returns_scalar
    counts = seed.counts(batch)
    wanted, wanted_sums = gradient(built_in, [batch], counts)
    wanted_metrics = built_in.finish(wanted_sums, counts)

    for parts in ([batch], random_split(batch, 0)):
        actual, sums = gradient(seed, parts, counts)
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)
        metrics = seed.finish(sums, counts)
        del metrics["loss_term/pg"]
        assert metrics == pytest.approx({name: wanted_metrics[name] for name in metrics}, rel=1e-6)


@pytest.mark.parametrize("weights", [None, "rollout_is_weights"])
def test_a_scalar_made_in_another_way_counts_by_its_tokens(weights: str | None) -> None:
    batch = toy_batch(seed=21, bs=ROWS)
    seed = PolicyObjective("test_seed_mean", weights_field=weights)
    plain = PolicyObjective("gpg", weights_field=weights)
    counts = plain.counts(batch)
    wanted, _ = gradient(plain, [batch], counts)
    actual, _ = gradient(seed, random_split(batch, 2), counts)
    torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


def test_weights_reach_a_loss_that_takes_them_by_name_or_with_all_else() -> None:
    register_policy_loss("test_without")(
        lambda old_log_prob, log_prob, advantages, response_mask: None
    )

    try:
        names = ("test_seed_vanilla", "test_seed_mean", "test_without", "vanilla", "test_unknown")
        assert [takes_weights(name) for name in names] == [True, True, False, True, False]
    finally:
        del POLICY_LOSSES["test_without"]


def test_another_return_value_is_refused() -> None:
    def wrong(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any) -> Any:
        return log_prob.sum()

    register_policy_loss("test_wrong")(wrong)
    try:
        batch = toy_batch(seed=23, bs=4)
        objective = PolicyObjective("test_wrong")
        with pytest.raises(ValueError, match="pg_clipfrac_lower"):
            gradient(objective, [batch], objective.counts(batch))
    finally:
        del POLICY_LOSSES["test_wrong"]
