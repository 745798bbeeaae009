"""A game of two turns: guess a number with feedback (`distflow train examples/multi_turn.yaml`)."""

from distflow import workflow


def numbers():
    """The rows of the data: a number from 1 to 3 each."""
    return [{"prompt": "?", "answer": str(number)} for number in (1, 2, 3)]


@workflow
async def guess(chat, row, *, max_turns: int = 2):
    number = int(row.ground_truth)
    reply = await chat.ask(row.prompt, max_tokens=1)
    while reply.text != row.ground_truth and chat.turns < max_turns:
        is_lower = reply.text.isdigit() and int(reply.text) < number
        reply = await chat.ask(">" if is_lower else "<", max_tokens=1)
    return {"found": reply.text == row.ground_truth}
