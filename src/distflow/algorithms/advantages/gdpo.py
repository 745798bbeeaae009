"""GDPO (Liu et al. 2026, arXiv:2601.05242): every part of the reward is normalised by itself before they are summed."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group import counted_tokens, group_advantage, on_tokens
from distflow.algorithms.advantages.grpo import grpo_rule
from distflow.algorithms.masking import Reduce, masked_whiten
from distflow.algorithms.registry import register_adv_est

DEFAULT_DOMAIN = "default"
WhitenOver = Literal["tokens", "samples"]
Weights = Mapping[str, Mapping[str, float]]


def _describe(
    reward_weights: Weights | None, norm_adv_by_std_in_grpo: bool, adv_epsilon: float, whiten_over: WhitenOver
) -> str:
    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon)
    return f"Σ weight · ({rule}) over the parts of the reward, whitened over the batch's {whiten_over}"


@register_adv_est("gdpo", scope="global", describe=_describe)
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
    """Σ_k weight_k · GRPO's advantage of part k, whitened over the global batch; returns are the same.

    response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. reward_parts: scores of a sample by name,
    unweighted; one that a sample lacks adds 0 to it and is in no mean. reward_weights: by domain (else "default") and
    name, 1 where nothing is said. Whitening is over the policy's tokens, as in NVIDIA's verl and in verl, or over
    samples, as in NVIDIA's TRL. The sum of the rewards, and a KL in them, is not read.
    """
    summed = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    judged = torch.ones_like(summed, dtype=torch.bool) if valid is None else valid.bool()
    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon)
    weights = _weights_of_samples(reward_weights or {}, domain, len(summed))
    for name in sorted({name for parts in reward_parts for name in parts}):
        scores = summed.new_tensor([parts.get(name, 0.0) for parts in reward_parts])
        weight = summed.new_tensor([of_sample.get(name, 1.0) for of_sample in weights])
        has_part = judged & torch.tensor([name in parts for parts in reward_parts], device=summed.device)
        summed = summed + weight * group_advantage(scores, group_index, rule, has_part)
    if whiten_over == "samples":
        whitened = masked_whiten(summed, judged, reduce)
        advantages = on_tokens(whitened, response_mask)
    else:
        spread = summed[:, None].expand(response_mask.shape)
        advantages = masked_whiten(spread, counted_tokens(response_mask, valid), reduce).float()
    return advantages, advantages.clone()


def _weights_of_samples(weights: Weights, domain: Sequence[str] | None, bs: int) -> list[Mapping[str, float]]:
    domains = [DEFAULT_DOMAIN] * bs if domain is None else domain
    return [weights.get(name) or weights.get(DEFAULT_DOMAIN) or {} for name in domains]
