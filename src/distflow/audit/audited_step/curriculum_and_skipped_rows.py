"""Checks: the shares that a curriculum gives to the domains, and the rows that the difficulty
filter skips, follow from what each step reports."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from distflow.audit.check import NOT_APPLICABLE, Sample, Wrong, check
from distflow.audit.recorded_step import RecordedStep, by_group_of
from distflow.config.derived_settings import filters_groups
from distflow.scheduling.group_states import PromptGroup

ROUNDING = 2e-6
"""Shares are multiples of a millionth."""


@check(
    "curriculum",
    "the shares of `learnability` are the weights times the moving means of p · (1 - p), which is "
    "computed "
    "from the groups of each step; the number of groups of each domain follows from the shares so "
    "far",
    needs="data.curriculum; for shares: the function `learnability`; for groups: one rank; for "
    "reports: also "
    "async.max_staleness=0, no filter and no oversampling",
    limit=f"{ROUNDING:g} of a share, 1 + 1/2 + … + 1/n groups with n domains",
)
def audit_curriculum(recorded: RecordedStep) -> str | None:
    data = recorded.run.spec.data
    state = recorded.run.state
    metrics = recorded.metrics
    if data.curriculum is None:
        return NOT_APPLICABLE
    weights = {domain.name: domain.weight for domain in data.domains}
    if recorded.step == 0:
        due = dict.fromkeys(weights, 0.0)
        state["curriculum"] = {
            "step": 0,
            "due": due,
            "means": {},
            "changes": [[0, _normal(weights)]],
        }
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
        _check_measured(recorded, past)
    if (recorded.step + 1) % data.curriculum.every == 0:
        worth = {
            name: weight * max(past["means"].get(name, 0.25), 0.05)
            for name, weight in weights.items()
        }
        past["changes"].append([recorded.step + 1 + data.max_staleness, _normal(worth)])
        del past["changes"][: -2 - data.max_staleness]
    return None


def _normal(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _check_groups(recorded: RecordedStep, due: Mapping[str, float]) -> None:
    counts = recorded.run.state.get("domains", {})
    batch = recorded.run.spec.data.consumer_batch
    if sum(counts.values()) == batch * (recorded.step + 1):  # no step was short
        most = sum(1 / number for number in range(1, len(due) + 1))
        rounding = ROUNDING * batch * (recorded.step + 1)
        for name, wanted in due.items():
            if not -1 - rounding < wanted - counts.get(name, 0) <= most + rounding:
                had = f"has had {counts.get(name, 0)} groups"
                raise Wrong(f"domain '{name}' {had}, but by its shares in all steps {wanted:.1f}")


def _check_measured(recorded: RecordedStep, past: dict[str, Any]) -> None:
    """past: among others `told`, by domain since the last change of shares: the sum of p · (1 - p)
    over the groups, their number, and how many of their responses are correct and have a score."""
    data = recorded.run.spec.data
    config = recorded.config
    filters = filters_groups(config) or config.algorithm.filter_groups.should_accept
    if data.max_staleness or data.oversampling or filters or data.curriculum is None:
        return
    told = past.setdefault("told", {})
    for group in by_group_of(recorded.samples).values():
        if scored := [float(sample["acc"]) >= 1 - 1e-6 for sample in group if sample["valid"]]:
            before = told.get(str(group[0]["domain"]), (0.0, 0, 0, 0))
            p = fmean(scored)
            now = (p * (1 - p), 1, sum(scored), len(scored))
            told[str(group[0]["domain"])] = [
                one + other for one, other in zip(before, now, strict=True)
            ]
    if (recorded.step + 1) % data.curriculum.every:
        return
    past["told"] = {}
    for name in (domain.name for domain in data.domains):
        total, number, num_right, num_scored = told.get(name, (0.0, 0, 0, 0))
        means = {"learnability": (total, number), "accuracy": (num_right, num_scored)}
        for what, (own, count) in means.items():
            found = recorded.metrics.get(f"domains/{name}/{what}")
            wanted = own / count if count else None
            if (found is None) != (wanted is None) or abs(
                (found or 0.0) - (wanted or 0.0)
            ) > ROUNDING:
                raise Wrong(
                    f"the curriculum was told the {what} {found} of domain '{name}'; its groups "
                    f"show {wanted}"
                )


RIGHT = 1 - 1e-6
EASY = "async/dropped/too_easy"
HARD = "async/dropped/too_hard"


@check(
    "skipped_rows",
    "a row is skipped for skip_epochs epochs if its share of correct responses was outside "
    "data.skip_outside, and "
    "no other row is skipped",
    needs="one worker and source, the run's start, and neither staleness, filter, oversampling nor "
    "rows that repeat in "
    "a step",
    limit="equal",
)
def audit_skipped_rows(recorded: RecordedStep) -> str | None:
    data = recorded.run.spec.data
    state = recorded.run.state
    config = recorded.config
    if data.skips is None:
        return NOT_APPLICABLE
    filters = filters_groups(config) or config.algorithm.filter_groups.should_accept is not None
    is_mixed = data.max_staleness or data.oversampling or filters or data.domains
    if is_mixed or len(recorded.run.spec.plan.ranks) > 1 or data.num_rows < 2 * data.consumer_batch:
        return "which rows were known when a group started does not follow from the steps"
    _check_in_a_row(recorded, data.skips.epochs)
    if recorded.step == 0:
        state["skips"] = {"step": 0, "next": 0, "left": {}, "skipped": {}}
    kept = state.get("skips", {})
    if kept.get("step") != recorded.step or "reward_errors" not in recorded.batch:
        return "steps before this one were not followed"
    groups = by_group_of(recorded.samples)
    left = kept["left"]
    row_of = dict[int, str]()
    in_turn = 0
    # all groups of a step start before any has a score
    for number in range(kept["next"], max(groups, default=-1) + 1):
        row = row_of[number] = str(
            recorded.place_of(PromptGroup(number, 0, 0, data.group_size, 0))[1]
        )
        in_turn = 0 if number in groups else in_turn + 1
        if in_turn == data.num_rows:  # the next row is taken in any case
            state["skips"] = {}
            return "all rows of an epoch were skipped"
        if number in groups and row in left:
            raise Wrong(
                f"group {number} is of row {row}, which data.skip_outside skips {left[row][0]} "
                "more times"
            )
        if number not in groups and row in left:
            name = left[row][1]
            kept["skipped"][name] = kept["skipped"].get(name, 0) + 1
            left[row][0] -= 1
            if not left[row][0]:
                del left[row]
    (low, high), reasons = next(iter(data.skips.outside.values())), dict[str, set[str]]()
    for number, group in groups.items():
        if (share := _share_right(group)) is not None:
            reasons.setdefault(row_of[number], set()).add(
                EASY if share > high else HARD if share < low else ""
            )
    if any(len(found) > 1 for found in reasons.values()):
        state["skips"] = {}
        return "a row came twice in a step"
    left.update({row: [data.skips.epochs, name] for row, (name,) in reasons.items() if name})
    kept["step"], kept["next"] = recorded.step + 1, max([kept["next"] - 1, *groups]) + 1
    for name in (EASY, HARD):
        found = recorded.metrics.get(name, 0.0)
        expected = kept["skipped"].get(name, 0)
        if found != expected:
            raise Wrong(
                f"{found:.0f} rows were skipped so far as {name}, but their responses give "
                f"{expected}"
            )
    return None


def _check_in_a_row(recorded: RecordedStep, epochs: int) -> None:
    """No row is skipped more than `epochs` times in a row. Goes on where it is not known which rows
    must be skipped."""
    data = recorded.run.spec.data
    groups = {*recorded.batch["group_index"].tolist()}
    if recorded.step == 0:
        recorded.run.state["skipped_in_a_row"] = {"step": 0, "next": 0, "times": {}}
    kept = recorded.run.state.get("skipped_in_a_row", {})
    metrics = recorded.metrics
    dropped_else = (
        metrics.get("async/rejected", 0.0) - metrics.get(EASY, 0.0) - metrics.get(HARD, 0.0)
    )
    if kept.get("step") != recorded.step or dropped_else:
        return
    times = kept["times"]
    others = 0
    for number in range(kept["next"], max(groups, default=-1) + 1):
        row = str(recorded.place_of(PromptGroup(number, 0, 0, data.group_size, 0))[1])
        times[row], others = (0, 0) if number in groups else (times.get(row, 0) + 1, others + 1)
        if times[row] > epochs and others < data.num_rows:
            raise Wrong(
                f"row {row} was skipped {times[row]} times in a row, but data.skip_epochs is "
                f"{epochs}"
            )
    kept["step"], kept["next"] = recorded.step + 1, max([kept["next"] - 1, *groups]) + 1


def _share_right(group: Sequence[Sample]) -> float | None:
    rights = [float(sample["acc"]) >= RIGHT for sample in group if sample["valid"]]
    return sum(rights) / len(rights) if rights else None
