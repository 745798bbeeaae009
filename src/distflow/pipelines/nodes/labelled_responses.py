"""Nodes of KTO: the labels of responses, and responses to other prompts, by which its baseline is
measured."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.mismatched import Answered, add_mismatched, answered, mismatched
from distflow.graph import NodeRole, node
from distflow.graph.fields import register_field
from distflow.runtime.node_context import NodeContext
from distflow.training.engine import Collective, Scorer
from distflow.training.mismatched_scores import mismatched_log_probs

register_field("desirable", "bool", "sample", "label of the response")
MISMATCHED = ("mismatched_ids", "mismatched_mask", "ref_mismatched_log_prob")


@node(writes="desirable")
def read_labels(extra_info: Sequence[Mapping[str, object]], ctx: NodeContext) -> Tensor:
    """The label of each row (`data.label_key`)."""
    name = ctx.config.data.label_key
    return torch.tensor([bool(extra[name]) for extra in extra_info], dtype=torch.bool)


@node(
    writes=MISMATCHED,
    role=NodeRole.REFERENCE,
    reads=("prompt_ids", "response_ids", "response_mask", "group_index"),
    scope="global",
)
def score_mismatched(
    batch: Batch, ref: Scorer, ctx: NodeContext, reduce: Collective
) -> dict[str, object]:
    """For each sample the response to another prompt of its mini-batch, over all ranks, and its
    log-prob by the reference."""
    found = dict[int, Answered]()
    num_prompts = ctx.config.actor_rollout_ref.actor.ppo_mini_batch_size
    for mini_batch in ctx.minibatches(batch, num_prompts, 0):
        of_ranks = reduce.gather(answered(mini_batch))
        found |= mismatched([row for rows in of_ranks for row in rows])

    chosen = batch.only(("prompt_ids", "group_index"))
    add_mismatched(chosen, found)
    chosen["ref_mismatched_log_prob"] = mismatched_log_probs(chosen, ref)
    return {name: chosen[name] for name in MISMATCHED}
