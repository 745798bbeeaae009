"""Runs one episode of a user's workflow with canned replies before a model is loaded, so that a
mistake in it is found in a second instead of after the first prompt groups. Describes what the chat
template does between its turns."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Segment
from distflow.environments.chat import Chat, ChatError, Limits
from distflow.environments.parse_tool_calls import format_of
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.workflows import KEY, Workflow, row_of
from distflow.errors import UserError, users_place
from distflow.pipelines.nodes.workflow_rollout import read_outcome, template_kwargs
from distflow.processes.channel import Channel, PeerGone, encode
from distflow.processes.fork import limited_fork
from distflow.rewards.reward_results import Score
from distflow.rewards.router import RewardOutcome
from distflow.runtime.spec import Spec

REPLY = "I do not know."
_WITHIN_S = 5.0
_MORE_BYTES = 8 * 2**30
_MISTAKES = (NameError, AttributeError, ImportError, TypeError)


def try_workflow(spec: Spec, tokenizer: Callable[[], Any]) -> list[str]:
    """Notes on an episode of the user's workflow on the first row, in a fork, so that what it
    changes is no part of this process. Skipped like the trial of reward functions. Raises UserError
    for a mistake that does not depend on the reply."""
    trainer = spec.config.trainer
    workflow = _workflow_of(spec)
    row = next(iter(spec.rows[:1]), None)
    if workflow is None or row is None or not workflow.is_tried:
        return []
    if trainer.worker_env or trainer.worker_roles:
        return []
    loaded = tokenizer()

    def work(channel: Channel) -> None:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        channel.send(encode(_outcome(spec, workflow, row, loaded)))

    with limited_fork(work, _MORE_BYTES) as channel:
        try:
            outcome = str(channel.receive(_WITHIN_S))
        except TimeoutError:
            outcome = (
                f"note its episode did not end within {_WITHIN_S:g} s: it is slow, or asks forever"
            )
        except PeerGone:
            outcome = "note its episode ended the process"
    what = (
        f"the workflow '{workflow.name}', tried on the first row ({row.origin}) with the reply "
        f"{REPLY!r}"
    )
    kind, _, said = outcome.partition(" ")
    if kind == "fault":
        raise UserError(
            f"{KEY}: {what}: {said}. Correct it; trust.check_rewards=false skips this trial"
        )
    return [] if kind == "fine" else [f"note: {what}: {said}"]


def _workflow_of(spec: Spec) -> Workflow | None:
    found = (
        getattr(node.fn, "keywords", {}).get("workflow") for node in spec.pipeline().rollout_nodes
    )
    return next((each for each in found if isinstance(each, Workflow)), None)


def _outcome(spec: Spec, workflow: Workflow, row: PromptRow, tokenizer: Any) -> str:
    """`fault` or `note` and what was wrong with an episode; `fine` if nothing was."""
    try:
        asyncio.run(_episode(spec, workflow, row, tokenizer))
    except BaseException as error:  # the boundary to user code
        place = f" (at {found})" if (found := users_place(error)) else ""
        # such as the match of a pattern in the reply
        depends = "'NoneType'" in str(error) or not place
        is_fault = (
            isinstance(error, ChatError | _Wrong) or isinstance(error, _MISTAKES) and not depends
        )
        hint = ": is `await` missing?" if "coroutine" in str(error) else ""
        shown = str(error) if isinstance(error, _Wrong) else f"{type(error).__name__}: {error}"
        return f"{'fault' if is_fault else 'note'} {shown[:1000]}{hint}{place}"
    return "fine"


class _Wrong(Exception):
    """An episode that ended, and cannot be used."""


async def _episode(spec: Spec, workflow: Workflow, row: PromptRow, tokenizer: Any) -> None:
    """Raises what the workflow raises, or _Wrong."""
    config = spec.config
    longest = spec.sampling.max_tokens
    reply = tuple(tokenizer.encode(REPLY, add_special_tokens=False))

    async def generate(prompt: object, most: int, stop: object, num_drawn: int) -> Segment:
        await asyncio.sleep(0)
        ids = reply[:most]
        nothing = (0.0,) * len(ids)
        return Segment.drawn(0, ids, nothing, nothing, (0,) * len(ids), "stop")

    told = row_of(row, config.data.prompt_key, config.data.answer_key)
    tokens = TurnTokens(
        tokenizer, spec.sampling.stop_token_ids, template_kwargs(config, row.domain)
    )
    limits = Limits(longest, config.data.max_prompt_length + longest)
    templated = bool(told.prompt.messages)
    chats = [Chat(tokens, generate, limits, templated) for _ in range(workflow.num_rows)]

    async def reward(reply: object = None) -> RewardOutcome:
        return RewardOutcome(Score(0.0), {}, 0.0)

    returned = await workflow(
        workflow.chats(chats, config.actor_rollout_ref.rollout.agents), told, reward
    )
    for chat, result in zip(chats, workflow.results(returned), strict=True):
        try:
            outcome = read_outcome(result)
        except ValueError as error:
            raise _Wrong(str(error)) from error
        if outcome is not None and not any(each.num_drawn for each in chat.conversations):
            raise _Wrong("its episode ended without a token of the policy: it must await chat.ask")


def describe_turns(
    config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> list[str]:
    """What the chat template does between turns, in sentences. Raises UserError if it, or its
    tools, cannot be used."""
    tokens = TurnTokens(tokenizer, stop_ids, template_kwargs(config, ""))
    settings = config.actor_rollout_ref.rollout
    if settings.workflow == "tools":
        template = tokens.tool_template([{}])
        format = settings.workflow_kwargs.get("format")
        return [
            *tokens.describe(),
            f"tool calls are read in the format {format or format_of(template)}",
        ]
    return tokens.describe()
