"""RLVR whose answers are recorded: `distflow train examples/recorded_responses.yaml`."""

from distflow import NodeRole, TaskGraph, node
from distflow.config import Config
from distflow.data.sample import Sample, Segment
from distflow.pipelines.nodes.sample_responses import RESPONSE_FIELDS
from distflow.pipelines.rlvr import rlvr_pipeline
from distflow.runtime.rollout_loop.group import Group


@node(writes=RESPONSE_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def recite(group: Group, tokenizer) -> list[Sample]:
    """The column `recorded` of the row, or else its answer: a text, or a list that the samples go
    round in."""
    recorded = (group.row.extra_info or {}).get("recorded", group.row.ground_truth)
    texts = recorded if isinstance(recorded, list) else [recorded]

    samples = []
    for index in group.wanted:
        ids = tokenizer(texts[index % len(texts)], add_special_tokens=False)["input_ids"]
        most = group.params.max_tokens
        ids = (*ids, tokenizer.eos_token_id)[:most]
        text = tokenizer.decode(ids, skip_special_tokens=True)  # cut off where its tokens are
        zeros = (0.0,) * len(ids)
        versions = (group.prompt_group.version,) * len(ids)
        segment = Segment("policy", ids, zeros, zeros, versions)
        samples.append(group.sample(index, segment, text, "length" if len(ids) == most else "stop"))

    return samples


def recorded_responses(config: Config) -> TaskGraph:
    graph = rlvr_pipeline(config)
    graph.update_node("rollout_actor", func=recite)
    return graph
