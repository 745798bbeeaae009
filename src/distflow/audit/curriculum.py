"""Check: the shares that a curriculum gives to the domains, worked out again from what is reported of each step."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from distflow.audit.check_base import NOT_APPLICABLE, RecordedStep, Wrong, by_group_of, check
from distflow.config.domain_settings import filters_groups

ROUNDING = 2e-6
"""Shares are multiples of a millionth."""


@check(
    "curriculum",
    "the shares of `learnability` are the weights times the moving means of the reported p · (1 - p), which is "
    "computed from the step's groups; each domain has its groups by the shares so far",
    needs="data.curriculum; for shares: the function `learnability`; for groups: one rank; for reports: also "
    "async.max_staleness=0, no filter and no oversampling",
    limit=f"{ROUNDING:g} of a share, 1 + 1/2 + … + 1/n groups with n domains",
)
def audit_curriculum(recorded: RecordedStep) -> str | None:
    data, state, metrics = recorded.run.spec.data, recorded.run.state, recorded.metrics
    if data.curriculum is None:
        return NOT_APPLICABLE
    weights = {domain.name: domain.weight for domain in data.domains}
    if recorded.step == 0:
        due = dict.fromkeys(weights, 0.0)
        state["curriculum"] = {"step": 0, "due": due, "means": {}, "changes": [[0, _normal(weights)]]}
    past: dict[str, Any] = state.get("curriculum", {})
    if past.get("step") != recorded.step:
        return "steps before this one were not followed"
    past["step"] += 1
    planned = [shares for first, shares in past["changes"] if first <= recorded.step][-1]
    for name, share in planned.items():
        found = metrics[f"domains/{name}/share"]
        if data.curriculum.function == "learnability" and abs(found - share) > ROUNDING:
            raise Wrong(f"domain '{name}' has the share {found:g}, and should have {share:g}")
        past["due"][name] += found * data.consumer_batch
        if (now := metrics.get(f"domains/{name}/learnability")) is not None:
            smoothing = data.curriculum.smoothing
            past["means"][name] = smoothing * past["means"].get(name, now) + (1 - smoothing) * now
    if recorded.run.ranks.size == 1:
        _check_groups(recorded, past["due"])
        _check_measured(recorded)
    if (recorded.step + 1) % data.curriculum.every == 0:
        worth = {name: weight * max(past["means"].get(name, 0.25), 0.05) for name, weight in weights.items()}
        past["changes"].append([recorded.step + 1 + data.max_staleness, _normal(worth)])
        del past["changes"][: -2 - data.max_staleness]
    return None


def _normal(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _check_groups(recorded: RecordedStep, due: Mapping[str, float]) -> None:
    counts, batch = recorded.run.state.get("domains", {}), recorded.run.spec.data.consumer_batch
    if sum(counts.values()) == batch * (recorded.step + 1):  # no step was short
        most = sum(1 / number for number in range(1, len(due) + 1))
        rounding = ROUNDING * batch * (recorded.step + 1)
        for name, wanted in due.items():
            if not -1 - rounding < wanted - counts.get(name, 0) <= most + rounding:
                had = f"has had {counts.get(name, 0)} groups"
                raise Wrong(f"domain '{name}' {had}, but by its shares in all steps {wanted:.1f}")


def _check_measured(recorded: RecordedStep) -> None:
    data = recorded.run.spec.data
    config = recorded.run.spec.config
    filters = filters_groups(config) or config.algorithm.filter_groups.should_accept
    ahead = data.max_staleness or data.oversampling or filters
    if ahead or data.curriculum is None or data.curriculum.every != 1:
        return
    rights = dict[str, list[float]]()
    for group in by_group_of(recorded.samples).values():
        if scored := [float(sample["acc"]) >= 1 - 1e-6 for sample in group if sample["valid"]]:
            rights.setdefault(str(group[0]["domain"]), []).append(fmean(scored))
    for name in (domain.name for domain in data.domains):
        wanted = fmean(p * (1 - p) for p in rights[name]) if name in rights else None
        found = recorded.metrics.get(f"domains/{name}/learnability")
        if (found is None) != (wanted is None) or abs((found or 0.0) - (wanted or 0.0)) > ROUNDING:
            raise Wrong(
                f"the curriculum was told that p · (1 - p) of domain '{name}' is {found}; its groups show {wanted}"
            )
