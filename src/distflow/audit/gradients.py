"""Checks: packed sequences give the same weight gradients as padded ones; a mini-batch's gradient starts from zero and
is the sum of its micro-batches' gradients, clipped to max_grad_norm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distflow.audit.log_probs import audited_samples, dtype_of, ids_of
from distflow.audit.plain_model import logits_of, plainly
from distflow.audit.recorded_data import Check, RecordedStep, Sample, Wrong
from distflow.audit.recorder import OpenEngine, UpdateRecord, striped

NUM_SAMPLES = 2
EXACT, ROUNDED = 1e-3, 0.5
LIMIT = 1e-3


def audit_backward(recorded: RecordedStep) -> str | None:
    actor = recorded.parts.actor
    scorer = getattr(actor, "scorer", None)
    if not isinstance(actor, OpenEngine) or scorer is None:
        return "the train engine does not expose its model"
    turns = recorded.parts.turns
    chosen = sorted(audited_samples(recorded), key=lambda sample: len(sample["response_ids"]))[:NUM_SAMPLES]
    if not chosen and not turns.is_spread(actor.model):
        return "no sample is short enough"
    names = dict(striped(actor.model, recorded.step))
    weights = list(names.values())
    packed = _through_packing(recorded, actor, scorer, chosen, weights)
    apart = [
        _through_padding(recorded, actor, chosen[place : place + 1], weights)
        for place in range(NUM_SAMPLES if turns.is_spread(actor.model) else len(chosen))
    ]
    if not chosen:
        return "no sample is short enough"
    limit = EXACT if recorded.parts.exact else ROUNDED
    for name, one, *others in zip(names, packed, *apart, strict=True):
        other = torch.stack(others).sum(0)
        error = float((one - other).norm() / other.norm().clamp(min=1e-12))
        if not error <= limit and float(other.norm()) > 1e-9:
            raise Wrong(
                f"the gradient of {name} by the log-probs of samples {', '.join(s['uid'] for s in chosen)} differs by "
                f"{error:.3g} (relative; limit {limit:g}) between the packed pass and a padded one: packed sequences "
                "see each other, or part of the model is cut off from the gradient"
            )
    return None


def _through_packing(
    recorded: RecordedStep, actor: OpenEngine, scorer: object, chosen: Sequence[Sample], weights: Sequence[nn.Parameter]
) -> list[Tensor]:
    rows = [list(recorded.batch["uid"]).index(sample["uid"]) for sample in chosen]
    batch = recorded.batch.select(rows)

    def loss() -> Tensor:
        flat = scorer.compute(batch, ("log_probs",))["log_probs"]  # type: ignore[attr-defined]  # checked above
        cotangents = [_cotangent(length) for length in batch.lengths("response").tolist()]
        return (flat * torch.cat(cotangents or [flat.new_zeros(0)]).to(flat)).sum()

    return recorded.parts.turns.gradients(actor.model, weights, loss)


def _through_padding(
    recorded: RecordedStep, actor: OpenEngine, chosen: Sequence[Sample], weights: Sequence[nn.Parameter]
) -> list[Tensor]:
    """chosen: one sample, or none: then one token runs through the model, with gradient 0."""
    tokens = [ids_of(sample) for sample in chosen] or [((0,), (0,))]

    def loss() -> Tensor:
        (logits,) = logits_of(_at_once, actor.model, tokens)
        ids = torch.tensor(tokens[0][1], device=logits.device)
        temperature = recorded.sampling(chosen[0]).temperature if chosen else 1.0
        scores = (logits / temperature).log_softmax(-1)
        log_probs = scores.gather(-1, ids[:, None])[:, 0]
        return (log_probs * _cotangent(len(ids)).to(log_probs)).sum() * float(len(chosen))

    with plainly(actor.model, compute_dtype=dtype_of(actor)):
        return recorded.parts.turns.gradients(actor.model, weights, loss)


def _at_once(model: nn.Module, **inputs: object) -> Any:
    return model(**inputs)


def _cotangent(length: int) -> Tensor:
    """Fixed numbers of both signs, in place of a loss's gradient."""
    return torch.cos(torch.arange(length, dtype=torch.float32) + 1.0)


BACKWARD = Check(
    "backward",
    "a gradient by log-probs reaches the weights equally through the packed pass and the model's own padded one",
    "a train engine that exposes its model",
    f"{EXACT:g} relative (bfloat16: {ROUNDED:g})",
    audit_backward,
)


def audit_gradients(recorded: RecordedStep) -> str | None:
    seen = [update for update in recorded.updates if isinstance(update.engine, OpenEngine)]
    if not seen:
        return "no update of an engine that exposes its model was recorded"
    for update in seen:
        if update.leftover:
            raise Wrong(
                f"a mini-batch of the {update.role} began with gradients left over from the one before "
                f"({update.leftover[0]} and {len(update.leftover) - 1} more weights): they were not cleared"
            )
        if update.norm is not None and not update.metrics.get("skipped"):
            _clipped(recorded, update, update.norm)
    return "gradients of several ranks are summed before they are seen" if recorded.parts.num_ranks > 1 else None


def _clipped(recorded: RecordedStep, update: UpdateRecord, norm: float) -> None:
    settings = recorded.config.critic if update.role == "critic" else recorded.config.actor_rollout_ref.actor
    reported, most = float(update.metrics["grad_norm"]), settings.max_grad_norm
    factor = 1.0 if most is None else min(1.0, most / (reported + 1e-6))
    if not abs(norm - reported * factor) <= LIMIT * reported + 1e-9:
        raise Wrong(
            f"the {update.role}'s optimizer was given a gradient of norm {norm:.4g}, but it was measured as "
            f"{reported:.4g} and max_grad_norm is {most}: it should be {reported * factor:.4g}"
        )
    if recorded.parts.num_ranks > 1:
        return
    for name, stripe in update.stripes.items():
        if stripe.gradient is None or stripe.contributions is None:
            continue
        gap = float((stripe.gradient - stripe.contributions * factor).norm())
        if not gap <= 10 * LIMIT * float(stripe.gradient.norm()) + 1e-7 * reported:
            raise Wrong(
                f"the gradient of {name} that the {update.role}'s optimizer was given is not the sum of the "
                "micro-batches' gradients times the clip factor: some was left over, dropped or scaled"
            )


GRADIENTS = Check(
    "gradients",
    "a mini-batch's gradient starts from zero and is the sum of its micro-batches' gradients, clipped to max_grad_norm",
    "a train engine that exposes its model",
    f"{LIMIT:g} relative",
    audit_gradients,
)
