"""The plainest workflow: a prompt is answered once."""

from distflow.data.prompts import PromptRow
from distflow.data.sample import Sample, Segment
from distflow.environments.workflow import Generate
from distflow.flow.ticket import Ticket


async def single_turn(generate: Generate, prompt: PromptRow, ticket: Ticket) -> list[Sample]:
    """All samples of one group, each with one policy segment."""
    turns = await generate(prompt.prompt_ids)
    return [
        Sample(
            uid=f"{ticket.number}-{i}",
            group_index=ticket.number,
            segments=[Segment("prompt", tuple(prompt.prompt_ids)), turn.segment],
            episode=i,
            prompt=prompt.prompt_text,
            response=turn.text,
            domain=prompt.domain,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info or {},
            finish_reason=turn.finish_reason,
        )
        for i, turn in enumerate(turns)
    ]
