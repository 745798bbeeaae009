"""Proximal log-probs by version, by hand and by loops, alone and within the objective."""

import math
from typing import Any

import pytest
import torch

from distflow.algorithms.objectives import PolicyObjective
from distflow.algorithms.rollout_correction import Correction, interpolate, proximal_position
from distflow.data.batch import Batch
from tests.algorithms.toy_policy import gradient, outputs, random_split, toy_batch, toy_weights

STEP = 5


def test_where_the_proximal_policy_lies_by_hand() -> None:
    """Version 5 is trained to version 6; tokens of versions 5 to 2, one that no policy made, one
    from the future."""
    position = proximal_position(torch.tensor([[5, 4, 3, 2, -1, 6]]), STEP)
    torch.testing.assert_close(position, torch.tensor([[0.0, 1 / 2, 2 / 3, 3 / 4, 0.0, 0.0]]))


def test_interpolation_by_hand() -> None:
    now = torch.tensor([-1.0, -1.0, -4.0], requires_grad=True)
    found = interpolate(now, torch.tensor([-3.0, -3.0, -1.0]), torch.tensor([0.0, 0.5, 2 / 3]))
    torch.testing.assert_close(found, torch.tensor([-3.0, -2.0, -3.0]))
    assert not found.requires_grad


def stale_batch() -> Batch:
    """Tokens of versions 2 to 5; the old log-probs are the rollout's."""
    batch = toy_batch(seed=8, bs=11)
    made = batch.flat("response_mask") > 0
    versions = torch.randint(
        STEP - 3, STEP + 1, made.shape, generator=torch.Generator().manual_seed(1)
    )
    versions = torch.where(made, versions, torch.full_like(versions, -1))
    batch["versions"] = versions
    batch["old_log_probs"] = batch.flat("rollout_log_probs")
    batch["prox_alpha"] = torch.where(made, proximal_position(versions, STEP), torch.nan)
    return batch


def reference(batch: Batch, correction: Correction | None) -> tuple[float, torch.Tensor]:
    """(decoupled loss, token-mean; its gradient by the toy policy's weights), token by token in
    float64.

    By the seed: max(−rA, −clip(r)A), r = exp(now − prox), times exp(prox − old), which is 0 above
    the cap of 5; the denominator counts every token of the mask.
    """
    weights = toy_weights()
    now_rows = outputs(weights, batch)["log_probs"]
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for row, keep in enumerate(batch["loss_mask"].tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        old = {t: float(batch["rollout_log_probs"][row, t]) for t in tokens}
        prox = {}
        for t in tokens:
            version = int(batch["versions"][row, t])
            now = float(now_rows[row, t].detach())
            share = (STEP - version) / (STEP + 1 - version)
            prox[t] = (1 - share) * old[t] + share * now
        gaps = {t: prox[t] - old[t] for t in tokens}
        for t in tokens:
            ratio = (now_rows[row, t] - prox[t]).exp()
            advantage = float(batch["advantages"][row, t])
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if advantage < 0:
                loss = loss.clamp(max=-advantage * 3.0)
            total = total + loss * weight_of(gaps, t, correction)
            count += 1
    (total / count).backward()
    assert weights.grad is not None
    return float(total.detach() / count), weights.grad


def weight_of(gaps: dict[int, float], token: int, correction: Correction | None) -> float:
    if correction is None:
        weight = math.exp(gaps[token])
        return weight if weight <= 5.0 else 0.0
    total = sum(gaps.values())
    exponents = {"token": gaps[token], "sequence": total, "geometric": total / len(gaps)}
    weight = math.exp(exponents[correction.rollout_is])
    threshold = correction.rollout_is_threshold
    if not isinstance(threshold, tuple):
        return min(weight, threshold)
    return weight if threshold[0] <= weight <= threshold[1] else 0.0


CORRECTIONS: list[Any] = [None]
CORRECTIONS += [Correction(level, 1.1) for level in ("token", "sequence", "geometric")]
CORRECTIONS += [Correction(level, (0.7, 1.2)) for level in ("token", "sequence", "geometric")]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_loss_and_gradient_of_stale_tokens_against_a_loop(correction: Correction | None) -> None:
    batch = stale_batch()
    options = {"behav_imp_weight_mode": "disabled"} if correction else {}
    objective = PolicyObjective("decoupled", options, interpolates=True, correction=correction)
    counts = objective.counts(batch)
    wanted_loss, wanted = reference(batch, correction)
    assert wanted.abs().max() > 1e-3
    for parts in ([batch], random_split(batch, seed=2)):
        found, sums = gradient(objective, parts, counts)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
        assert sums["loss"] == pytest.approx(wanted_loss, rel=1e-6)


def test_a_correction_is_measured_and_weighs_once() -> None:
    batch = stale_batch()
    correction = Correction("token", (0.7, 1.2))
    objective = PolicyObjective(
        "decoupled", {"behav_imp_weight_mode": "disabled"}, interpolates=True, correction=correction
    )
    counts = objective.counts(batch)
    _, sums = gradient(objective, [batch], counts)
    metrics = objective.finish(sums, counts)
    assert "behave_imp_weight" not in metrics and 0 < metrics["rollout_is_corrected"] < 1
    assert 0 < metrics["rollout_is_weight"] < 1.2


def test_of_the_newest_tokens_the_proximal_policy_is_the_old_one() -> None:
    batch = stale_batch()
    batch["prox_alpha"] = torch.zeros_like(batch.flat("prox_alpha"))
    batch["prox_log_probs"] = batch.flat("rollout_log_probs")
    found = [
        PolicyObjective("decoupled", interpolates=interpolates) for interpolates in (True, False)
    ]
    grads = [gradient(objective, [batch], objective.counts(batch))[0] for objective in found]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_it_reads_what_it_interpolates_from() -> None:
    reads = PolicyObjective("decoupled", interpolates=True).reads
    assert {"old_log_probs", "prox_alpha"} <= set(reads) and "prox_log_probs" not in reads
    assert (
        "rollout_log_probs"
        in PolicyObjective("decoupled", interpolates=True, correction=Correction("token")).reads
    )
