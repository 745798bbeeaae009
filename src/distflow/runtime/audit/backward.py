"""Claim: a gradient by log-probs reaches the weights through packed sequences as it does through padded ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence
from distflow.runtime.audit.log_probs import dtype_of, ids_of, proved_samples
from distflow.runtime.audit.plain_model import logits_of, plainly
from distflow.runtime.audit.watch import OpenEngine, striped

NUM_SAMPLES = 2
EXACT, ROUNDED = 1e-3, 0.5


def prove(evidence: Evidence) -> str | None:
    actor = evidence.parts.actor
    scorer = getattr(actor, "scorer", None)
    if not isinstance(actor, OpenEngine) or scorer is None:
        return "the train engine does not show its inside"
    chosen = sorted(proved_samples(evidence), key=lambda sample: len(sample["response_ids"]))[:NUM_SAMPLES]
    if not chosen:
        return "no sample is short enough"
    rows = [list(evidence.batch["uid"]).index(sample["uid"]) for sample in chosen]
    names = dict(striped(actor.model, evidence.step))
    weights = list(names.values())
    packed = _packed(evidence.batch.select(rows), scorer, weights)
    total = torch.zeros((), device=weights[0].device)
    with plainly(actor.model, compute_dtype=dtype_of(actor)):
        for logits, sample in zip(logits_of(actor.model, [ids_of(sample) for sample in chosen]), chosen, strict=True):
            ids = ids_of(sample)[1]
            scores = (logits / evidence.parts.sampling.temperature).log_softmax(-1)
            log_probs = scores.gather(-1, torch.tensor(ids, device=scores.device)[:, None])[:, 0]
            total = total + (log_probs * _cotangent(len(ids)).to(log_probs)).sum()
        apart = _gradients(total, torch.ones(()), weights)
    limit = EXACT if evidence.parts.exact else ROUNDED
    for name, one, other in zip(names, packed, apart, strict=True):
        error = float((one - other).norm() / other.norm().clamp(min=1e-12))
        if not error <= limit and float(other.norm()) > 1e-9:
            raise Wrong(
                f"the gradient of {name} by the log-probs of samples {', '.join(s['uid'] for s in chosen)} differs by "
                f"{error:.3g} (relative; limit {limit:g}) between the packed pass and a padded one: packed sequences "
                "see each other, or part of the model is cut off from the gradient"
            )
    return None


def _packed(batch: Batch, scorer: object, weights: Sequence[nn.Parameter]) -> list[Tensor]:
    device = weights[0].device
    flat = scorer.compute(batch.to(device), ("log_probs",))["log_probs"]  # type: ignore[attr-defined]  # checked above
    lengths = batch.lengths("response").tolist()
    return _gradients(flat, torch.cat([_cotangent(length) for length in lengths]), weights)


def _gradients(log_probs: Tensor, cotangent: Tensor, weights: Sequence[nn.Parameter]) -> list[Tensor]:
    found = torch.autograd.grad(log_probs, weights, cotangent.to(log_probs), allow_unused=True)
    return [torch.zeros_like(w) if g is None else g.detach() for w, g in zip(weights, found, strict=True)]


def _cotangent(length: int) -> Tensor:
    """Fixed numbers of both signs."""
    return torch.cos(torch.arange(length, dtype=torch.float32) + 1.0)


CHECK = Check(
    "backward",
    "a gradient by log-probs reaches the weights through the packed pass as through the model's own padded one",
    "a train engine that shows its inside",
    f"{EXACT:g} relative (bfloat16: {ROUNDED:g})",
    prove,
)
