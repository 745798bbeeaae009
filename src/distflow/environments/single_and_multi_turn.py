"""Built-in workflows scored by the run's reward functions: a single turn, several turns with feedback, a solver and a
checker."""

from distflow.environments.agent_chats import Agents
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


@workflow
async def solver_checker(
    agents: Agents,
    row: Row,
    reward_fn: RewardFn,
    *,
    question: str = "{prompt}\n{response}\nIs this response correct? Answer yes or no.",
    yes: str = "yes",
) -> Rewarded | dict[str, float]:
    """The agent `solver` responds to the prompt, and `checker` says whether the response is correct. The solver's score
    is that of the reward functions, and the checker's is 1 if it agrees with their accuracy, else 0.

    yes: the checker's reply contains it, in any case, if it finds the response correct.
    """
    reply = await agents["solver"].ask(row.prompt)
    rewarded = await reward_fn(reply)
    if rewarded.score is None:
        return rewarded
    said = [str(message["content"]) for message in row.prompt.messages]
    asked = question.format(prompt=said[-1] if said else row.prompt, response=reply.text)
    is_found_right = yes.lower() in (await agents["checker"].ask(asked)).text.lower()
    agrees = float(is_found_right == (rewarded.accuracy >= RIGHT))
    return {"solver": rewarded.score, "checker": agrees, "acc": rewarded.accuracy}
