"""A user's rollout node that asks the engine twice for a sample: the model reviews what it
wrote."""

from asyncio import gather
from dataclasses import replace

from distflow import NodeRole, TaskGraph, node
from distflow.data.sample import Sample, Segment
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.nodes.sample_responses import SAMPLED_FIELDS, generate
from distflow.rollout.engine import GenerateRequest


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def review(group, rollout, tokenizer, *, question: str = "=?") -> list[Sample]:
    given = Segment(
        "environment", tuple(tokenizer(question, add_special_tokens=False)["input_ids"])
    )

    async def again(sample: Sample) -> Sample:
        first = sample.segments[1].token_ids
        ids = (*sample.prompt_ids, *first, *given.token_ids)
        request = GenerateRequest(
            ids, (sample.episode,), group.params, group.stream, num_drawn=len(first)
        )
        (made,) = await rollout.generate(request)
        segments = [*sample.segments, given, made]
        text = tokenizer.decode(made.token_ids)

        return replace(sample, segments=segments, response=text, finish_reason=made.finish_reason)

    return await gather(*(again(sample) for sample in await generate(group, rollout, tokenizer)))


def two_turns(config) -> TaskGraph:
    (graph := grpo_pipeline(config)).update_node("rollout_actor", func=review)
    return graph
