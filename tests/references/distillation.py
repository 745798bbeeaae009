"""Divergences of a teacher and a policy over whole distributions, token by token, in float64."""

import torch
from torch import Tensor


def lumped(probs: Tensor, ids: Tensor) -> Tensor:
    """The probabilities of these ids, and that of all others together, of one token."""
    others = torch.ones(len(probs), dtype=torch.bool)
    others[ids] = False
    return torch.cat([probs[ids], probs[others].sum()[None]])


def kl(first: Tensor, second: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(first, second, strict=True):
        if float(p.detach()) > 0:
            total = total + p * torch.log(p / q)
    return total


def divergence(teacher: Tensor, policy: Tensor, kind: str, beta: float) -> Tensor:
    """Of two distributions over the same entries."""
    if kind == "forward_kl":
        return kl(teacher, policy)
    if kind == "reverse_kl":
        return kl(policy, teacher)
    mixture = beta * teacher + (1 - beta) * policy
    return beta * kl(teacher, mixture) + (1 - beta) * kl(policy, mixture)
