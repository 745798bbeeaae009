"""Two agents share two jobs: the second one hears what the first one chose, and does well to choose
the other (`distflow train examples/two_agents.yaml`)."""

from distflow import workflow


def jobs():
    """The rows of the data: two jobs, named by a digit each."""
    return [{"prompt": "12", "answer": ""}]


@workflow
async def share(agents, row):
    first = await agents["ann"].ask(row.prompt, max_tokens=1)
    second = await agents["bob"].ask(f"{row.prompt}, not {first.text}", max_tokens=1)
    return {"done": len({first.text, second.text} & {*row.prompt}) / 2}
