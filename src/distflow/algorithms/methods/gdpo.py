"""GDPO: the parts of the reward are compared within their group before they are summed."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import (
    counted_tokens,
    group_advantage,
    grpo_rule,
    on_tokens,
)
from distflow.algorithms.masked_reductions import Reduce, masked_whiten
from distflow.algorithms.registry import register_adv_est

PAPER = "Liu et al. 2026, arXiv:2601.05242"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: gdpo}
trainer: {experiment_name: gdpo_training}
"""


DEFAULT_DOMAIN = "default"
WhitenOver = Literal["tokens", "samples"]
Weights = Mapping[str, Mapping[str, float]]


@register_adv_est("gdpo", scope="global")
def compute_gdpo_advantage(
    response_mask: Tensor,
    group_index: Tensor,
    reward_parts: Sequence[Mapping[str, float]],
    domain: Sequence[str] | None = None,
    valid: Tensor | None = None,
    *,
    reward_weights: Weights | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    whiten_over: WhitenOver = "tokens",
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_k weight_k · GRPO's advantage of part k, whitened over the global batch; returns are the
    same.

    reward_parts: unweighted scores of a sample by name; a missing part adds 0 and is excluded from
    means. reward_weights: by domain (else "default") and name, 1 if missing. Whitening is over the
    policy's tokens, as in NVIDIA's verl and in verl, or over samples, as in NVIDIA's TRL. The
    summed rewards, and any KL in them, are not read.
    """
    summed = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    if valid is None:
        is_valid = torch.ones_like(summed, dtype=torch.bool)
    else:
        is_valid = valid.bool()

    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon)
    by_domain = reward_weights or {}
    domains = [DEFAULT_DOMAIN] * len(summed) if domain is None else domain
    weights = [by_domain.get(name) or by_domain.get(DEFAULT_DOMAIN) or {} for name in domains]

    for name in sorted({name for parts in reward_parts for name in parts}):
        scores = summed.new_tensor([parts.get(name, 0.0) for parts in reward_parts])
        weight = summed.new_tensor([of_sample.get(name, 1.0) for of_sample in weights])
        has_part = is_valid & torch.tensor(
            [name in parts for parts in reward_parts], device=summed.device
        )
        summed = summed + weight * group_advantage(scores, group_index, rule, has_part)

    if whiten_over == "samples":
        whitened = masked_whiten(summed, is_valid, reduce)
        advantages = on_tokens(whitened, response_mask)
    else:
        spread = summed[:, None].expand(response_mask.shape)
        advantages = masked_whiten(spread, counted_tokens(response_mask, valid), reduce)

    return advantages, advantages.clone()
