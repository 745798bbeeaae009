"""The losses of the Tinker API, each against its formula in float64, token by token; gradients
against finite differences of the formula."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from distflow.tinker.losses import LOSSES

LOW, HIGH, BETA = 0.8, 1.2, 0.05
STEP = 1e-6
Row = dict[str, np.ndarray]


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def reference(
    loss: str, log_probs: np.ndarray, held: np.ndarray, row: Row, low: float, high: float
) -> float:
    """The sum over tokens. held: the log-probs where the formula stops the gradient."""
    total = 0.0
    counted = row["sequence_ratio_mask"] != 0
    mean = float(np.mean((held - row["logprobs"])[counted]))
    for token, log_prob in enumerate(log_probs):
        old = row["logprobs"][token]
        advantage = row["advantages"][token]
        ratio = math.exp(log_prob - old)
        if loss == "cross_entropy":
            total -= log_prob * row["weights"][token]
        elif loss == "importance_sampling":
            total -= ratio * advantage
        elif loss == "ppo":
            total -= min(ratio * advantage, clip(ratio, low, high) * advantage)
        elif loss == "cispo":
            total -= clip(math.exp(held[token] - old), low, high) * log_prob * advantage
        elif loss == "dro":
            total -= log_prob * advantage - 0.5 * BETA * (log_prob - old) ** 2
        else:
            ratio = math.exp(mean + log_prob - held[token])
            total -= min(ratio * advantage, clip(ratio, low, high) * advantage)
    return total


def gradient_by_differences(value: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    found = np.zeros(len(at))
    for token in range(len(at)):
        moved = np.zeros(len(at))
        moved[token] = STEP
        found[token] = (value(at + moved) - value(at - moved)) / (2 * STEP)
    return found


def random_row(seed: int, length: int) -> tuple[np.ndarray, Row]:
    """Log-probs, and inputs of every loss: ratios on either side of both bounds, advantages of
    either sign and 0, masks of 0 and 1."""
    rng = np.random.default_rng(seed)
    log_probs = -rng.exponential(2.0, length)
    mask = (rng.random(length) < 0.6).astype(float)
    mask[rng.integers(length)] = 1.0
    advantages = rng.normal(0.0, 2.0, length) * (rng.random(length) < 0.9)
    row = {
        "weights": rng.normal(0.0, 1.0, length) * mask,
        "logprobs": log_probs + rng.normal(0.0, rng.choice([0.1, 0.5, 2.0]), length),
        "advantages": advantages,
        "sequence_ratio_mask": mask,
    }
    return log_probs, row


def computed(
    loss: str, log_probs: np.ndarray, row: Row, **changes: float
) -> tuple[float, np.ndarray]:
    """The value and its gradient by the log-probs."""
    own = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    known = LOSSES[loss]
    inputs = {name: torch.tensor(row[name], dtype=torch.float64) for name in known.inputs}
    value = known.compute(own, inputs, {**known.settings, **changes})
    value.backward()
    assert own.grad is not None
    return float(value.detach()), own.grad.numpy()


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("length", [1, 2, 13])
def test_value_and_gradient_are_those_of_the_formula(loss: str, length: int) -> None:
    for seed in range(30):
        log_probs, row = random_row(seed, length)
        value, gradient = computed(loss, log_probs, row)
        expected = reference(loss, log_probs, log_probs, row, LOW, HIGH)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)

        def of_moved(moved: np.ndarray, at: np.ndarray = log_probs, row: Row = row) -> float:
            return reference(loss, moved, at, row, LOW, HIGH)

        differences = gradient_by_differences(of_moved, log_probs)
        scale = max(1.0, float(np.abs(differences).max()))
        np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-7 * scale)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_bounds_are_the_clients(loss: str) -> None:
    log_probs, row = random_row(3, 9)
    value, _ = computed(loss, log_probs, row, clip_low_threshold=0.95, clip_high_threshold=1.01)
    expected = reference(loss, log_probs, log_probs, row, 0.95, 1.01)
    assert value == pytest.approx(expected, rel=1e-9)
    assert value != pytest.approx(reference(loss, log_probs, log_probs, row, LOW, HIGH), rel=1e-3)


def test_ppo_has_no_gradient_where_the_bound_holds_the_policy_back() -> None:
    """Ratios 2, 2, 1/2, 1/2 with advantages 1, -1, 1, -1."""
    log_probs = np.full(4, -3.0)
    ratios = np.array([2.0, 2.0, 0.5, 0.5])
    advantages = np.array([1.0, -1.0, 1.0, -1.0])
    row = {"logprobs": log_probs - np.log(ratios), "advantages": advantages}
    value, gradient = computed("ppo", log_probs, row)
    assert value == pytest.approx(-(1.2 - 2.0 + 0.5 - 0.8))
    np.testing.assert_allclose(gradient, [0.0, 2.0, -0.5, 0.0], atol=1e-12)


def test_cispo_has_gradient_beyond_the_bounds() -> None:
    log_probs = np.full(2, -3.0)
    row = {"logprobs": log_probs - np.log([2.0, 0.5]), "advantages": np.array([1.0, 1.0])}
    _, gradient = computed("cispo", log_probs, row)
    np.testing.assert_allclose(gradient, [-1.2, -0.8], atol=1e-12)


def test_dro_pulls_by_the_clients_beta() -> None:
    log_probs = np.array([-1.0, -2.0])
    row = {"logprobs": np.array([-1.5, -1.0]), "advantages": np.zeros(2)}
    value, gradient = computed("dro", log_probs, row, beta=0.4)
    assert value == pytest.approx(0.5 * 0.4 * (0.25 + 1.0))
    np.testing.assert_allclose(gradient, [0.4 * 0.5, -0.4 * 1.0], atol=1e-12)


def test_gspo_averages_over_marked_tokens_alone() -> None:
    """Log ratios 0.1 and 9: the second does not count, and still has the sequence's gradient."""
    log_probs = np.array([-1.0, -2.0])
    row = {
        "logprobs": log_probs - np.array([0.1, 9.0]),
        "advantages": np.array([1.0, 3.0]),
        "sequence_ratio_mask": np.array([1.0, 0.0]),
    }
    value, gradient = computed("gspo", log_probs, row)
    assert value == pytest.approx(-math.exp(0.1) * 4.0)
    np.testing.assert_allclose(gradient, [-math.exp(0.1), -3 * math.exp(0.1)], rtol=1e-12)


def test_gspo_without_a_marked_token_is_refused() -> None:
    log_probs, row = random_row(0, 3)
    row["sequence_ratio_mask"] = np.zeros(3)
    with pytest.raises(ValueError, match="sequence_ratio_mask"):
        computed("gspo", log_probs, row)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_no_input_may_be_missing(loss: str) -> None:
    log_probs, row = random_row(0, 3)
    for name in LOSSES[loss].inputs:
        rest = {key: torch.tensor(value) for key, value in row.items() if key != name}
        with pytest.raises(KeyError, match=name):
            LOSSES[loss].compute(torch.tensor(log_probs), rest, LOSSES[loss].settings)
