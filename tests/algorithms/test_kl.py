"""KL estimators, the penalty in the reward, and the controllers of its coefficient."""

import math
from typing import Any

import pytest
import torch

from distflow.algorithms.kl import adapted_coefficient, apply_kl_penalty, check_kl_type, kl_estimate


def reference(lp: float, ref: float, kind: str) -> tuple[float, float]:
    """(value, derivative by lp) in plain Python."""
    d = lp - ref
    if kind == "kl":
        return d, 1.0
    if kind == "abs":
        return abs(d), math.copysign(1.0, d)
    if kind == "mse":
        return d * d / 2, d
    x = max(-20.0, min(20.0, -d))
    value = math.exp(x) - x - 1
    return min(value, 10.0), 0.0 if value > 10.0 or abs(d) > 20.0 else 1 - math.exp(x)


@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(
    ("kind", "name"), [("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3")]
)
def test_estimators_and_their_gradients(kind: str, name: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    lp = (torch.randn(50, dtype=torch.float64, generator=generator) * spread).requires_grad_()
    ref = torch.randn(50, dtype=torch.float64, generator=generator)
    estimate = kl_estimate(lp, ref, kind)
    estimate.sum().backward()
    pairs = [reference(a, b, kind) for a, b in zip(lp.tolist(), ref.tolist(), strict=True)]
    assert estimate.tolist() == pytest.approx([value for value, _ in pairs], rel=1e-12)
    assert lp.grad.tolist() == pytest.approx([slope for _, slope in pairs], rel=1e-9)
    assert torch.equal(kl_estimate(lp, ref, name), estimate)


@pytest.mark.parametrize("kind", ["kl+", "abs+", "mse+", "low_var_kl+", "k3+"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str) -> None:
    lp = torch.randn(
        20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    ref = torch.zeros(20, dtype=torch.float64)
    estimate = kl_estimate(lp, ref, kind)
    torch.testing.assert_close(estimate, kl_estimate(lp, ref, kind[:-1]))
    estimate.sum().backward()
    torch.testing.assert_close(lp.grad, lp.detach())


def test_k1_and_k3_estimate_the_kl() -> None:
    """Their expectation under the policy, taken over a whole vocabulary, is the KL itself."""
    generator = torch.Generator().manual_seed(2)
    p, q = (
        torch.log_softmax(0.3 * torch.randn(3, 11, dtype=torch.float64, generator=generator), -1)
        for _ in range(2)
    )
    exact = torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=each) for each in (p, q))
    )
    assert (exact > 0).all()
    for kind in ("kl", "low_var_kl"):
        torch.testing.assert_close((p.exp() * kl_estimate(p, q, kind)).sum(-1), exact)


@pytest.mark.parametrize("kind", ["k4", "low_var", "full+", ""])
def test_unknown_estimators_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind)
    with pytest.raises(
        ValueError, match="whole distributions .* low_var_kl is an unbiased estimate"
    ):
        check_kl_type("full")


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
@pytest.mark.parametrize("seed", range(4))
def test_the_penalty_in_the_reward(case: Any, seed: int, kind: str) -> None:
    batch = case(seed)
    rewards, mean = apply_kl_penalty(
        batch["scores"],
        batch["old_log_probs"],
        batch["ref_log_prob"],
        batch.mask,
        batch.valid,
        kl_coef=0.3,
        kl_penalty=kind,
    )
    seen = []
    for i, keep in enumerate(batch.mask.tolist()):
        for t, m in enumerate(keep):
            if not m:
                assert rewards[i, t] == 0.0
                continue
            value, _ = reference(
                float(batch["old_log_probs"][i, t]), float(batch["ref_log_prob"][i, t]), kind
            )
            assert float(rewards[i, t]) == pytest.approx(
                float(batch["scores"][i, t]) - 0.3 * value, rel=1e-6, abs=1e-6
            )
            if batch.valid[i]:
                seen.append(value)
    assert mean == pytest.approx(sum(seen) / len(seen))


@pytest.mark.parametrize("with_verdicts", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_mean_that_the_controller_is_shown(case: Any, seed: int, with_verdicts: bool) -> None:
    """Over tokens, or over the sequences' means, where the row without a token counts as 0."""
    batch = case(seed)
    valid = batch.valid if with_verdicts else torch.ones_like(batch.valid)
    sequences = []
    for i, keep in enumerate(batch.mask.tolist()):
        pairs = [
            (float(batch["old_log_probs"][i, t]), float(batch["ref_log_prob"][i, t]))
            for t in range(len(keep))
        ]
        kl = [reference(*pair, "mse")[0] for pair, m in zip(pairs, keep, strict=True) if m]
        if valid[i]:
            sequences.append(kl)
    tokens = [value for kl in sequences for value in kl]
    wanted = {
        "token": sum(tokens) / len(tokens),
        "sequence": sum(sum(kl) / len(kl) if kl else 0.0 for kl in sequences) / len(sequences),
    }
    for mean, value in wanted.items():
        _, shown = apply_kl_penalty(
            batch["scores"],
            batch["old_log_probs"],
            batch["ref_log_prob"],
            batch.mask,
            batch.valid if with_verdicts else None,
            kl_coef=0.3,
            kl_penalty="mse",
            mean=mean,
        )
        assert shown == pytest.approx(value, rel=1e-12)
    assert wanted["token"] != pytest.approx(wanted["sequence"], rel=1e-3)


class TestAdaptiveByHand:
    """value ·= 1 + clip(kl / target − 1, ±.2) · n / horizon."""

    def test_figures(self) -> None:
        # error .1: · (1 + .1·.1)
        value = adapted_coefficient(0.1, 6.6, 100, target_kl=6.0, horizon=1000)
        assert value == pytest.approx(0.101)
        # error 9, clipped to .2: · 1.02
        value = adapted_coefficient(value, 60.0, 100, target_kl=6.0, horizon=1000)
        assert value == pytest.approx(0.10302)
        # error −1, clipped to −.2: · .9
        value = adapted_coefficient(value, 0.0, 500, target_kl=6.0, horizon=1000)
        assert value == pytest.approx(0.092718)

    def test_never_below_zero(self) -> None:
        assert adapted_coefficient(0.1, 0.0, 100, target_kl=1.0, horizon=10) == 0.0

    def test_a_kl_that_is_not_finite_moves_nothing(self) -> None:
        for kl in (math.nan, math.inf):
            assert adapted_coefficient(0.1, kl, 5, target_kl=1.0, horizon=10) == 0.1
