"""Checks: a step holds its groups, each complete, and no group that the filter should have dropped; the loss mask is on
exactly the tokens that the policy generated, the end token included, of samples that have a score."""

from collections import Counter

from distflow.audit.recorded_data import Check, RecordedStep, Sample, Wrong
from distflow.config.derived_settings import algorithm_of
from distflow.config.per_domain import filters_groups, unfiltered_domains


def audit_groups(recorded: RecordedStep) -> str | None:
    if recorded.parts.num_ranks > 1:
        return "a step's groups are divided over several ranks"
    groups: dict[int, list[Sample]] = {}
    for sample in recorded.samples:
        groups.setdefault(int(sample["group_index"]), []).append(sample)
    if sorted(groups) != sorted(recorded.group_ids):
        missing = sorted(set(recorded.group_ids) ^ set(groups))
        raise Wrong(
            f"the step has {len(recorded.group_ids)} groups, but its samples are of {len(groups)} ({missing[:4]} "
            "differ)"
        )
    data, ours = recorded.parts.data, recorded.is_ours("responses")
    own = {domain.name: domain.group_size for domain in data.domains}
    for number, group in groups.items():
        size = own.get(str(group[0]["domain"])) or data.group_size
        if ours and len(group) != size:
            raise Wrong(f"group {number} has {len(group)} samples, and should have {size}")
    uids = Counter(str(sample["uid"]) for sample in recorded.samples)
    if uids and max(uids.values()) > 1:
        raise Wrong(f"sample {uids.most_common(1)[0][0]} is in the step {uids.most_common(1)[0][1]} times")
    _check_filter(recorded, groups)
    return None


def _check_filter(recorded: RecordedStep, groups: dict[int, list[Sample]]) -> None:
    settings = recorded.config.algorithm.filter_groups
    filters = any(node.node_id == "dynamic_sampling" for node in recorded.parts.pipeline.nodes)
    if not filters_groups(recorded.config) or not filters or settings.metric != "acc":
        return
    unfiltered = unfiltered_domains(recorded.config)
    for number, group in groups.items():
        if group[0]["domain"] in unfiltered:
            continue
        values = {float(sample["acc"]) for sample in group if sample["valid"] and not sample.get("reward_errors")}
        if len(values) < 2:
            raise Wrong(
                f"group {number} was kept though all its samples have the accuracy {values}: it has zero advantage"
            )


GROUPS = Check(
    "groups",
    "the step holds its groups, each with all its samples once; if groups are filtered by accuracy, no group has equal "
    "accuracy on all samples",
    "one rank",
    "equal",
    audit_groups,
)


def audit_masks(recorded: RecordedStep) -> str | None:
    if recorded.is_written("loss_mask") and not recorded.is_ours("loss_mask"):
        return "a user's node writes loss_mask"
    for sample in recorded.samples:
        made = (sample["versions"] >= 0).double()
        found = recorded.generation(sample)
        if found is not None and int(made.sum()) != len(found[1].token_ids):
            raise Wrong(
                f"sample {sample['uid']}: {int(made.sum())} tokens are marked as the policy's, but it generated "
                f"{len(found[1].token_ids)}"
            )
        for name, expected in (("response_mask", made), ("loss_mask", made * float(sample["valid"]))):
            algorithm = algorithm_of(recorded.config, sample["domain"])
            bounds = (algorithm.difficulty_mask, algorithm.mask_long_errors)
            masks = algorithm.mask_truncated or any(bound is not None for bound in bounds)
            may_miss = name == "loss_mask" and (masks or bool(algorithm.rollout_correction.rollout_rs))
            differs = sample[name].double() != expected
            wrong = differs & (expected == 0) if may_miss else differs
            if bool(wrong.any()):
                token = int(wrong.nonzero()[0])
                raise Wrong(
                    f"{name} is {float(sample[name][token]):g} at token {token} of {len(expected)} of sample "
                    f"{sample['uid']}, but must be {float(expected[token]):g}: the token is "
                    f"{'the' if made[token] else 'not the'} policy's, the sample is "
                    f"{'valid' if sample['valid'] else 'without a score'}"
                )
    return None


MASKS = Check(
    "masks",
    "loss_mask is on each token that the policy generated, the end token included, and on no other",
    "no user's node that writes loss_mask",
    "equal",
    audit_masks,
)
