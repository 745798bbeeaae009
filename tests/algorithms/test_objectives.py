"""Objectives: the same gradient and metrics however a mini-batch is split, wiring by parameter
names, dead terms."""

import math
from typing import Any

import pytest
import torch

from distflow.algorithms import register_policy_loss
from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.registry import POLICY_LOSSES, read_policy_loss
from tests.algorithms.toy_policy import (
    gradient,
    outputs,
    random_split,
    toy_batch,
    toy_weights,
)

ROWS = 13


def test_a_distance_beyond_the_clamp_is_told_and_its_loss_and_gradient_are_finite() -> None:
    objective = PolicyObjective("vanilla")
    batch = toy_batch(seed=7, bs=ROWS)
    counts = objective.counts(batch)

    for gap in (100.0, -100.0):
        batch["old_log_probs"] = (
            outputs(toy_weights(), batch)["log_probs"].detach().nan_to_num() - gap
        )
        found, sums = gradient(objective, [batch], counts)
        metrics = objective.finish(sums, counts)
        assert metrics["log_ratio_abs"] == pytest.approx(100.0, rel=1e-5)
        assert bool(found.isfinite().all()) and all(abs(value) < 1e10 for value in metrics.values())


def test_without_old_log_probs_there_is_no_distance() -> None:
    batch = toy_batch(seed=7, bs=ROWS)
    batch = batch.only(name for name in batch.names if name != "old_log_probs")
    objective = PolicyObjective("gpg")
    _, sums = gradient(objective, [batch], objective.counts(batch))
    assert "log_ratio_abs" not in objective.finish(sums, objective.counts(batch))


def test_a_dead_term_is_exactly_zero_and_a_live_one_is_not() -> None:
    batch = toy_batch(seed=8, bs=ROWS)
    objective = PolicyObjective(
        "vanilla", entropy_coef=0.01, kl_loss_type="low_var_kl", kl_loss_coef=0.1
    )
    counts = objective.counts(batch)
    live = objective.finish(gradient(objective, [batch], counts)[1], counts)
    assert all(live[f"loss_term/{name}"] > 0 for name in ("pg", "entropy", "kl"))

    batch["advantages"] = torch.zeros_like(batch["advantages"])
    batch["ref_log_prob"] = outputs(toy_weights(), batch)["log_probs"].nan_to_num()
    weights = toy_weights()
    out = outputs(weights, batch)
    out["log_probs"] = out["log_probs"].float()
    dead = objective.finish(objective(out, batch, counts)[1], counts)
    assert dead["loss_term/pg"] == 0.0
    assert dead["loss_term/kl"] == 0.0
    assert dead["loss_term/entropy"] > 0


def test_advantages_that_cancel_are_no_dead_term() -> None:
    """On policy a centred group's loss is 0 in value, while its gradient is not."""
    batch = toy_batch(seed=9, bs=2).select([0, 0])
    batch["advantages"] = torch.tensor([[1.0], [-1.0]]) * batch["response_mask"]
    batch["old_log_probs"] = outputs(toy_weights(), batch)["log_probs"].nan_to_num()
    objective = PolicyObjective("vanilla")
    counts = objective.counts(batch)
    _, sums = gradient(objective, [batch], counts)
    metrics = objective.finish(sums, counts)
    assert abs(metrics["pg_loss"]) < 1e-6
    assert metrics["loss_term/pg"] == pytest.approx(1.0, rel=1e-6)


def test_terms_that_are_off_are_not_read() -> None:
    batch = toy_batch(seed=11, bs=5)
    objective = PolicyObjective("gpg")
    assert objective.reads == ("advantages", "loss_mask")
    bare = batch.only(["response_ids", "response_mask", "advantages"])
    counts = objective.counts(bare)
    metrics = objective.finish(gradient(objective, [bare], counts)[1], counts)
    assert set(metrics) == {"loss", "pg_loss", "entropy", "loss_term/pg"}


def test_what_an_off_policy_mask_drops_is_not_read() -> None:
    """A loss that overflowed there is no NaN."""
    register_policy_loss("test_inf")(
        lambda log_probs, advantages, loss_mask: (
            torch.where(advantages < 0, math.inf, -log_probs),
            {},
        )
    )

    try:
        objective = PolicyObjective("test_inf", off_policy_mask_threshold=1e-6)
        batch = toy_batch(seed=6, bs=ROWS)
        batch["rollout_log_probs"] = torch.full_like(batch["rollout_log_probs"], 50.0)
        found, sums = gradient(objective, [batch], objective.counts(batch))
        assert bool(found.isfinite().all()) and math.isfinite(sums["loss"])
    finally:
        del POLICY_LOSSES["test_inf"]


def test_a_loss_of_ones_own_is_wired_by_its_parameter_names() -> None:
    @register_policy_loss("test_own_loss")
    def own_loss(
        log_probs: Any,
        advantages: Any,
        loss_mask: Any,
        returns: Any,
        values: Any = None,
        *,
        power: float = 1.0,
    ) -> Any:
        assert values is not None
        return -log_probs.exp() * advantages * returns.abs() ** power, {"seen": returns}

    try:
        objective = PolicyObjective("test_own_loss", {"power": 2.0})
        batch = toy_batch(seed=12, bs=ROWS)
        assert objective.reads == ("advantages", "loss_mask", "returns")
        counts = objective.counts(batch)
        wanted, _ = gradient(objective, [batch], counts)
        actual, sums = gradient(objective, random_split(batch, 5), counts)
        torch.testing.assert_close(actual, wanted)
        assert actual.isfinite().all()
        mask = batch["loss_mask"] > 0
        seen = objective.finish(sums, counts)["seen"]
        assert seen == pytest.approx(float(batch["returns"][mask].double().mean()))
        with pytest.raises(ValueError, match="'powr'.*'power'"):
            PolicyObjective("test_own_loss", {"powr": 2.0})
    finally:
        del POLICY_LOSSES["test_own_loss"]


@pytest.mark.parametrize("returned", [lambda x: x, lambda x: (x, x), lambda x: (x, {}, {})])
def test_a_loss_of_ones_own_that_returns_something_else_is_told_what_to_return(
    returned: Any,
) -> None:
    register_policy_loss("test_odd")(lambda log_probs, advantages, loss_mask: returned(log_probs))
    batch = toy_batch(seed=5, bs=ROWS)
    try:
        objective = PolicyObjective("test_odd")
        with pytest.raises(ValueError, match="'test_odd' must return"):
            gradient(objective, [batch], objective.counts(batch))
    finally:
        del POLICY_LOSSES["test_odd"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "vanila"}, "'vanila' .*'vanilla'"),
        ({"loss_agg_mode": "mean"}, "token-mean"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "sum-norm' .*loss_scale_factor"),
        ({"loss_scale_factor": 0.0}, r"loss_scale_factor .* 0\.0"),
        ({"options": {"clip_ratio_hihg": 0.1}}, "'clip_ratio_hihg'.*'clip_ratio_high'"),
        ({"options": {"clip_ratio_c": 0.5}}, r"clip_ratio_c .* 0\.5"),
        ({"off_policy_mask_threshold": 0.0}, r"off_policy_mask_threshold .* 0\.0"),
        ({"kl_loss_type": "low_var"}, "'low_var' .*'low_var_kl'"),
        ({"kl_loss_type": "full"}, "'full' would .*low_var_kl"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**arguments)


def test_a_missing_column_is_named() -> None:
    batch = toy_batch(seed=14, bs=3).only(["response_ids", "response_mask", "advantages"])
    objective = PolicyObjective("decoupled")
    with pytest.raises(KeyError, match="old_log_probs"):
        objective(outputs(toy_weights(), batch), batch, objective.counts(batch))


@pytest.mark.parametrize("shape", ["scalar", "sample"])
def test_a_loss_without_a_number_for_each_token_is_refused(shape: str) -> None:
    def unfit(log_probs: Any, advantages: Any, loss_mask: Any) -> Any:
        loss = -log_probs * advantages * loss_mask
        return (loss.sum() if shape == "scalar" else loss.sum(-1, keepdim=True)), {}

    batch = toy_batch(0, 3)
    objective = PolicyObjective(read_policy_loss("unfit", unfit))
    given = {
        "log_probs": batch["old_log_probs"],
        "entropy": torch.zeros_like(batch["old_log_probs"]),
    }
    with pytest.raises(ValueError, match=r"'unfit' must return .*\(3, "):
        objective(given, batch, objective.counts(batch))
