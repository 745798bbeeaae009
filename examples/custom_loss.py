"""Policy losses, in our signature and in the seed's: `distflow train examples/custom_loss.yaml`."""

import torch

from distflow import register_policy_loss
from distflow.algorithms import agg_loss, masked_mean


@register_policy_loss("soft_ratio")
def soft_ratio_loss(log_probs, advantages, loss_mask, old_log_probs, *, softness: float = 2.0):
    """Per-token losses (bs, response_length) and named statistics; how they become one number is
    the config's."""
    difference = (log_probs - old_log_probs) * loss_mask
    bounded = torch.tanh(softness * difference) / softness
    return -advantages * bounded.exp(), {"ratio": difference.exp().detach()}


@register_policy_loss("my_custom_loss")
def compute_my_custom_policy_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """Scalars of a micro-batch; what is aggregated by `agg_loss` stays exact however a batch is
    split."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    pg_loss = agg_loss(losses, response_mask, loss_agg_mode)
    clipfrac = masked_mean((clipped != ratio).float(), response_mask)
    return pg_loss, clipfrac, masked_mean(old_log_prob - log_prob, response_mask), torch.zeros(())
