"""Built-in workflows scored by the run's reward functions: a single turn, and several turns with feedback."""

from distflow.environments.chat import Chat
from distflow.environments.workflows import Rewarded, RewardFn, Row, workflow

RIGHT = 1.0 - 1e-6


@workflow
async def single_turn(chat: Chat, row: Row, reward_fn: RewardFn) -> Rewarded:
    """One prompt and one response, as without a workflow."""
    return await reward_fn(await chat.ask(row.prompt))


@workflow
async def multi_turn(
    chat: Chat,
    row: Row,
    reward_fn: RewardFn,
    *,
    max_turns: int = 3,
    feedback: str = "That is not correct. Try again.",
    turn_discount: float = 1.0,
) -> Rewarded:
    """Ask until the answer is right, at most `max_turns` times, with feedback after a wrong one.

    turn_discount: a factor on the score for each turn after the first.
    """
    rewarded = await reward_fn(await chat.ask(row.prompt))
    while rewarded.accuracy < RIGHT and chat.finish_reason == "stop":
        if chat.turns >= max_turns:
            chat.finish_reason = "max_turns"
            break
        reply = await chat.ask(feedback)
        if not reply.token_ids:
            break
        rewarded = await reward_fn(reply)
    return rewarded.discounted(turn_discount ** (sum(segment.owner == "policy" for segment in chat.segments) - 1))
