"""Claim: a mini-batch's gradient starts from zero, is the sum of what its micro-batches brought, clipped as asked."""

from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence
from distflow.runtime.audit.watch import OpenEngine, UpdateRecord

LIMIT = 1e-3


def prove(evidence: Evidence) -> str | None:
    seen = [update for update in evidence.updates if isinstance(update.engine, OpenEngine)]
    if not seen:
        return "no update was seen of an engine that shows its inside"
    for update in seen:
        if update.leftover:
            raise Wrong(
                f"a mini-batch of the {update.role} began with gradients left over from the one before "
                f"({update.leftover[0]} and {len(update.leftover) - 1} more weights): they were not cleared"
            )
        if update.norm is not None and not update.metrics.get("skipped"):
            _clipped(evidence, update, update.norm)
    return "gradients of several ranks are summed before they are seen" if evidence.parts.num_ranks > 1 else None


def _clipped(evidence: Evidence, update: UpdateRecord, norm: float) -> None:
    settings = evidence.config.critic if update.role == "critic" else evidence.config.actor_rollout_ref.actor
    reported, most = float(update.metrics["grad_norm"]), settings.max_grad_norm
    factor = 1.0 if most is None else min(1.0, most / (reported + 1e-6))
    if not abs(norm - reported * factor) <= LIMIT * reported + 1e-9:
        raise Wrong(
            f"the {update.role}'s optimizer was given a gradient of norm {norm:.4g}, but it was measured as "
            f"{reported:.4g} and max_grad_norm is {most}: it should be {reported * factor:.4g}"
        )
    if evidence.parts.num_ranks > 1:
        return
    for name, stripe in update.stripes.items():
        if stripe.gradient is None or stripe.contributions is None:
            continue
        gap = float((stripe.gradient - stripe.contributions * factor).norm())
        if not gap <= 10 * LIMIT * float(stripe.gradient.norm()) + 1e-7 * reported:
            raise Wrong(
                f"the gradient of {name} that the {update.role}'s optimizer was given is not the sum of what the "
                "micro-batches brought, times the clip's factor: some was left over, dropped or scaled"
            )


CHECK = Check(
    "gradients",
    "a mini-batch's gradient starts from zero and is the sum of its micro-batches' gradients, clipped to max_grad_norm",
    "a train engine that shows its inside",
    f"{LIMIT:g} relative",
    prove,
)
