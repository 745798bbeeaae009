"""Which plane waits for the other where both may work at once."""

from collections.abc import Mapping

from distflow.observe.jsonlines import JSON
from distflow.observe.report_findings import Finding
from distflow.observe.report_planes import Planes

MANY_STEPS = 8
MUCH, LITTLE = 0.3, 0.15
"""Shares of the time from which on idleness is told, and up to which it is none."""


def idle_planes(planes: Planes, config: Mapping[str, JSON]) -> list[Finding]:
    """Over the last quarter of the steps, four at least, in which groups were still begun: at the end of a run none is
    left to generate. Nothing of a synchronous run, where one plane always waits."""
    edge = config.get("async")
    staleness = edge.get("max_staleness") if isinstance(edge, dict) else None
    begun = max((s.start for part in planes.spans.values() for s in part if s.kind == "group"), default=0.0)
    times = sorted(t for t in planes.taken.values() if t <= begun)
    if not isinstance(staleness, int) or staleness < 1 or not planes.decodes or len(times) < MANY_STEPS:
        return []
    part = times[-max(len(times) // 4, MANY_STEPS // 2) - 1 :]
    ran = planes.ran(part[0], part[-1])
    if ran <= 0:
        return []
    waited = min(planes.waited(part[0], part[-1]) / ran, 1.0)
    idle = max(1 - planes.decoded(part[0], part[-1]) / ran, 0.0)
    judged = _judged(waited, idle, staleness)
    if judged is None:
        return []
    slower, advice = judged
    text = f"The trainer waited for groups {waited:.0%} of the time and the engine was idle {idle:.0%} of it"
    return [Finding("flat", f"{text}, over the last {len(part) - 1} steps: {slower}.", advice)]


def _judged(waited: float, idle: float, staleness: int) -> tuple[str, str] | None:
    """What is slow, and what to change."""
    if waited >= MUCH and idle <= LITTLE:
        return "generation is the slower plane", (
            "Give it more threads (actor_rollout_ref.rollout.num_threads); more staleness would not make it faster."
        )
    if waited <= LITTLE and idle >= MUCH:
        lower = (
            f"; a lower async.max_staleness (now {staleness}) may do as well, on fresher data" if staleness > 1 else ""
        )
        return "training is the slower plane", f"Give it more threads (trainer.num_threads){lower}."
    if waited >= MUCH and idle >= MUCH:
        return "both wait for something else", (
            "Where verifiers take that time, give them more processes (reward.num_workers); else let more groups run: "
            f"async.max_staleness (now {staleness}), async.max_concurrent_rollouts."
        )
    return None
