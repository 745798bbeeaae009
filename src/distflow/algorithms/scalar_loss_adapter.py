"""Runs a policy loss with verl's and siiRL's signature, which returns scalars of a micro-batch,
over the mini-batch."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import bind_counts, under_mask
from distflow.algorithms.registry import PolicyLoss
from distflow.errors import UserError

SCALAR_LOSS_RETURNS = ("pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


class ActorView(dict[str, object]):
    """The actor's numbers for a loss: `view.clip_ratio`, `view["clip_ratio"]`, `view.get(...)`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the actor has no key '{name}'; it has {', '.join(sorted(self))}")
        return self[name]


class ScalarLossAdapter:
    """Adapts one loss. Losses aggregated with distflow's `agg_loss` are exact; a scalar computed in
    another way is weighted by the micro-batch's share of the tokens."""

    def __init__(
        self, loss: PolicyLoss, loss_agg_mode: str, scale: float | None, actor: Mapping[str, object]
    ) -> None:
        self.loss = loss
        self.loss_agg_mode = loss_agg_mode
        self.scale = scale
        self.config = ActorView(actor)
        parameters = inspect.signature(loss.fn).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = {p.name for p in parameters}

    def __call__(
        self,
        log_probs: Tensor,
        fields: Mapping[str, Tensor],
        weights: Tensor | None,
        counts: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, float]]:
        """(share of the policy loss, sums over tokens of its statistics). Raises ValueError for
        other results."""
        mask = fields["loss_mask"]
        old = fields.get("old_log_probs")

        num_tokens = float((mask > 0).sum())
        if num_tokens == 0:
            # The loss's own means would divide by zero.
            zero = under_mask(log_probs, torch.zeros_like(log_probs)).sum()
            return zero, dict.fromkeys(SCALAR_LOSS_RETURNS[1:], 0.0)

        current = under_mask(log_probs, mask)
        arguments = {
            "old_log_prob": current.detach() if old is None else under_mask(old, mask),
            "log_prob": current,
            "advantages": under_mask(fields["advantages"], mask),
            "response_mask": mask,
            "loss_agg_mode": self.loss_agg_mode,
            "config": self.config,
            "rollout_is_weights": None if weights is None else under_mask(weights, mask),
        }

        with bind_counts(counts, self.scale) as bound:
            result = self.loss.fn(
                **{k: v for k, v in arguments.items() if self._takes_all or k in self._takes}
            )

        pg_loss, *means = result if isinstance(result, tuple) and result else (result,)
        is_number = isinstance(pg_loss, Tensor) and pg_loss.numel() == 1
        if not is_number or len(means) != len(SCALAR_LOSS_RETURNS) - 1:
            kinds = (
                f"tensor of shape {tuple(x.shape)}" if hasattr(x, "shape") else repr(x)
                for x in (pg_loss, *means)
            )
            raise UserError(
                f"policy loss '{self.loss.name}' must return ({', '.join(SCALAR_LOSS_RETURNS)}), "
                f"{len(SCALAR_LOSS_RETURNS)} scalars, but returned {', '.join(kinds)}: unused ones "
                "may be torch.zeros(()), and distflow.algorithms.agg_loss makes pg_loss of losses "
                "per token"
            )

        if not bound.used:
            pg_loss = pg_loss * (num_tokens / max(counts["tokens"], 1.0))

        # Statistics are tensors, some with gradient, or plain numbers.
        numbers = (float(mean.detach() if isinstance(mean, Tensor) else mean) for mean in means)
        return pg_loss, {
            n: number * num_tokens
            for n, number in zip(SCALAR_LOSS_RETURNS[1:], numbers, strict=True)
        }
