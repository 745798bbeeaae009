"""Claim: a step holds the groups of its tickets, whole; where groups are filtered, each has something to teach."""

from collections import Counter

from distflow.config.by_domain import filters_groups, unfiltered_domains
from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence, Sample


def prove(evidence: Evidence) -> str | None:
    if evidence.parts.num_ranks > 1:
        return "a step's groups lie on several ranks"
    groups: dict[int, list[Sample]] = {}
    for sample in evidence.samples:
        groups.setdefault(int(sample["group_index"]), []).append(sample)
    if sorted(groups) != sorted(evidence.tickets):
        missing = sorted(set(evidence.tickets) ^ set(groups))
        raise Wrong(
            f"the step is of {len(evidence.tickets)} tickets, but its samples of {len(groups)} ({missing[:4]} differ)"
        )
    data, ours = evidence.parts.data, evidence.is_ours("responses")
    own = {domain.name: domain.group_size for domain in data.domains}
    for number, group in groups.items():
        size = own.get(str(group[0]["domain"])) or data.group_size
        if ours and len(group) != size:
            raise Wrong(f"group {number} has {len(group)} samples, and should have {size}")
    uids = Counter(str(sample["uid"]) for sample in evidence.samples)
    if uids and max(uids.values()) > 1:
        raise Wrong(f"sample {uids.most_common(1)[0][0]} is in the step {uids.most_common(1)[0][1]} times")
    _teach(evidence, groups)
    return None


def _teach(evidence: Evidence, groups: dict[int, list[Sample]]) -> None:
    settings = evidence.config.algorithm.filter_groups
    filters = any(node.node_id == "dynamic_sampling" for node in evidence.parts.program.nodes)
    if not filters_groups(evidence.config) or not filters or settings.metric != "acc":
        return
    unfiltered = unfiltered_domains(evidence.config)
    for number, group in groups.items():
        if group[0]["domain"] in unfiltered:
            continue
        values = {float(sample["acc"]) for sample in group if sample["valid"] and not sample.get("reward_errors")}
        if len(values) < 2:
            raise Wrong(
                f"group {number} was kept though all its samples have the accuracy {values}: it teaches nothing"
            )


CHECK = Check(
    "groups",
    "the step holds the groups of its tickets, each with all its samples once; where groups are filtered by accuracy, "
    "none whose samples all have the same",
    "one rank",
    "equal",
    prove,
)
