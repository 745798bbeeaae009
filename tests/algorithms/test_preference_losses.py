"""Losses over preference pairs against their papers' formulas in float64, pair by pair; values,
gradients and metrics, however the mini-batch is split."""

import math

import pytest
import torch
from torch import Tensor

from distflow.algorithms.objectives import PreferenceObjective
from distflow.algorithms.registry import PreferenceLoss
from distflow.data.batch import Batch
from distflow.errors import UserError

LENGTHS = [3, 5, 1, 2, 4, 4]
"""Of the chosen and the rejected response, pair by pair."""
NAMES = ("dpo", "ipo", "simpo", "orpo")
OPTIONS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1, "nll_coef": 0.7},
    "ipo": {"beta": 0.2},
    "simpo": {"beta": 2.5, "gamma": 0.8, "label_smoothing": 0.2, "nll_coef": 0.4},
    "orpo": {"beta": 0.6},
}


def drawn() -> tuple[Batch, Tensor]:
    """Pairs with a token that does not count in a chosen response; and the policy's log-probs."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    lengths = torch.tensor(LENGTHS)
    batch = Batch(torch.ones(6, dtype=torch.int64), lengths)
    batch["group_index"] = torch.tensor([4, 4, 7, 7, 9, 9])
    batch["response_mask"] = torch.tensor([1.0, 0.0, 1.0] + [1.0] * (total - 3))
    batch["ref_log_prob"] = -torch.rand(total, generator=generator) - 0.1
    log_probs = -torch.rand(total, generator=generator) - 0.05
    return batch, log_probs


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def reference(name: str, batch: Batch, flat: Tensor) -> dict[str, Tensor]:
    """By the papers' formulas, one pair after another. flat: float64, with gradient."""
    options = OPTIONS[name]
    beta = options["beta"]
    counted = [row.bool() for row in batch.flat("response_mask").split(LENGTHS)]
    policy = [row[mask].sum() for row, mask in zip(flat.split(LENGTHS), counted, strict=True)]
    frozen_rows = batch.flat("ref_log_prob").double().split(LENGTHS)
    frozen = [row[mask].sum() for row, mask in zip(frozen_rows, counted, strict=True)]
    tokens = [float(mask.sum()) for mask in counted]

    losses, margins, rewards = [], [], []
    for pair in range(3):
        good, bad = 2 * pair, 2 * pair + 1
        if name in ("dpo", "ipo"):
            own = [beta * (policy[row] - frozen[row]) for row in (good, bad)]
        else:
            own = [beta * policy[row] / tokens[row] for row in (good, bad)]
        rewards.append(own)
        margins.append(own[0] - own[1])

        smoothing = options.get("label_smoothing", 0.0)
        if name in ("dpo", "simpo"):
            margin = own[0] - own[1] - options.get("gamma", 0.0)
            loss = -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)
        elif name == "ipo":
            means = [(policy[row] - frozen[row]) / tokens[row] for row in (good, bad)]
            loss = (means[0] - means[1] - 1 / (2 * beta)) ** 2
        else:
            p, q = (torch.exp(policy[row] / tokens[row]) for row in (good, bad))
            loss = -beta * log_sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))
        losses.append(loss)

    chosen_nll = -(policy[0] + policy[2] + policy[4]) / (tokens[0] + tokens[2] + tokens[4])
    coefficient = 1.0 if name == "orpo" else options.get("nll_coef", 0.0)
    return {
        "loss": torch.stack(losses).mean() + coefficient * chosen_nll,
        "rewards/chosen": torch.stack([own for own, _ in rewards]).mean(),
        "rewards/rejected": torch.stack([other for _, other in rewards]).mean(),
        "rewards/margins": torch.stack(margins).mean(),
        "rewards/accuracies": (torch.stack(margins) > 0).double().mean(),
        "logps/chosen": torch.stack(policy[::2]).mean(),
        "logps/rejected": torch.stack(policy[1::2]).mean(),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5]], [[2, 3], [], [4, 5, 0, 1]]])
def test_losses_and_gradients_are_the_formulas(name: str, split: list[list[int]]) -> None:
    batch, log_probs = drawn()
    objective = PreferenceObjective(name, OPTIONS[name])
    counts = objective.counts(batch)
    flat = log_probs.double().requires_grad_()
    padded = batch.pad(flat, "response")

    total = torch.zeros((), dtype=torch.float64)
    sums = dict[str, float]()
    for rows in split:
        micro = batch.select(rows)
        longest = int(micro.lengths("response").max()) if rows else 0
        share, own = objective({"log_probs": padded[rows, :longest]}, micro, counts)
        total = total + share
        for metric, value in own.items():
            sums[metric] = sums.get(metric, 0.0) + float(value)

    expected_flat = log_probs.double().requires_grad_()
    expected = reference(name, batch, expected_flat)
    for metric, value in objective.finish(sums, counts).items():
        assert value == pytest.approx(float(expected[metric].detach()), rel=1e-6), metric
    assert set(expected) == set(sums)

    (gradient,) = torch.autograd.grad(total, flat)
    (wanted,) = torch.autograd.grad(expected["loss"], expected_flat)
    assert torch.allclose(gradient, wanted, rtol=1e-6, atol=1e-9)
    assert gradient[1] == 0, "a token that does not count"


def test_certain_responses_have_finite_odds() -> None:
    """Mean log-probs of 0, and far below."""
    batch, log_probs = drawn()
    sure = torch.where(torch.arange(len(log_probs)) < 8, 0.0, log_probs * 500).requires_grad_()
    objective = PreferenceObjective("orpo")
    loss, _ = objective({"log_probs": batch.pad(sure, "response")}, batch, objective.counts(batch))
    loss.backward()
    assert math.isfinite(float(loss.detach())) and bool(sure.grad.isfinite().all())


def test_wrong_options_and_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="betta"):
        PreferenceObjective("dpo", {"betta": 0.1})
    with pytest.raises(ValueError, match="preference loss 'dpoo'"):
        PreferenceObjective("dpoo")
    with pytest.raises(ValueError, match="advantages"):
        PreferenceLoss("mine", lambda chosen, rejected, advantages: chosen)
    with pytest.raises(ValueError, match="no two responses"):
        PreferenceLoss("mine", lambda chosen: chosen)

    batch, log_probs = drawn()
    mine = PreferenceObjective(PreferenceLoss("mine", lambda chosen, rejected: chosen - rejected))
    assert mine.reads == ("loss_mask",)
    with pytest.raises(UserError, match=r"'mine' must return .* \(3,\)"):
        mine({"log_probs": batch.pad(log_probs, "response")}, batch, mine.counts(batch))
