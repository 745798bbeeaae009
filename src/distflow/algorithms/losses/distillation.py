"""Distillation on the policy's own samples: the terms that a teacher's log-probs add to the loss.

- From the sampled tokens: the log-ratio of teacher to policy as the advantage of each token, whose
  policy gradient is that of the reverse KL (MiniLLM, arXiv:2306.08543).
- From the teacher's likeliest tokens: a divergence of two distributions, with the gradient of the
  policy's log-probs: forward KL, reverse KL, or the generalised Jensen-Shannon divergence of GKD
  (arXiv:2306.13649), β KL(P ‖ M) + (1 − β) KL(Q ‖ M) with M = β P + (1 − β) Q, P the teacher and Q
  the policy. All other tokens are one entry of both distributions, so the value is at most that
  over the whole vocabulary, and equal to it if P and Q agree on the proportions among them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distflow.data.batch import Batch

Signal = Literal["sampled", "top_k"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]

_MOST_LOG_RATIO = 20.0
_LEAST_LOG_PROB = -1e4
_LEAST_OF_TEACHER = -30.0
"""Below it a token is impossible, and the reverse KL would be infinite."""
_LEAST_MASS = 1e-6
"""Of the other tokens: their mass is the rounded difference of two numbers near 1."""


def divergence(
    log_probs: Tensor, teacher_log_probs: Tensor, kind: Divergence, beta: float = 0.5
) -> Tensor:
    """The divergence of each token, float64 `(...)`, with gradient.

    log_probs, teacher_log_probs: of the teacher's likeliest tokens, `(..., k)`.
    """
    policy = _with_rest(log_probs)
    teacher = _with_rest(teacher_log_probs).clamp(min=_LEAST_OF_TEACHER)
    if kind == "forward_kl":
        return _kl(teacher, policy)
    if kind == "reverse_kl":
        return _kl(policy, teacher)

    mixture = (beta * teacher.exp() + (1.0 - beta) * policy.exp()).log()
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(policy, mixture)


def _with_rest(log_probs: Tensor) -> Tensor:
    """With the log-prob of all other tokens together as the last entry: float64."""
    own = log_probs.double()
    rest = (1.0 - own.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_MASS)
    return torch.cat([own, rest.log()], dim=-1).clamp(min=_LEAST_LOG_PROB)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)


@dataclass(frozen=True)
class Distillation:
    """The terms of a loss, each with a coefficient and, if a mini-batch has the column, a weight
    for each token: `rl` (advantages of rewards), `kl` (the teacher) and `ce` (−log π of the token,
    by default in proportion to the sample's accuracy)."""

    signal: Signal
    divergence: Divergence
    beta: float
    rl_coef: float
    kl_coef: float
    ce_coef: float

    @property
    def outputs(self) -> tuple[str, ...]:
        """Those of the policy that it needs besides log-probs."""
        return ("teacher_top_log_probs",) if self.signal == "top_k" else ()

    @property
    def reads(self) -> tuple[str, ...]:
        top = ("teacher_top_ids", "teacher_top_log_probs") if self.signal == "top_k" else ()
        accuracy = ("acc",) if self.ce_coef else ()
        return ("teacher_log_probs", "kl_weights", *top, *accuracy)

    optional = ("rl_weights", "ce_weights")

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the terms that are on, besides the policy loss's."""
        named = {"teacher": self.signal == "top_k" and self.kl_coef, "ce": self.ce_coef}
        return tuple(name for name, is_on in named.items() if is_on)

    @property
    def has_advantages(self) -> bool:
        return bool(self.rl_coef or (self.signal == "sampled" and self.kl_coef))

    def advantages(self, advantages: Tensor, log_probs: Tensor, micro: Batch) -> Tensor:
        """Those of rewards and, with the signal `sampled`, of the teacher: its log-ratio to the
        policy as it is now. All `(bs, response_length)`."""
        total = self.rl_coef * advantages
        if "rl_weights" in micro:
            total = total * micro["rl_weights"].to(total.dtype)
        if self.signal == "sampled":
            gap = self._gap(log_probs, micro)
            total = total + self.kl_coef * (micro["kl_weights"] * gap).to(total.dtype)
        return total

    def losses(self, outputs: Mapping[str, Tensor], micro: Batch) -> Iterator[tuple[str, Tensor]]:
        """(name, loss of each token) of `terms`, with their coefficients."""
        log_probs = outputs["log_probs"]
        if "teacher" in self.terms:
            found = divergence(
                outputs["teacher_top_log_probs"],
                micro["teacher_top_log_probs"],
                self.divergence,
                self.beta,
            )
            weights = self.kl_coef * micro["kl_weights"]
            yield "teacher", (weights * found).to(log_probs.dtype)

        if self.ce_coef:
            if "ce_weights" in micro:
                weights = micro["ce_weights"]
            else:
                weights = micro["acc"][:, None].to(log_probs.dtype)
            yield "ce", -self.ce_coef * weights * log_probs

    def measured(self, outputs: Mapping[str, Tensor], micro: Batch) -> dict[str, Tensor]:
        """Statistics of each token."""
        scored = micro["kl_weights"]
        found = {
            "teacher_kl": -scored * self._gap(outputs["log_probs"], micro),
            "teacher_scored": (scored > 0).double(),
        }
        if self.signal == "top_k":
            found["teacher_top_mass"] = micro["teacher_top_log_probs"].exp().sum(-1)
        return found

    def _gap(self, log_probs: Tensor, micro: Batch) -> Tensor:
        gap = micro["teacher_log_probs"] - log_probs.detach()
        return gap.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
