"""A policy of one weight matrix over a vocabulary of six, and batches for it, to differentiate
objectives through."""

import random

import torch
from torch import Tensor

from distflow.algorithms.objectives import PolicyObjective
from distflow.data.batch import Batch

VOCABULARY = 6
LONGEST = 8
COLUMNS = (
    "old_log_probs",
    "prox_log_probs",
    "ref_log_prob",
    "advantages",
    "token_level_scores",
    "rollout_is_weights",
    "values",
    "returns",
    "rollout_log_probs",
    "selected_tokens",
)


def toy_batch(seed: int, bs: int) -> Batch:
    """Ragged rows with holes; every fourth sample is invalid and one has no token of the policy at
    all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (bs,), generator=generator)
    batch = Batch(torch.ones(bs, dtype=torch.int64), lengths)
    tokens = int(lengths.sum())
    batch["uid"] = [f"{row}-0" for row in range(bs)]
    batch["prompt_ids"] = torch.zeros(bs, dtype=torch.int64)
    batch["response_ids"] = torch.randint(VOCABULARY, (tokens,), generator=generator)
    batch["response_mask"] = (torch.rand(tokens, generator=generator) < 0.8).float()
    mask = batch["response_mask"]
    mask[bs // 2] = 0.0
    batch["response_mask"] = mask
    batch["valid"] = torch.arange(bs) % 4 != 3

    for name in COLUMNS:
        values = torch.randn(tokens, generator=generator)
        if name.endswith(("log_probs", "log_prob")):
            values = -1.8 + 0.4 * values
        if name == "rollout_is_weights":
            values = values.exp()
        batch[name] = (values > 0.5).float() if name == "selected_tokens" else values

    return batch


def toy_weights() -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(
        VOCABULARY, VOCABULARY, dtype=torch.float64, generator=generator
    ).requires_grad_()


def outputs(weights: Tensor, micro: Batch) -> dict[str, Tensor]:
    """What a train engine computes, by the token before.

    Where the loss is masked it is NaN, and a NaN gradient there would reach the weights.
    """
    ids = micro["response_ids"]
    before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], dim=1)
    logits = torch.log_softmax(weights[before], dim=-1)
    log_probs = logits.gather(-1, ids[..., None])[..., 0]
    entropy = -(logits.exp() * logits).sum(-1)
    poison = torch.where(micro["loss_mask"] > 0, 0.0, float("nan"))
    columns = {"log_probs": log_probs, "entropy": entropy, "values": weights[before, ids] * 0.7}

    return {name: value + poison for name, value in columns.items()}


def gradient(
    objective: PolicyObjective, parts: list[Batch], counts: dict[str, float]
) -> tuple[Tensor, dict[str, float]]:
    """The summed gradient of the parts' shares, float64, and their summed statistics."""
    weights = toy_weights()
    sums = {}
    for part in parts:
        loss, stats = objective(outputs(weights, part), part, counts)
        loss.backward()
        for name, value in stats.items():
            sums[name] = sums.get(name, 0.0) + float(value)

    grad = torch.zeros_like(weights) if weights.grad is None else weights.grad
    return grad, sums


def random_split(batch: Batch, seed: int) -> list[Batch]:
    """Parts of unequal size in a shuffled order, one of them empty, one of only masked rows."""
    rng = random.Random(seed)
    masked = [i for i in range(len(batch)) if batch["loss_mask"][i].sum() == 0]
    rest = [i for i in range(len(batch)) if i not in masked]
    rng.shuffle(rest)

    parts: list[list[int]] = [masked, []]
    while rest:
        size = rng.randint(1, 5)
        parts.append(rest[:size])
        rest = rest[size:]

    rng.shuffle(parts)
    return [batch.select(part) for part in parts]


def scale_of(mode: str) -> float | None:
    return float(LONGEST) if mode == "seq-mean-token-sum-norm" else None
