"""KTO's loss against the paper's formulas in float64, response by response; values, gradients and
metrics, however the mini-batch is split."""

import pytest
import torch
from torch import Tensor

from distflow.algorithms.objectives import KTOObjective
from distflow.data.batch import Batch

LENGTHS = [3, 5, 1, 2, 4]
DESIRABLE = [True, False, False, True, True]
BETA = 0.3
WEIGHTS = (1.2, 0.7)


def drawn(mismatched: list[float]) -> tuple[Batch, Tensor]:
    """Responses, one with a token that does not count; and the policy's log-probs. mismatched: the
    log-ratios of mismatched responses."""
    generator = torch.Generator().manual_seed(4)
    total = sum(LENGTHS)
    batch = Batch(torch.ones(5, dtype=torch.int64), torch.tensor(LENGTHS))
    batch["desirable"] = torch.tensor(DESIRABLE)
    batch["mismatched_log_ratio"] = torch.tensor(mismatched, dtype=torch.float64)
    batch["response_mask"] = torch.tensor([1.0, 0.0, 1.0] + [1.0] * (total - 3))
    batch["ref_log_prob"] = -torch.rand(total, generator=generator) - 0.1
    return batch, -torch.rand(total, generator=generator) - 0.05


def reference(batch: Batch, flat: Tensor, kl: float) -> dict[str, Tensor]:
    """By equation 8 of the paper. flat: float64, with gradient."""
    counted = batch.flat("response_mask").bool().split(LENGTHS)
    frozen = batch.flat("ref_log_prob").double().split(LENGTHS)
    losses = []
    found: dict[str, list[Tensor]] = {}
    for row, policy in enumerate(flat.split(LENGTHS)):
        log_prob = policy[counted[row]].sum()
        reward = log_prob - frozen[row][counted[row]].sum()
        if DESIRABLE[row]:
            losses.append(WEIGHTS[0] * (1 - 1 / (1 + torch.exp(-BETA * (reward - kl)))))
            kind = "chosen"
        else:
            losses.append(WEIGHTS[1] * (1 - 1 / (1 + torch.exp(-BETA * (kl - reward)))))
            kind = "rejected"
        found.setdefault(f"rewards/{kind}", []).append(BETA * reward)
        found.setdefault(f"logps/{kind}", []).append(log_prob)

    means = {name: torch.stack(values).mean() for name, values in found.items()}
    margin = means["rewards/chosen"] - means["rewards/rejected"]
    kl_found = torch.tensor(kl)
    return {
        "loss": torch.stack(losses).mean(),
        "rewards/margins": margin,
        "kl": kl_found,
        **means,
    }


@pytest.mark.parametrize(
    ("mismatched", "kl"),
    [
        ([0.5, -0.2, 1.5, 0.1, 0.6], 0.5),
        ([0.5, torch.nan, 1.5, torch.nan, 0.4], 0.8),
        ([-0.5, -1.0, 0.3, -0.2, 0.1], 0.0),
        ([torch.nan] * 5, 0.0),
    ],
    ids=["all", "some", "below-zero", "none"],
)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4]], [[3, 1], [], [0, 4], [2]]])
def test_loss_and_gradient_are_the_formulas(
    mismatched: list[float], kl: float, split: list[list[int]]
) -> None:
    batch, log_probs = drawn(mismatched)
    objective = KTOObjective(BETA, *WEIGHTS)
    parts = [objective.counts(batch.select(rows)) for rows in split if rows]
    counts = {name: sum(part[name] for part in parts) for name in parts[0]}
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
    expected = reference(batch, expected_flat, kl)
    found = objective.finish(sums, counts)
    assert found.keys() == expected.keys()
    for metric, value in found.items():
        assert value == pytest.approx(float(expected[metric].detach()), rel=1e-6), metric

    (gradient,) = torch.autograd.grad(total, flat)
    (wanted,) = torch.autograd.grad(expected["loss"], expected_flat)
    assert torch.allclose(gradient, wanted, rtol=1e-6, atol=1e-9)
    assert gradient[1] == 0, "a token that does not count"


def test_a_mini_batch_without_a_kind_has_no_metrics_of_it() -> None:
    batch, log_probs = drawn([0.1] * 5)
    desirable = batch.select([0, 3])
    objective = KTOObjective()
    counts = objective.counts(desirable)
    padded = batch.pad(log_probs, "response")[[0, 3], :3]
    _, sums = objective({"log_probs": padded}, desirable, counts)
    numbers = {name: float(value) for name, value in sums.items()}
    assert objective.finish(numbers, counts).keys() == {
        *("loss", "kl", "rewards/chosen", "logps/chosen")
    }
