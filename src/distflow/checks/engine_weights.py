"""Check: the rollout engine computes with the trainer's weights."""

from distflow.checks.check import NOT_APPLICABLE, Wrong, check
from distflow.checks.recorded_step import RecordedStep


@check(
    "weights",
    "the rollout engine's tensors are the trainer's of the same version, cast to its dtype",
    needs="an engine on this worker; no unmerged adapter",
    limit="equal hashes of sampled elements of each tensor",
)
def check_weights(recorded: RecordedStep) -> str | None:
    resources = recorded.run.resources
    if resources.rollout is None or resources.actor is None:
        generates = recorded.is_written("rollout_log_probs")
        if generates:
            return "the rollout engine is on another worker"
        return NOT_APPLICABLE

    if not recorded.sent_hashes:
        return (
            "no weights were synced, or an adapter is applied unmerged, on the trainer's own "
            "storage"
        )

    found = recorded.run.engine_hashes()
    different = [name for name, own in recorded.sent_hashes.items() if found.get(name) != own]
    if different:
        raise Wrong(
            f"the rollout engine serves version {recorded.synced_version}, but {len(different)} of "
            f"its tensors are not the trainer's of that version ({', '.join(different[:4])}): they "
            "were not sent, or not loaded"
        )

    return None
