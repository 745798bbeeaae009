"""Check: exactly those rows are skipped whose share of correct responses in earlier steps requires it."""

from collections.abc import Sequence

from distflow.audit.recorded_step import NOT_APPLICABLE, RecordedStep, Sample, Wrong, by_group_of, check
from distflow.config.derived_settings import filters_groups
from distflow.scheduling.group_states import PromptGroup

RIGHT = 1 - 1e-6
EASY, HARD = "async/dropped/too_easy", "async/dropped/too_hard"


@check(
    "skipped_rows",
    "a row is skipped for skip_epochs epochs if its share of correct responses was outside data.skip_outside, and "
    "no other row is skipped",
    needs="one worker and source, the run's start, and neither staleness, filter, oversampling nor rows that repeat in "
    "a step",
    limit="equal",
)
def audit_skipped_rows(recorded: RecordedStep) -> str | None:
    data, state, config = recorded.run.spec.data, recorded.run.state, recorded.config
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
    groups, left = by_group_of(recorded.samples), kept["left"]
    row_of, in_turn = dict[int, str](), 0
    for number in range(kept["next"], max(groups, default=-1) + 1):  # all groups of a step start before any has a score
        row = row_of[number] = str(recorded.place_of(PromptGroup(number, 0, 0, data.group_size, 0))[1])
        in_turn = 0 if number in groups else in_turn + 1
        if in_turn == data.num_rows:  # the next row is taken in any case
            state["skips"] = {}
            return "all rows of an epoch were skipped"
        if number in groups and row in left:
            raise Wrong(f"group {number} is of row {row}, which data.skip_outside skips {left[row][0]} more times")
        if number not in groups and row in left:
            name = left[row][1]
            kept["skipped"][name] = kept["skipped"].get(name, 0) + 1
            left[row][0] -= 1
            if not left[row][0]:
                del left[row]
    (low, high), reasons = next(iter(data.skips.outside.values())), dict[str, set[str]]()
    for number, group in groups.items():
        if (share := _share_right(group)) is not None:
            reasons.setdefault(row_of[number], set()).add(EASY if share > high else HARD if share < low else "")
    if any(len(found) > 1 for found in reasons.values()):
        state["skips"] = {}
        return "a row came twice in a step"
    left.update({row: [data.skips.epochs, name] for row, (name,) in reasons.items() if name})
    kept["step"], kept["next"] = recorded.step + 1, max([kept["next"] - 1, *groups]) + 1
    for name in (EASY, HARD):
        found, expected = recorded.metrics.get(name, 0.0), kept["skipped"].get(name, 0)
        if found != expected:
            raise Wrong(f"{found:.0f} rows were skipped so far as {name}, but their responses give {expected}")
    return None


def _check_in_a_row(recorded: RecordedStep, epochs: int) -> None:
    """No row is skipped more than `epochs` times in a row. Goes on where it is not known which rows must be skipped."""
    data, groups = recorded.run.spec.data, {*recorded.batch["group_index"].tolist()}
    if recorded.step == 0:
        recorded.run.state["skipped_in_a_row"] = {"step": 0, "next": 0, "times": {}}
    kept = recorded.run.state.get("skipped_in_a_row", {})
    metrics = recorded.metrics
    dropped_else = metrics.get("async/rejected", 0.0) - metrics.get(EASY, 0.0) - metrics.get(HARD, 0.0)
    if kept.get("step") != recorded.step or dropped_else:
        return
    times, others = kept["times"], 0
    for number in range(kept["next"], max(groups, default=-1) + 1):
        row = str(recorded.place_of(PromptGroup(number, 0, 0, data.group_size, 0))[1])
        times[row], others = (0, 0) if number in groups else (times.get(row, 0) + 1, others + 1)
        if times[row] > epochs and others < data.num_rows:
            raise Wrong(f"row {row} was skipped {times[row]} times in a row, but data.skip_epochs is {epochs}")
    kept["step"], kept["next"] = recorded.step + 1, max([kept["next"] - 1, *groups]) + 1


def _share_right(group: Sequence[Sample]) -> float | None:
    rights = [float(sample["acc"]) >= RIGHT for sample in group if sample["valid"]]
    return sum(rights) / len(rights) if rights else None
