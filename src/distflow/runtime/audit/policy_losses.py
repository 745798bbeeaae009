"""The built-in policy losses' formulas once more, for one sample, in float64. Autograd is all that they use."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distflow.runtime.audit.evidence import Sample, doubles

Options = Mapping[str, Any]
Formula = Callable[[Tensor, Tensor, Tensor, Sample, Options], Tensor]
"""(log-probs, advantages, old log-probs of the tokens that count; the sample; options) → the loss of each of them."""


def _clipped(ratio: Tensor, advantages: Tensor, options: Options, dual: bool) -> Tensor:
    low, high = bounds(options)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual and options["clip_ratio_c"] is not None:
        bound = -advantages * options["clip_ratio_c"]
        loss = torch.where((advantages < 0) & (loss > bound), bound, loss)
    return loss


def bounds(options: Options) -> tuple[float, float]:
    low, high = options["clip_ratio_low"], options["clip_ratio_high"]
    return (options["clip_ratio"] if low is None else low), (options["clip_ratio"] if high is None else high)


def _vanilla(now: Tensor, advantages: Tensor, old: Tensor, sample: Sample, options: Options) -> Tensor:
    return _clipped((now - old).clamp(-20, 20).exp(), advantages, options, dual=True)


def _decoupled(now: Tensor, advantages: Tensor, old: Tensor, sample: Sample, options: Options) -> Tensor:
    prox = doubles(sample["prox_log_probs"])[sample["loss_mask"] > 0]
    weight = (prox - old).clamp(-20, 20).exp()
    cap = options.get("behav_imp_weight_cap", 5.0)
    if cap is not None:
        kept = (
            torch.zeros_like(weight)
            if options.get("behav_imp_weight_mode", "mask") == "mask"
            else weight.clamp(max=cap)
        )
        weight = torch.where(weight > cap, kept, weight)
    return weight * _clipped((now - prox).clamp(-20, 20).exp(), advantages, options, dual=True)


def _gspo(now: Tensor, advantages: Tensor, old: Tensor, sample: Sample, options: Options) -> Tensor:
    sequence = (now.detach() - old).mean()
    ratio = (sequence + now - now.detach()).clamp(max=10.0).exp()
    return _clipped(ratio, advantages, options, dual=False)


def _cispo(now: Tensor, advantages: Tensor, old: Tensor, sample: Sample, options: Options) -> Tensor:
    low, high = bounds(options)
    ratio = (now.detach() - old).clamp(-20, 20).exp()
    return -ratio.clamp(1 - low if options.get("clip_below", True) else 0.0, 1 + high) * advantages * now


def _gpg(now: Tensor, advantages: Tensor, old: Tensor, sample: Sample, options: Options) -> Tensor:
    return -advantages * now


def _sapo(now: Tensor, advantages: Tensor, old: Tensor, sample: Sample, options: Options) -> Tensor:
    positive, negative = float(options.get("tau_pos", 1.0)), float(options.get("tau_neg", 1.05))
    tau = torch.where(advantages > 0, positive, negative).double()
    ratio = (now - old).clamp(-20, 20).exp()
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages


def _topr(now: Tensor, advantages: Tensor, old: Tensor, sample: Sample, options: Options) -> Tensor:
    ratio = (now.detach() - old).clamp(-20, 20).exp()
    good = float(doubles(sample["token_level_scores"]).sum()) > 0
    return -(1.0 if good else ratio.clamp(0, 1)) * advantages * now


FORMULAS: dict[str, Formula] = {
    "vanilla": _vanilla,
    "decoupled": _decoupled,
    "gspo": _gspo,
    "cispo": _cispo,
    "gpg": _gpg,
    "sapo": _sapo,
    "topr": _topr,
}
