"""Losses over pairs of a chosen and a rejected response to one prompt, and one over single
responses that are labelled as desirable or not (`compute_kto_loss`).

- DPO: the policy is its own reward model (Rafailov et al. 2023, arXiv:2305.18290, equation 7).
  `label_smoothing` is the share of wrong labels (cDPO, Mitchell 2023).
- IPO: a bounded margin (Azar et al. 2023, arXiv:2310.12036, equation 17). As in TRL and by its
  authors, log-ratios are means over a response's tokens.
- SimPO: mean log-probs and a target margin, without a reference (Meng et al. 2024,
  arXiv:2405.14734, equation 6).
- ORPO: fine-tuning on the chosen response and the odds ratio, without a reference (Hong et al.
  2024, arXiv:2403.07691, equation 6).

Each tensor is `(pairs,)`. A loss names what it reads:

- `chosen`, `rejected`: the policy's log-prob of the response, summed over its tokens, with
  gradient; `ref_chosen`, `ref_rejected`: the reference's
- `chosen_tokens`, `rejected_tokens`: the numbers of tokens
- `nll`: the pair's share of the mean negative log-likelihood of a chosen token: its mean over the
  pairs of a mini-batch is the mean over their tokens

It returns the loss of each pair, and the rewards of the chosen and the rejected response for the
metrics.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distflow.algorithms.registry import register_preference_loss

Losses = tuple[Tensor, Tensor, Tensor]
_LARGEST_MEAN = -1e-7
"""A mean log-prob of 0 has no odds."""


@register_preference_loss("dpo")
def compute_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    nll: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    nll_coef: float = 0.0,
) -> Losses:
    """−log σ(β h), h = log π/π_ref(chosen) − log π/π_ref(rejected); `nll_coef` adds fine-tuning on
    the chosen response (RPO, arXiv:2404.19733)."""
    chosen_rewards = beta * (chosen - ref_chosen)
    rejected_rewards = beta * (rejected - ref_rejected)
    losses = _logistic(chosen_rewards - rejected_rewards, label_smoothing)
    return losses + nll_coef * nll, chosen_rewards, rejected_rewards


@register_preference_loss("ipo")
def compute_ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: float = 0.1,
) -> Losses:
    """(h − 1 / 2β)², where h is the difference of the mean log-ratios per token; β is the paper's
    τ."""
    chosen_ratio = chosen - ref_chosen
    rejected_ratio = rejected - ref_rejected
    margin = chosen_ratio / chosen_tokens - rejected_ratio / rejected_tokens
    return (margin - 1 / (2 * beta)).square(), beta * chosen_ratio, beta * rejected_ratio


@register_preference_loss("simpo")
def compute_simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    nll: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    nll_coef: float = 0.0,
) -> Losses:
    """−log σ(β (mean log π(chosen) − mean log π(rejected)) − γ); `nll_coef` adds fine-tuning on the
    chosen response (CPO-SimPO)."""
    chosen_rewards = beta * chosen / chosen_tokens
    rejected_rewards = beta * rejected / rejected_tokens
    losses = _logistic(chosen_rewards - rejected_rewards - gamma, label_smoothing)
    return losses + nll_coef * nll, chosen_rewards, rejected_rewards


@register_preference_loss("orpo")
def compute_orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    nll: Tensor,
    *,
    beta: float = 0.1,
) -> Losses:
    """nll − β log σ(log odds(chosen) − log odds(rejected)), odds = p / (1 − p) of the geometric
    mean p of a response's token probabilities; β is the paper's λ."""
    chosen_mean = chosen / chosen_tokens
    rejected_mean = rejected / rejected_tokens
    log_odds = _log_odds(chosen_mean) - _log_odds(rejected_mean)
    return nll - beta * logsigmoid(log_odds), beta * chosen_mean, beta * rejected_mean


def compute_kto_loss(
    log_ratios: Tensor,
    desirable: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Tensor, Tensor]:
    """KTO: λ_D (1 − σ(β (r − z))) of a desirable response, λ_U (1 − σ(β (z − r))) of another one,
    r = log π/π_ref (Ethayarajh et al. 2024, arXiv:2402.01306, equation 8).

    log_ratios: `(responses,)`, with gradient. desirable: bool `(responses,)`. kl: z, which has no
    gradient. Returns the loss of each response, and its reward β r."""
    rewards = beta * log_ratios
    margins = torch.where(desirable, rewards - beta * kl, beta * kl - rewards)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights.to(margins.dtype) * torch.sigmoid(-margins), rewards


def _logistic(margin: Tensor, label_smoothing: float) -> Tensor:
    right = (1 - label_smoothing) * logsigmoid(margin)
    return -right - label_smoothing * logsigmoid(-margin)


def _log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = exp(mean), exact also for p near 1."""
    mean = mean.clamp(max=_LARGEST_MEAN)
    return mean - (-mean.expm1()).log()
