"""The domains of a run: a row for each."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.observe.findings.finding import Steps

MAX_ROWS = 100


def domain_table(steps: Steps) -> list[dict[str, Any]]:
    """A row for each domain, at most `MAX_ROWS`; empty without at least two.

    share: of all groups that were trained on. reward: over the first and the last tenth of the
    steps. accuracy: at the first and the last validation. calls: of reward functions in training;
    errors, timeouts: of these. dropped: groups by reason. None: not measured.
    """
    found: dict[str, list[float]] = {}
    for _, values in sorted(steps.items()):
        for name, value in values.items():
            if math.isfinite(value):
                found.setdefault(name, []).append(value)
    domains = set()
    for name in found:
        match = re.fullmatch(r"domains/(.+)/groups|val_correct/(.+)/mean", name)
        if match:
            domains.add(match[1] or match[2])
    domains.discard("all")
    if len(domains) < 2:
        return []
    rows = [_row(domain, found) for domain in sorted(domains)[:MAX_ROWS]]
    total = sum(row["groups"] or 0 for row in rows)
    for row in rows:
        row["share"] = row["groups"] / total if row["groups"] is not None and total else None
    return rows


def _row(domain: str, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """values: by metric, in the order of the steps."""
    start = f"domains/{domain}"
    dropped = {}
    for name, counts in sorted(values.items()):
        if name.startswith(f"{start}/dropped/") and counts[-1]:
            dropped[name.removeprefix(f"{start}/dropped/")] = round(counts[-1])

    def total(name: str) -> int | None:
        found = values.get(f"{start}/{name}")
        return round(sum(found)) if found else None

    return {
        "name": domain,
        "groups": total("groups"),
        "reward": _ends(values.get(f"reward/{domain}/mean_score", ()), 10),
        "accuracy": _ends(values.get(f"val_correct/{domain}/mean", ())),
        "calls": total("calls"),
        "errors": total("errors") or 0,
        "timeouts": total("timeouts") or 0,
        "dropped": dropped,
    }


def _ends(values: Sequence[float], parts: int | None = None) -> list[float] | None:
    """The first and the last value; with `parts` the means of the first and the last of so many
    parts. Only one if there is one value."""
    if not values:
        return None
    size = max(len(values) // parts, 1) if parts else 1
    ends = [sum(values[:size]) / size, sum(values[-size:]) / size]
    return ends[: len(values)]
