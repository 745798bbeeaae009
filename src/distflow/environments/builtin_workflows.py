"""Built-in workflows that the run's reward functions score (a single turn, several turns with
feedback, a solver and a checker), and one that gives each domain its own."""

from collections.abc import Mapping
from typing import Any

from distflow.environments.chat import Agents, Chat, ChatError
from distflow.environments.workflows import (
    KEY,
    Rewarded,
    RewardFn,
    Row,
    Workflow,
    load_workflow,
    workflow,
)
from distflow.errors import UserError

RIGHT = 1.0 - 1e-6
"""The accuracy from which a reply counts as right."""


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

    num_turns = sum(segment.owner == "policy" for segment in chat.segments)
    return rewarded.discounted(turn_discount ** (num_turns - 1))


@workflow
async def solver_checker(
    agents: Agents,
    row: Row,
    reward_fn: RewardFn,
    *,
    question: str = "{prompt}\n{response}\nIs this response correct? Answer yes or no.",
    yes: str = "yes",
) -> Rewarded | dict[str, float]:
    """The agent `solver` responds to the prompt, and `checker` says whether the response is
    correct. The solver's score is that of the reward functions, and the checker's is 1 if it agrees
    with their accuracy, else 0.

    yes: the checker's reply contains it, in any case, if it finds the response correct.
    """
    reply = await agents["solver"].ask(row.prompt)
    rewarded = await reward_fn(reply)
    if rewarded.score is None:
        return rewarded

    problem = str(row.prompt)
    if row.prompt.messages:
        problem = str(row.prompt.messages[-1]["content"])
    asked = question.format(prompt=problem, response=reply.text)
    checked = await agents["checker"].ask(asked)
    is_found_right = yes.lower() in checked.text.lower()
    agrees = float(is_found_right == (rewarded.accuracy >= RIGHT))

    return {"solver": rewarded.score, "checker": agrees, "acc": rewarded.accuracy}


class ByDomain:
    """The workflow `by_domain`: each domain has its own workflow."""

    def __init__(self, **workflows: Any) -> None:
        """workflows: domain → the name of its workflow, or {workflow: NAME, **options}; `default`
        is for all other domains. Raises UserError for a workflow that cannot be used, or that takes
        agents."""
        if not workflows:
            raise UserError(
                f"{KEY}=by_domain: name a workflow for each domain: {KEY}_kwargs={{math: "
                "single_turn}"
            )

        self._own = dict[str, Workflow]()
        for domain, entry in workflows.items():
            self._own[domain] = _workflow_of_domain(domain, entry)
        self.uses_reward_fn = any(each.scores for each in self._own.values())

    async def __call__(self, chat: Chat, row: Row, reward_fn: RewardFn | None = None) -> object:
        """Raises ChatError, an error of the episode, for a domain without a workflow."""
        own = self._own.get(row.domain, self._own.get("default"))
        if own is None:
            raise ChatError(
                f"the domain '{row.domain}' has no workflow: add it to {KEY}_kwargs, or add default"
            )
        return await own(chat, row, reward_fn)


def _workflow_of_domain(domain: str, entry: Any) -> Workflow:
    options = dict(entry) if isinstance(entry, Mapping) else {"workflow": entry}

    if "workflow" not in options:
        raise UserError(
            f"{KEY}_kwargs.{domain}: name the workflow: {{workflow: NAME, OPTION: VALUE}}"
        )

    name = str(options.pop("workflow"))
    return load_workflow(name, options).check_agents({})
