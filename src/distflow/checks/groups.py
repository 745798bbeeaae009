"""Check: a step holds its groups, each complete and of a row of its own."""

from collections import Counter
from itertools import chain

from distflow.checks.check import Wrong, check
from distflow.checks.recorded_step import RecordedStep


@check(
    "groups",
    "the step has all samples of its groups exactly once, and no two groups are of the same row "
    "in an epoch",
    needs="for rows: groups that this process generated",
    limit="equal",
)
def check_groups(recorded: RecordedStep) -> str | None:
    data = recorded.run.spec.data
    own = []
    for sample in recorded.samples:
        own.append((int(sample["group_index"]), str(sample["domain"]), sample["uid"]))
    samples = list(chain.from_iterable(recorded.run.ranks.gather(own)))

    sizes = Counter(group for group, _, _ in samples)
    if sorted(sizes) != sorted(recorded.group_ids):
        differing = sorted(set(recorded.group_ids) ^ set(sizes))[:4]
        raise Wrong(
            f"the step has {len(recorded.group_ids)} groups, but its samples are of {len(sizes)} "
            f"({differing} differ)"
        )

    is_ours = recorded.is_ours("responses")
    size_of = {domain.name: domain.group_size for domain in data.domains}

    for group, domain, _ in samples:
        size = size_of.get(domain) or data.group_size
        if is_ours and sizes[group] != size:
            raise Wrong(f"group {group} has {sizes[group]} samples, and should have {size}")

    for uid, times in Counter(uid for _, _, uid in samples).most_common(1):
        if times > 1:
            raise Wrong(f"sample {uid} is in the step {times} times")

    if is_ours:
        _check_rows(recorded)
    return None


def _check_rows(recorded: RecordedStep) -> None:
    """No two groups generated here are of the same row in an epoch, of the steps that are
    checked."""
    for number, record in sorted(recorded.records.items()):
        group = record.prompt_group
        epochs = recorded.run.rows_used.setdefault(group.stream, {})

        first = epochs.setdefault(group.epoch, {}).setdefault(group.row, number)
        if first != number:
            raise Wrong(
                f"group {number} was generated from row {group.row} of the data, as was group "
                f"{first} of the same epoch"
            )

        for epoch in list(epochs):
            if epoch < group.epoch - 1:
                del epochs[epoch]
