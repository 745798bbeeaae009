"""Gradients over the ranks that share a mini-batch: their sum, their norm, clipping."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from distflow.models.shards import whole
from distflow.training.collective import Collective

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def sum_gradients(parameters: Iterable[nn.Parameter], group: Collective) -> None:
    """Add up over the ranks what each has. Those of sharded weights were added as the backward pass went."""
    for parameter in parameters:
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = grad if isinstance(parameter, DTensor) else group.sum(grad)


def clip_gradients(parameters: Collection[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradients down to `max_norm` where they are above it; returns their norm before, a scalar.

    It is that of all parts of sharded ones: the same on every rank. Nothing waits for it: where it is not finite the
    gradients are not either, before and after, and the caller drops them.
    """
    norm = _norm([p.grad for p in parameters if p.grad is not None])
    if max_norm is not None:
        for alike in _alike(parameters):
            clip_grads_with_norm_(alike, max_norm, norm)
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    """Those that lie alike share one reduction."""
    norms = [whole(get_total_norm(alike)) for alike in _alike(gradients)]
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def _alike(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """By the mesh that they lie over, and how."""
    found: dict[object, list[AnyTensor]] = {}
    for tensor in tensors:
        how = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        found.setdefault(how, []).append(tensor)
    return list(found.values())
