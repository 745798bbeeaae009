"""Two agents agree on a language: one sees a number and says one token, the other sees only that and names the number
(`distflow train examples/two_agents.yaml`)."""

from distflow import workflow


def numbers():
    """The rows of the data: a number from 1 to 3 each."""
    return [{"prompt": str(number), "answer": str(number)} for number in (1, 2, 3)]


@workflow
async def signal(agents, row):
    said = await agents["speaker"].ask(row.prompt, max_tokens=1)
    guess = await agents["listener"].ask(said.text, max_tokens=1)
    return {"found": guess.text == row.ground_truth}
