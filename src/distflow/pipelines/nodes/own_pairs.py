"""Preference pairs of the policy's own responses (online DPO)."""

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.graph import NodeOutput, node
from distflow.graph.fields import register_field
from distflow.runtime.rollout_loop.group import rows_by_group

register_field("preferred", "int64", "sample", "1: chosen of its pair, -1: rejected, 0: in no pair")


@node(writes="preferred", scope="group", reads=("token_level_rewards", "group_index", "valid"))
def choose_pairs(batch: Batch) -> NodeOutput:
    """The best and the worst response of each group, the first ones if several are equal. A group
    whose valid responses have the same reward has no pair. `pairs/ties_frac`: their share."""
    rewards = batch["token_level_rewards"].sum(-1)
    preferred = torch.zeros(len(batch), dtype=torch.int64)
    num_ties = 0
    groups = rows_by_group(batch)
    for rows in groups.values():
        valid = [row for row in rows if batch["valid"][row]]
        of_rows = rewards[valid].tolist()
        if len(set(of_rows)) < 2:
            num_ties += 1
            continue

        preferred[valid[of_rows.index(max(of_rows))]] = 1
        preferred[valid[of_rows.index(min(of_rows))]] = -1

    return NodeOutput({"preferred": preferred}, {"pairs/ties_frac": num_ties / max(len(groups), 1)})


def pairs_of(batch: Batch) -> Batch:
    """The samples of pairs, in each the chosen one first."""
    preferred: Tensor = batch["preferred"]
    rows = list[int]()
    for own in rows_by_group(batch).values():
        pair = [row for row in own if preferred[row]]
        rows += sorted(pair, key=lambda row: -int(preferred[row]))
    return batch.select(rows)
