"""What an update of the policy minimises over a mini-batch, and what it reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.references import rollout_correction
from tests.references.aggregation import aggregate
from tests.references.kl import kl
from tests.references.policy_losses import REFERENCES
from tests.references.tokens import Loss, Tokens


@dataclass(frozen=True)
class Response:
    """Columns of the tokens that count in the loss, float64 `(n,)`; n may be 0."""

    tokens: Tokens
    entropy: Tensor
    ref: Tensor
    """Log-probs of the reference policy."""
    rollout: Tensor
    """Log-probs of the engine."""
    weights: Tensor
    """Weights of the rollout correction."""
    units: Sequence[object]
    """The action or chunk of each token."""
    domain: str


@dataclass(frozen=True)
class Settings:
    loss: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "token-mean"
    scale: float | None = None
    entropy_coef: float = 0.0
    kl_type: str | None = None
    kl_coef: float = 0.0
    is_weighted: bool = False
    """By the column of weights."""
    correction: tuple[str, rollout_correction.Threshold] | None = None
    """Level and threshold of weights that the loss computes itself."""
    threshold: float | None = None
    """Of the off-policy mask."""
    by_unit: bool = False
    """Over actions or chunks instead of tokens."""


def objective(
    responses: Sequence[Response], settings: Settings, domains: Mapping[str, Settings]
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics). domains: settings of the policy loss of some responses."""
    num_tokens = max(sum(len(each.entropy) for each in responses), 1)
    metrics = dict[str, float]()
    loss = torch.zeros((), dtype=torch.float64)
    size_of_terms = 0.0
    for domain, own in ((None, settings), *domains.items()):
        rows, stats, num_units = policy_rows(responses, own, domain, domains)
        is_every_row = own.loss == "gmpo"
        part = aggregate(rows, settings.mode, settings.scale, is_every_row)
        loss = loss + part
        sizes = [row.detach().abs() for row in rows]
        size_of_terms += float(aggregate(sizes, settings.mode, settings.scale, is_every_row))
        if domain is not None:
            metrics[f"pg_loss/{domain}"] = float(part.detach())
        for name, total in stats.items():
            metrics[name] = metrics.get(name, 0.0) + total / max(num_units, 1)

    metrics["pg_loss"] = float(loss.detach())
    metrics["loss_term/pg"] = size_of_terms

    gaps = 0.0
    for each in responses:
        anchor = each.tokens.prox if settings.loss == "decoupled" else each.tokens.old
        gaps += float((each.tokens.now.detach() - anchor).abs().sum())

    metrics["log_ratio_abs"] = gaps / num_tokens

    entropies = [each.entropy for each in responses]
    metrics["entropy"] = sum(float(row.detach().sum()) for row in entropies) / num_tokens

    if settings.entropy_coef:
        bonus = settings.entropy_coef * aggregate(entropies, settings.mode, settings.scale)
        loss = loss - bonus
        sizes = [row.detach().abs() for row in entropies]
        size = aggregate(sizes, settings.mode, settings.scale)
        metrics["loss_term/entropy"] = abs(settings.entropy_coef) * float(size)

    if settings.kl_type is not None:
        kls = [kl(each.tokens.now, each.ref, settings.kl_type) for each in responses]
        mean = aggregate(kls, settings.mode, settings.scale)
        size = aggregate([row.detach().abs() for row in kls], settings.mode, settings.scale)
        loss = loss + settings.kl_coef * mean
        metrics["kl_loss"] = float(mean.detach())
        metrics["loss_term/kl"] = abs(settings.kl_coef) * float(size)

    metrics["loss"] = float(loss.detach())
    return loss, metrics


def policy_rows(
    responses: Sequence[Response],
    settings: Settings,
    domain: str | None,
    domains: Mapping[str, Settings],
) -> tuple[list[Tensor], dict[str, float], int]:
    """(the policy loss of each token of each response, 0 for those of other domains; sums of the
    statistics; tokens or units of all responses)."""
    rows = []
    sums = dict[str, float]()
    number = 0
    for each in responses:
        tokens = summed_by_unit(each) if settings.by_unit else each.tokens
        number += len(tokens.old)
        is_own = (each.domain if each.domain in domains else None) == domain
        if not is_own or not len(tokens.old):
            rows.append(torch.zeros_like(tokens.old))
            continue

        losses, stats = corrected_loss(each, tokens, settings)
        rows.append(losses)
        for name, values in stats.items():
            sums[name] = sums.get(name, 0.0) + float(values.double().sum())

    return rows, sums, number


def corrected_loss(response: Response, tokens: Tokens, settings: Settings) -> Loss:
    """The policy loss, weighted, and 0 on tokens that are too far off-policy."""
    losses, stats = REFERENCES[settings.loss](tokens, **settings.options)
    if settings.is_weighted:
        losses = losses * response.weights

    if settings.correction is not None:
        level, threshold = settings.correction
        trainer = tokens.prox if settings.loss == "decoupled" else tokens.now.detach()
        raw = rollout_correction.raw_weights((trainer - response.rollout).tolist(), level)
        weights = [rollout_correction.corrected(weight, threshold) for weight in raw]
        stats["rollout_is_weight"] = torch.tensor(weights, dtype=torch.float64)
        losses = losses * stats["rollout_is_weight"]
        changed = [one != other for one, other in zip(raw, weights, strict=True)]
        stats["rollout_is_corrected"] = torch.tensor(changed)

    if settings.threshold is not None:
        gaps = (tokens.now.detach() - response.rollout).tolist()
        kept = torch.tensor(
            rollout_correction.keep_on_policy(gaps, tokens.advantages.tolist(), settings.threshold)
        )
        losses = torch.where(kept, losses, 0.0)
        stats["off_policy_masked"] = ~kept

    return losses, stats


def summed_by_unit(response: Response) -> Tokens:
    """The log-prob of a unit is the sum over its tokens, its advantage their mean."""
    tokens = response.tokens
    names = list(dict.fromkeys(response.units))
    of_unit = [[t for t, unit in enumerate(response.units) if unit == name] for name in names]
    none = torch.zeros(0, dtype=torch.float64)

    def total(values: Tensor) -> Tensor:
        return torch.stack([values[own].sum() for own in of_unit]) if of_unit else none

    sizes = torch.tensor([float(len(own)) for own in of_unit], dtype=torch.float64)
    return replace(
        tokens,
        now=total(tokens.now),
        old=total(tokens.old),
        advantages=total(tokens.advantages) / sizes,
    )
