"""Episodes of two turns: the model reviews what it wrote
(`distflow train examples/two_turns.yaml`)."""

from distflow import workflow


@workflow
async def review(chat, row, reward_fn, *, question: str = "=?"):
    await chat.ask(row.prompt, max_tokens=chat.response_left // 2)
    return await reward_fn(await chat.ask(question))
