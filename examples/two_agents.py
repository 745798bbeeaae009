"""Two agents share two jobs without a word: both choose at once, and each job counts once
(`distflow train examples/two_agents.yaml`)."""

import asyncio

from distflow import workflow


def jobs():
    """The rows of the data: two jobs each, named by a digit."""
    return [{"prompt": "12", "answer": ""}, {"prompt": "34", "answer": ""}]


@workflow
async def share(agents, row):
    replies = await asyncio.gather(*(agent.ask(row.prompt, max_tokens=1) for agent in agents.values()))
    chosen = {reply.text for reply in replies}
    return {"done": len(chosen & {*row.prompt}) / 2}
