"""Check: a step holds its groups, each complete and of the row that its number gives."""

from collections import Counter

from distflow.checks.check import Wrong, check
from distflow.checks.recorded_step import RecordedStep
from distflow.scheduling.group_states import PromptGroup


@check(
    "groups",
    "the step contains its groups, each with all of its samples exactly once, and each of the row "
    "that its number gives; the groups of a domain follow one another",
    needs="for rows: groups that this process generated",
    limit="equal",
)
def check_groups(recorded: RecordedStep) -> str | None:
    data = recorded.run.spec.data
    names = ("group_index", "domain", "uid")
    own = [tuple(sample[name] for name in names) for sample in recorded.samples]
    samples = [each for rank in recorded.run.ranks.gather(own) for each in rank]
    sizes = Counter(int(group) for group, _, _ in samples)
    if sorted(sizes) != sorted(recorded.group_ids):
        differing = sorted(set(recorded.group_ids) ^ set(sizes))[:4]
        raise Wrong(
            f"the step has {len(recorded.group_ids)} groups, but its samples are of {len(sizes)} "
            f"({differing} differ)"
        )
    is_ours = recorded.is_ours("responses")
    size_of = {domain.name: domain.group_size for domain in data.domains}
    for group, domain, _ in samples:
        size = size_of.get(str(domain)) or data.group_size
        if is_ours and sizes[int(group)] != size:
            raise Wrong(
                f"group {int(group)} has {sizes[int(group)]} samples, and should have {size}"
            )
    for uid, times in Counter(uid for _, _, uid in samples).most_common(1):
        if times > 1:
            raise Wrong(f"sample {uid} is in the step {times} times")
    if is_ours:
        _check_rows(recorded)
    return None


def row_of(recorded: RecordedStep, prompt_group: PromptGroup) -> int:
    """The number of the group's row. Raises Wrong if it was generated from another."""
    _, row = recorded.place_of(prompt_group)
    if prompt_group.row != row:
        raise Wrong(
            f"group {prompt_group.group_id} was generated from row {prompt_group.row} of the data, "
            f"but its number gives row {row}"
        )
    return row


def _check_rows(recorded: RecordedStep) -> None:
    """Every group generated here is of its row; positions in a domain are consecutive."""
    last = recorded.run.positions
    for number, record in sorted(recorded.records.items()):
        group = record.prompt_group
        row_of(recorded, group)
        known = last.setdefault(group.stream, [-1, -1])
        if recorded.run.spec.data.domains and (number > known[0]) != (group.position > known[1]):
            raise Wrong(
                f"group {number} is at position {group.position} of its domain, but {known[0]} at "
                f"{known[1]}"
            )
        last[group.stream] = max(known, [number, group.position])
