"""Claim: the rollout engine computes with the trainer's weights."""

from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence


def prove(evidence: Evidence) -> str | None:
    parts = evidence.parts
    _scaled(evidence)
    if parts.hashes is None or parts.actor is None:
        return "the rollout engine is on another worker" if evidence.is_written("rollout_log_probs") else ""
    if not evidence.published:
        return "no version was published, or an adapter is applied unmerged, on the trainer's own storage"
    held = parts.hashes()
    different = [name for name, own in evidence.published.items() if held.get(name) != own]
    if different:
        raise Wrong(
            f"the rollout engine serves version {evidence.served}, but {len(different)} of its tensors are not the "
            f"trainer's of that version ({', '.join(different[:4])}): they were not sent, or not taken"
        )
    return None


def _scaled(evidence: Evidence) -> None:
    """An adapter counts by alpha over rank."""
    settings, model = evidence.config.actor_rollout_ref.model, getattr(evidence.parts.actor, "model", None)
    if not settings.lora_rank or model is None:
        return
    expected = settings.lora_alpha / settings.lora_rank
    for name, module in model.named_modules():
        for scale in getattr(module, "scaling", {}).values() if hasattr(module, "get_delta_weight") else ():
            if abs(scale - expected) > 1e-6 * expected:
                raise Wrong(f"the adapter of {name} is scaled by {scale:g}, but lora_alpha / lora_rank is {expected:g}")


CHECK = Check(
    "weights",
    "the tensors that the rollout engine computes with are the trainer's of the version that it serves, cast to its "
    "dtype",
    "an engine on this worker; not an adapter that it applies unmerged",
    "equal hashes of a stripe of each tensor",
    prove,
)
