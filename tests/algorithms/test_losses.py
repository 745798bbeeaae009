"""Every policy loss, its gradient and its statistics against plain Python, with gradients worked
out by hand."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import (
    LOSS_AGG_MODES,
    loss_counts,
    token_weights,
    weighted_sum,
)
from distflow.algorithms.registry import find_policy_loss
from distflow.builtin_names import POLICY_LOSSES

# A reference maps one token (own log-prob, old, proximal, advantage) to (loss, d loss / d log-prob,
# statistics).
Token = Callable[..., tuple[float, float, dict[str, float]]]


def clamped(difference: float) -> tuple[float, float]:
    """The log-ratio within ±20, and its derivative."""
    return max(-20.0, min(20.0, difference)), float(-20.0 <= difference <= 20.0)


def ppo(
    lp: float, old: float, a: float, low: float, high: float, c: float | None
) -> tuple[float, float, dict]:
    d, slope = clamped(lp - old)
    r = math.exp(d)
    inside = min(max(r, 1 - low), 1 + high)
    if -a * inside > -a * r:
        loss = -a * inside
        grad = 0.0
        cut = 1.0
    else:
        loss = -a * r
        grad = -a * r * slope
        cut = 0.0
    stats = {"pg_clipfrac": cut, "ppo_kl": -d}
    if c is not None:
        stats["pg_clipfrac_lower"] = float(a < 0 and loss > -a * c)
        if stats["pg_clipfrac_lower"]:
            loss = -a * c
            grad = 0.0
    return loss, grad, stats


def vanilla(lp, old, prox, a, score, *, low=0.2, high=0.2, c=3.0):  # noqa: ANN001, ANN201
    return ppo(lp, old, a, low, high, c)


def decoupled(lp, old, prox, a, score, *, cap=5.0, mode="mask", c=3.0):  # noqa: ANN001, ANN201
    loss, grad, stats = ppo(lp, prox, a, 0.2, 0.2, c)
    d, _ = clamped(prox - old)
    weight = math.exp(d)
    over = cap is not None and weight > cap
    if over:
        weight = 0.0 if mode == "mask" else cap
    stats |= {"behave_kl": -d, "behave_imp_weight": weight, "behave_capped": float(over)}
    return loss * weight, grad * weight, stats


def cpgd(lp, old, prox, a, score, *, low=0.2, high=0.2, drift=0.0):  # noqa: ANN001, ANN201
    bound = (
        old + math.log(1 + high) if a > 0 else old + (math.log(1 - low) if low < 1 else -math.inf)
    )
    out = lp > bound if a > 0 else lp < bound
    d = clamped(lp - old)[0]
    stats = {"pg_clipfrac": float(out), "ppo_kl": -d}
    pull = drift * min(math.exp(d) - 1, 2.0)
    if drift:
        stats["policy_drift"] = math.exp(d) - 1 - d
    return -(bound if out else lp) * a + pull * lp, (0.0 if out else -a) + pull, stats


def gpg(lp, old, prox, a, score):  # noqa: ANN001, ANN201
    return -lp * a, -a, {}


def cispo(lp, old, prox, a, score, *, low=0.2, high=0.2, below=True):  # noqa: ANN001, ANN201
    d, _ = clamped(lp - old)
    r = math.exp(d)
    w = min(max(r, 1 - low) if below else r, 1 + high)
    return -w * a * lp, -w * a, {"pg_clipfrac": float(w != r), "ppo_kl": -d}


def topr(lp, old, prox, a, score):  # noqa: ANN001, ANN201
    d, _ = clamped(lp - old)
    r = math.exp(d)
    w = 1.0 if score > 0 else min(r, 1.0)
    return -w * a * lp, -w * a, {"pg_clipfrac": float(score <= 0 and r > 1), "ppo_kl": -d}


def sapo(lp, old, prox, a, score, *, pos=1.0, neg=1.05):  # noqa: ANN001, ANN201
    d, slope = clamped(lp - old)
    r = math.exp(d)
    tau = pos if a > 0 else neg
    s = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * s * a, -4 * s * (1 - s) * r * a * slope, {"ppo_kl": -d}


def dppo(lp, old, prox, a, score, *, kind, low=0.2, high=0.2, c=20.0):  # noqa: ANN001, ANN201
    p = min(math.exp(lp), 1.0)
    q = min(math.exp(old), 1.0)
    d = clamped(lp - old)[0]
    if kind == "tv":
        inside = p - q <= high if a > 0 else p - q >= -low
    else:
        # log(1 − p) with the 1e-8 that keeps it finite at p = 1
        kl = q * -d + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        inside = (p <= q or kl <= high) if a > 0 else (p >= q or kl <= low)
    r = math.exp(d)
    w = (r if c is None else min(r, c)) if inside else 0.0
    stats = {"pg_clipfrac": float(not inside), "ppo_kl": -d}
    if c is not None:
        stats["pg_clipfrac_lower"] = float(inside and r > c)
    return -w * a * lp, -w * a, stats


def dro(lp, old, prox, a, score, *, beta=0.1):  # noqa: ANN001, ANN201
    d = lp - old
    return -lp * a + beta / 2 * d * d, -a + beta * d, {"ppo_kl": -d}


def clip_cov(lp, old, prox, a, score, chosen, *, low=0.2, high=0.2):  # noqa: ANN001, ANN201
    loss, grad, stats = ppo(lp, old, a, low, high, None)
    stats["cov_selected"] = float(chosen)
    return (0.0, 0.0, stats) if chosen else (loss, grad, stats)


def kl_cov(lp, old, prox, a, score, chosen, *, coef=1.0):  # noqa: ANN001, ANN201
    d, slope = clamped(lp - old)
    r = math.exp(d)
    weight = coef if chosen else 0.0
    loss = -r * a + weight * abs(d)
    grad = (-r * a + weight * math.copysign(1.0, d)) * slope
    return loss, grad, {"cov_selected": float(chosen), "ppo_kl": -d}


SELECTING = ("clip_cov", "kl_cov")

PER_TOKEN: list[tuple[str, Token, dict[str, Any], dict[str, Any]]] = [
    ("vanilla", vanilla, {}, {}),
    (
        "vanilla",
        vanilla,
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
        {"low": 0.1, "high": 0.1},
    ),
    ("vanilla", vanilla, {"clip_ratio_high": 0.28}, {"high": 0.28}),
    ("vanilla", vanilla, {"clip_ratio_low": 0.5, "clip_ratio_c": 1.4}, {"low": 0.5, "c": 1.4}),
    ("vanilla", vanilla, {"clip_ratio_c": None}, {"c": None}),
    ("decoupled", decoupled, {}, {}),
    (
        "decoupled",
        decoupled,
        {"behav_imp_weight_cap": 1.2, "clip_ratio_c": None},
        {"cap": 1.2, "c": None},
    ),
    (
        "decoupled",
        decoupled,
        {"behav_imp_weight_cap": 1.2, "behav_imp_weight_mode": "clamp"},
        {"cap": 1.2, "mode": "clamp"},
    ),
    ("decoupled", decoupled, {"behav_imp_weight_cap": None}, {"cap": None}),
    ("cpgd", cpgd, {}, {}),
    ("cpgd", cpgd, {"clip_ratio_low": 1.0, "clip_ratio_high": 0.05}, {"low": 1.0, "high": 0.05}),
    ("cpgd", cpgd, {"policy_drift_coeff": 0.3}, {"drift": 0.3}),
    ("dppo_tv", dppo, {}, {"kind": "tv"}),
    (
        "dppo_tv",
        dppo,
        {"clip_ratio_low": 0.02, "clip_ratio_c": 1.5},
        {"kind": "tv", "low": 0.02, "c": 1.5},
    ),
    ("dppo_kl", dppo, {}, {"kind": "kl"}),
    (
        "dppo_kl",
        dppo,
        {"clip_ratio_low": 0.01, "clip_ratio_c": None},
        {"kind": "kl", "low": 0.01, "c": None},
    ),
    ("dro", dro, {}, {}),
    ("dro", dro, {"beta": 2.0}, {"beta": 2.0}),
    ("clip_cov", clip_cov, {}, {}),
    (
        "clip_cov",
        clip_cov,
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4},
        {"low": 0.1, "high": 0.4},
    ),
    ("kl_cov", kl_cov, {}, {}),
    ("kl_cov", kl_cov, {"ppo_kl_coef": 0.25}, {"coef": 0.25}),
    ("gpg", gpg, {}, {}),
    ("cispo", cispo, {}, {}),
    ("cispo", cispo, {"clip_below": False, "clip_ratio_high": 0.4}, {"below": False, "high": 0.4}),
    ("topr", topr, {}, {}),
    ("sapo", sapo, {}, {}),
    ("sapo", sapo, {"tau_pos": 0.5, "tau_neg": 3.0}, {"pos": 0.5, "neg": 3.0}),
]


def run(name: str, case: Any, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, log-probs as a leaf, statistics)."""
    log_probs = case["log_probs"].clone().requires_grad_()
    columns = {
        "advantages": case["advantages"],
        "loss_mask": case.mask,
        "old_log_probs": case["old_log_probs"],
        "prox_log_probs": case["prox_log_probs"],
        "token_level_scores": case["scores"],
        "selected_tokens": case["selected"],
    }
    takes = inspect.signature(find_policy_loss(name).fn).parameters
    given = {k: v for k, v in columns.items() if k in takes}
    loss, stats = find_policy_loss(name).fn(log_probs=log_probs, **given, **options)
    return loss, log_probs, stats


def random_weights(case: Any) -> Tensor:
    noise = torch.rand(
        case.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return noise * case.mask


@pytest.mark.parametrize("spread", [0.1, 1.0, 15.0])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "reference", "options", "wanted_options"), PER_TOKEN)
def test_losses_of_single_tokens(
    case: Any,
    seed: int,
    spread: float,
    name: str,
    reference: Token,
    options: dict,
    wanted_options: dict,
) -> None:
    batch = case(seed, spread=spread)
    loss, log_probs, stats = run(name, batch, **options)
    weights = random_weights(batch)
    weighted_sum(loss, weights).backward()
    columns = [
        batch.rows(n)
        for n in ("log_probs", "old_log_probs", "prox_log_probs", "advantages", "scores")
    ]
    for i, keep in enumerate(batch.mask.tolist()):
        score = sum(s for s, m in zip(columns[4][i], keep, strict=True) if m)
        for t, m in enumerate(keep):
            if not m:
                assert log_probs.grad[i, t] == 0.0
                continue
            token = [columns[k][i][t] for k in range(4)]
            chosen = [batch.rows("selected")[i][t] > 0] if name in SELECTING else []
            wanted, grad, wanted_stats = reference(*token, score, *chosen, **wanted_options)
            assert float(loss.detach()[i, t]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
            assert float(log_probs.grad[i, t]) == pytest.approx(
                grad * float(weights[i, t]), rel=1e-9, abs=1e-12
            )
            assert {n: float(v[i, t]) for n, v in stats.items()} == pytest.approx(
                wanted_stats, rel=1e-9, abs=1e-12
            )


@pytest.mark.parametrize("spread", [0.2, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_gspo(case: Any, seed: int, spread: float) -> None:
    batch = case(seed, spread=spread)
    loss, log_probs, stats = run("gspo", batch, clip_ratio_high=0.3)
    weights = random_weights(batch)
    weighted_sum(loss, weights).backward()
    lp, old, a = (batch.rows(n) for n in ("log_probs", "old_log_probs", "advantages"))
    for i, keep in enumerate(batch.mask.tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        mean = sum(lp[i][t] - old[i][t] for t in tokens) / max(len(tokens), 1)
        for t in tokens:
            s = math.exp(min(mean, 10.0))
            plain = -a[i][t] * s
            clip = -a[i][t] * min(max(s, 0.8), 1.3)
            grad = 0.0 if clip > plain or mean > 10.0 else plain
            assert float(loss.detach()[i, t]) == pytest.approx(max(plain, clip), rel=1e-9)
            assert float(log_probs.grad[i, t]) == pytest.approx(
                grad * float(weights[i, t]), rel=1e-9, abs=1e-12
            )
            assert float(stats["pg_clipfrac"][i, t]) == float(clip > plain)
            assert float(stats["ppo_kl"][i, t]) == pytest.approx(old[i][t] - lp[i][t])
        assert all(log_probs.grad[i, t] == 0 for t in range(len(keep)) if t not in tokens)


@pytest.mark.parametrize("spread", [0.2, 4.0, 15.0])
@pytest.mark.parametrize("seed", range(6))
def test_gmpo(case: Any, seed: int, spread: float) -> None:
    batch = case(seed, spread=spread)
    loss, log_probs, stats = run("gmpo", batch, clip_ratio_low=0.3, clip_ratio_high=0.4)
    weights = random_weights(batch)
    weighted_sum(loss, weights).backward()
    lp, old, a = (batch.rows(n) for n in ("log_probs", "old_log_probs", "advantages"))
    for i, keep in enumerate(batch.mask.tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        n = len(tokens)
        parts = {}
        for t in tokens:
            d = lp[i][t] - old[i][t]
            value = min(d, 0.4) if a[i][t] > 0 else max(d, -0.3)
            parts[t] = (value, float(value == d))
        if not tokens:
            assert torch.equal(log_probs.grad[i], torch.zeros_like(log_probs.grad[i]))
            continue
        ratio = math.exp(sum(value for value, _ in parts.values()) / n)
        wanted = -sum(a[i][t] for t in tokens) / n * ratio
        row_weight = float(weights[i].sum())
        for t in tokens:
            assert float(loss.detach()[i, t]) == pytest.approx(wanted, rel=1e-9)
            grad = row_weight * wanted * parts[t][1] / n
            assert float(log_probs.grad[i, t]) == pytest.approx(grad, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("spread", [0.2, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_topr_by_the_ratio_of_the_whole_sequence(case: Any, seed: int, spread: float) -> None:
    """Eq. 8 of the paper."""
    batch = case(seed, spread=spread)
    loss, log_probs, _ = run("topr", batch, ratio_level="sequence")
    weights = random_weights(batch)
    weighted_sum(loss, weights).backward()
    lp, old, a, scores = (
        batch.rows(n) for n in ("log_probs", "old_log_probs", "advantages", "scores")
    )
    for i, keep in enumerate(batch.mask.tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        good = sum(scores[i][t] for t in tokens) > 0
        ratio = math.exp(clamped(sum(lp[i][t] - old[i][t] for t in tokens))[0])
        w = 1.0 if good else min(ratio, 1.0)
        for t in tokens:
            assert float(loss.detach()[i, t]) == pytest.approx(-w * a[i][t] * lp[i][t], rel=1e-9)
            assert float(log_probs.grad[i, t]) == pytest.approx(
                -w * a[i][t] * float(weights[i, t]), rel=1e-9
            )


def behaviour(d: dict[int, float], rule: dict[str, Any]) -> dict[int, tuple[float, bool]]:
    """(weight, outside) of each token of one sequence by AReaL's rejection sampling; d: prox − old
    by token."""
    metric = rule.get("metric", "ratio")
    upper = rule.get("upper", 5.0)
    lower = rule.get("lower")
    measures: dict[str, Callable[[float], float]] = {
        "ratio": lambda x: x,
        "kl_k1": lambda x: x,
        "kl_k2": lambda x: x * x / 2,
        "kl_k3": lambda x: math.exp(clamped(-x)[0]) - 1 + x,
    }
    measured = {t: measures[metric](x) for t, x in d.items()}
    weight = {t: math.exp(clamped(x)[0]) for t, x in d.items()}
    if rule.get("level") == "sequence":
        total = {"sum": sum, "max": max, "mean": lambda xs: sum(xs) / len(xs)}[
            rule.get("agg", "mean")
        ](list(measured.values()))
        measured = dict.fromkeys(d, total)
        if metric == "ratio":
            weight = dict.fromkeys(d, math.exp(clamped(sum(d.values()) / len(d))[0]))
    out = {}
    for t, x in measured.items():
        x = math.exp(clamped(x)[0]) if metric == "ratio" else x
        outside = x > upper or (lower is not None and x < lower)
        inside = min(max(weight[t], lower or 0.0), upper) if rule.get("action") == "clamp" else 0.0
        out[t] = (inside if outside else weight[t], outside)
    return out


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"lower": 0.5, "upper": 2.0},
        {"lower": 0.5, "upper": 1.2, "action": "clamp"},
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
    ],
    ids=str,
)
def test_rejection_sampling_of_the_decoupled_loss(
    case: Any, rule: dict[str, Any], spread: float
) -> None:
    batch = case(3, spread=spread)
    loss, log_probs, stats = run(
        "decoupled", batch, rejection_sampling=rule, behav_imp_weight_cap=1.01
    )
    weights = random_weights(batch)
    weighted_sum(loss, weights).backward()
    names = ("log_probs", "old_log_probs", "prox_log_probs", "advantages")
    lp, old, prox, a = (batch.rows(n) for n in names)
    seen = set()
    for i, keep in enumerate(batch.mask.tolist()):
        tokens = [t for t, m in enumerate(keep) if m]
        for t, (w, outside) in (
            behaviour({t: prox[i][t] - old[i][t] for t in tokens}, rule).items() if tokens else ()
        ):
            plain, grad, _ = ppo(lp[i][t], prox[i][t], a[i][t], 0.2, 0.2, 3.0)
            assert float(loss.detach()[i, t]) == pytest.approx(w * plain, rel=1e-9, abs=1e-12)
            assert float(log_probs.grad[i, t]) == pytest.approx(
                w * grad * float(weights[i, t]), rel=1e-9, abs=1e-12
            )
            assert float(stats["behave_imp_weight"][i, t]) == pytest.approx(w, rel=1e-9)
            assert float(stats["behave_capped"][i, t]) == float(outside)
            seen.add(outside)
    assert True in seen or spread < 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"uper": 2.0}, "did you mean 'upper'"),
        ({"level": "batch"}, r"'token' \| 'sequence'"),
        ({"metric": "k3"}, "kl_k3"),
        ({"upper": "2"}, "not of type float; write it without quotes"),
        ({"upper": True}, "not of type float; write a number"),
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


class TestDualClipByHand:
    """A < 0 and a ratio far above 1: the loss stops at −c·A; r = 5, A = −2, c = 3."""

    ratio_five = torch.tensor([[math.log(5.0)]], dtype=torch.float64)

    def loss(self, advantage: float, **options: Any) -> tuple[float, float, dict[str, float]]:
        log_probs = self.ratio_five.clone().requires_grad_()
        loss, stats = find_policy_loss("vanilla").fn(
            log_probs,
            torch.full((1, 1), advantage, dtype=torch.float64),
            torch.ones(1, 1),
            torch.zeros(1, 1),
            **options,
        )
        loss.sum().backward()
        return (
            float(loss.detach()),
            float(log_probs.grad),
            {name: float(value) for name, value in stats.items()},
        )

    def test_on(self) -> None:
        loss, grad, stats = self.loss(-2.0)
        assert (loss, grad) == (6.0, 0.0)
        assert (stats["pg_clipfrac"], stats["pg_clipfrac_lower"]) == (0.0, 1.0)

    def test_off(self) -> None:
        loss, grad, stats = self.loss(-2.0, clip_ratio_c=None)
        assert (loss, grad) == (pytest.approx(10.0), pytest.approx(10.0))
        assert "pg_clipfrac_lower" not in stats

    def test_positive_advantages_are_clipped_above(self) -> None:
        loss, grad, stats = self.loss(2.0)
        assert (loss, grad) == (pytest.approx(-2.4), 0.0)
        assert (stats["pg_clipfrac"], stats["pg_clipfrac_lower"]) == (1.0, 0.0)

    def test_clip_higher(self) -> None:
        assert self.loss(2.0, clip_ratio_high=0.28)[0] == pytest.approx(-2.56)


@pytest.mark.parametrize(
    "name", [n for n in POLICY_LOSSES if "old_log_probs" in find_policy_loss(n).optional]
)
def test_without_old_log_probs_the_ratio_is_taken_against_the_detached_log_prob(
    case: Any, name: str
) -> None:
    batch = case(0)
    with_own = case(0)
    with_own.columns["old_log_probs"] = batch["log_probs"]
    takes = inspect.signature(find_policy_loss(name).fn).parameters
    columns = {
        "advantages": batch["advantages"],
        "loss_mask": batch.mask,
        "token_level_scores": batch["scores"],
    }
    columns["selected_tokens"] = batch["selected"]
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, stats = find_policy_loss(name).fn(
        log_probs=log_probs, **{k: v for k, v in columns.items() if k in takes}
    )
    weighted_sum(loss, batch.mask).backward()
    wanted, leaf, wanted_stats = run(name, with_own)
    weighted_sum(wanted, batch.mask).backward()
    assert torch.equal(loss, wanted)
    assert torch.equal(log_probs.grad, leaf.grad)
    assert log_probs.grad.abs().sum() > 0
    assert all(torch.equal(stats[n], wanted_stats[n]) for n in stats)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_what_stands_outside_the_mask_changes_no_bit(case: Any, name: str, mode: str) -> None:
    poisoned = case(5)
    clean = case(5)
    clean.columns = {
        n: torch.where(clean.mask > 0, c, torch.zeros_like(c)) for n, c in clean.columns.items()
    }
    results = []
    for batch in (poisoned, clean):
        loss, log_probs, _ = run(name, batch)
        weights = token_weights(batch.mask, mode, loss_counts(batch.mask), scale=7.0)
        total = weighted_sum(loss, weights)
        total.backward()
        results.append((total, log_probs.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0].isfinite()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_whole_batch_masked_gives_zero_with_zero_gradient(case: Any, name: str) -> None:
    batch = case(2)
    batch.mask = torch.zeros_like(batch.mask)
    batch.columns = {n: torch.full_like(c, float("nan")) for n, c in batch.columns.items()}
    loss, log_probs, stats = run(name, batch)
    total = weighted_sum(loss, token_weights(batch.mask, "token-mean", loss_counts(batch.mask)))
    total.backward()
    assert total == 0.0
    assert torch.equal(log_probs.grad, torch.zeros_like(batch.mask))
    assert all(not value.isnan().any() for value in stats.values())


def test_a_score_a_sample_serves_topr_as_well_as_one_a_token(case: Any) -> None:
    batch = case(4)
    per_token, _, _ = run("topr", batch)
    batch.columns["scores"] = torch.where(batch.mask > 0, batch["scores"], 0.0).sum(-1)
    per_sample, _, _ = run("topr", batch)
    assert torch.equal(per_token, per_sample)


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
