"""Every built-in policy loss, its gradient and its statistics against its reference, on random
batches."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algorithms.masked_reductions import weighted_sum
from distflow.algorithms.registry import find_policy_loss
from distflow.builtin_names import POLICY_LOSSES
from tests.algorithms.batches import Drawn, batches, choose, find_reference
from tests.references.policy_losses import REFERENCES
from tests.references.tokens import Loss, Tokens

CLIP: dict[str, Sequence[Any]] = {
    "clip_ratio_low": (0.2, 0.05, 0.5),
    "clip_ratio_high": (0.2, 0.28, 0.05),
}
REJECTIONS = (
    None,
    {},
    {"lower": 0.5, "upper": 2.0},
    {"lower": 0.5, "upper": 1.2, "action": "clamp"},
    {"upper": 1.2, "action": "clamp"},
    {"metric": "kl_k1", "upper": 0.3, "lower": -0.3},
    {"metric": "kl_k2", "upper": 0.1},
    {"metric": "kl_k3", "upper": 0.1},
    {"level": "sequence", "lower": 0.8, "upper": 1.3},
    {"level": "sequence", "lower": 0.8, "upper": 1.3, "action": "clamp"},
    {"level": "sequence", "agg": "sum", "upper": 2.0},
    {"level": "sequence", "agg": "max", "upper": 2.0, "action": "clamp"},
    {"level": "sequence", "metric": "kl_k1", "agg": "sum", "upper": 0.4, "lower": -0.4},
    {"level": "sequence", "metric": "kl_k2", "upper": 0.2},
    {"level": "sequence", "metric": "kl_k3", "agg": "max", "upper": 0.3},
)
DIVERGENCE = {**CLIP, "clip_ratio_c": (20.0, 1.5, None)}
OPTIONS: dict[str, dict[str, Sequence[Any]]] = {
    "vanilla": {**CLIP, "clip_ratio_c": (3.0, 1.4, None)},
    "decoupled": {
        **CLIP,
        "clip_ratio_c": (3.0, 1.4, None),
        "behav_imp_weight_cap": (5.0, 1.2, None),
        "behav_imp_weight_mode": ("mask", "clamp", "disabled"),
        "rejection_sampling": REJECTIONS[:4],
    },
    "gspo": CLIP,
    "gmpo": CLIP,
    "cpgd": {
        "clip_ratio_low": (0.2, 0.05, 1.0),
        "clip_ratio_high": CLIP["clip_ratio_high"],
        "policy_drift_coeff": (0.0, 0.3),
    },
    "cispo": {**CLIP, "clip_below": (True, False)},
    "topr": {"ratio_level": ("token", "sequence")},
    "sapo": {"tau_pos": (1.0, 0.5), "tau_neg": (1.05, 3.0)},
    "dppo_tv": DIVERGENCE,
    "dppo_kl": DIVERGENCE,
    "dro": {"beta": (0.1, 2.0, 0.0)},
    "clip_cov": CLIP,
    "kl_cov": {"ppo_kl_coef": (1.0, 0.25)},
}


def run(
    name: str, batch: Drawn, options: dict[str, Any], without: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, log-probs as a leaf, statistics)."""
    loss = find_policy_loss(name)
    log_probs = batch["log_probs"].clone().requires_grad_()
    columns = {
        "advantages": batch["advantages"],
        "loss_mask": batch.mask,
        "old_log_probs": batch["old_log_probs"],
        "prox_log_probs": batch["prox_log_probs"],
        "token_level_scores": batch["scores"],
        "selected_tokens": batch["selected"],
    }

    given_columns = {}
    for column in (*loss.reads, *loss.optional):
        if column not in without:
            given_columns[column] = columns[column]

    found: Any = loss.fn(log_probs=log_probs, **given_columns, **options)
    return found[0], log_probs, found[1]


def tokens_of(batch: Drawn, row: int, log_probs: Tensor) -> Tokens:
    return Tokens(
        now=log_probs[row][batch.mask[row] > 0],
        old=batch.of_tokens(row, "old_log_probs"),
        prox=batch.of_tokens(row, "prox_log_probs"),
        advantages=batch.of_tokens(row, "advantages"),
        selected=batch.of_tokens(row, "selected") > 0,
        score=math.fsum(batch.of_tokens(row, "scores").tolist()),
    )


def check_loss(
    name: str,
    batch: Drawn,
    options: dict[str, Any],
    found: tuple[Tensor, Tensor, dict[str, Tensor]],
) -> None:
    """The loss, its gradient and its statistics are the reference's. Outside the mask the gradient
    is 0, and the loss finite, so that it may be multiplied by the mask."""
    reference = find_reference(REFERENCES, name, "policy loss", "tests/references/policy_losses.py")
    loss, log_probs, stats = found
    assert loss.isfinite().all()
    assert not any(value.requires_grad for value in stats.values())
    weights = batch["is_weights"].where(batch.mask > 0, 0.0)
    weighted_sum(loss, weights).backward()
    assert log_probs.grad is not None
    assert not log_probs.grad[batch.mask == 0].any()
    leaf = batch["log_probs"].clone().requires_grad_()

    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        is_token = batch.mask[row] > 0
        if not is_token.any():
            continue

        wanted: Loss = reference(tokens_of(batch, row, leaf), **options)
        close(loss[row][is_token].detach(), wanted[0].detach())
        assert stats.keys() == wanted[1].keys()
        for statistic, value in wanted[1].items():
            close(stats[statistic][row][is_token], value.double())
        total = total + (wanted[0] * weights[row][is_token]).sum()

    if total.requires_grad:
        total.backward()
        assert leaf.grad is not None
        close(log_probs.grad, leaf.grad.where(batch.mask > 0, 0.0))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=60)
@given(data=st.data())
def test_a_loss_is_its_formula(name: str, data: Any) -> None:
    batch = data.draw(batches())
    strategies = OPTIONS.get(name, {})
    assert find_policy_loss(name).options.keys() == strategies.keys(), (
        f"OPTIONS in {__file__} has other options of '{name}' than the loss"
    )
    options = data.draw(choose(strategies))
    check_loss(name, batch, options, run(name, batch, options))


@pytest.mark.parametrize("rule", REJECTIONS[1:], ids=str)
@settings(max_examples=15)
@given(batch=batches())
def test_rejection_by_the_gap_to_the_sampling_policy(rule: dict[str, Any], batch: Drawn) -> None:
    options = {"rejection_sampling": rule, "behav_imp_weight_cap": 1.01}
    check_loss("decoupled", batch, options, run("decoupled", batch, options))


@pytest.mark.parametrize(
    "name", [name for name in POLICY_LOSSES if "old_log_probs" in find_policy_loss(name).optional]
)
@settings(max_examples=10)
@given(batch=batches())
def test_without_old_log_probs_the_old_policy_is_the_policy(name: str, batch: Drawn) -> None:
    found = run(name, batch, {}, without=("old_log_probs",))
    batch.columns["old_log_probs"] = batch["log_probs"]
    check_loss(name, batch, {}, found)


@settings(max_examples=10)
@given(batch=batches())
def test_topr_takes_a_score_for_each_sample_as_well(batch: Drawn) -> None:
    scores = batch["scores"].where(batch.mask > 0, 0.0).sum(dim=-1)
    with_one = Drawn(**{**vars(batch), "columns": {**batch.columns, "scores": scores}})
    check_loss("topr", batch, {}, run("topr", with_one, {}))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"uper": 2.0}, "'uper'.*'upper'"),
        ({"level": "batch"}, r"'token' \| 'sequence'"),
        ({"metric": "k3"}, "kl_k3"),
        ({"upper": "2"}, "'upper' .*'2', .* float"),
        ({"upper": True}, "'upper' .* true, .* float"),
        ({"upper": 2.0, "lower": 3.0}, "nothing would pass"),
        ({"lower": 0.0}, "above 0"),
        ({"metric": "kl_k2", "upper": -1.0}, "above 0"),
        ({"metric": "kl_k3", "action": "clamp"}, "needs action=mask"),
    ],
)
def test_a_rejection_without_sense_is_refused_before_the_start(
    rule: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_policy_loss("decoupled").call_options({"rejection_sampling": rule})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("decoupled", {"behav_imp_weight_mode": "drop"}),
        ("decoupled", {"rejection_sampling": {"upper": 2.0}, "behav_imp_weight_mode": "disabled"}),
        ("decoupled", {"clip_ratio_c": 0.5}),
        ("decoupled", {"rejection_sampling": {"upper": 0.5}}),
        ("sapo", {"tau_pos": 0.0}),
        ("cpgd", {"policy_drift_coeff": -0.1}),
        ("topr", {"ratio_level": "batch"}),
        ("vanilla", {"clip_ratio_c": 1.0}),
        ("dppo_tv", {"clip_ratio_c": 1.0}),
        ("dro", {"beta": -1.0}),
        ("kl_cov", {"ppo_kl_coef": -1.0}),
    ],
)
def test_options_without_sense_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        find_policy_loss(name).call_options(options)
