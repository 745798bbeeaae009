"""Runs one episode of a user's workflow with canned replies before a model is loaded, so that a mistake in it is found
in a second instead of after the first prompt groups. Describes what the chat template does between its turns."""

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Segment
from distflow.environments.chat import Chat, ChatError, Limits
from distflow.environments.parse_tool_calls import format_of
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.workflow_loading_and_builtins import KEY, Workflow, row_of
from distflow.errors import UserError, users_place
from distflow.pipelines.nodes.workflow_rollout import read_outcome, template_kwargs
from distflow.rewards.reward_results import Score
from distflow.rewards.router import RewardOutcome
from distflow.runtime.spec import Spec

REPLY = "I do not know."
_WITHIN_S = 5.0
_MISTAKES = (NameError, AttributeError, ImportError, TypeError)


def try_workflow(spec: Spec, tokenizer: Callable[[], Any]) -> list[str]:
    """Notes on an episode of the user's workflow on the first row. It runs in a fork of this process, so that no client
    or event loop of the user's code is left. Raises UserError for a mistake that does not depend on the reply. Skipped
    like the trial of reward functions."""
    trainer, nodes = spec.config.trainer, spec.pipeline().rollout_nodes
    workflow = next((found for node in nodes if (found := getattr(node.fn, "keywords", {}).get("workflow"))), None)
    if not isinstance(workflow, Workflow) or not workflow.is_tried or trainer.worker_env or trainer.worker_roles:
        return []
    row = next(iter(spec.rows[:1]), None)
    if row is None:
        return []
    kind, _, said = _in_fork(partial(_outcome, spec, workflow, row, tokenizer), _WITHIN_S).partition(" ")
    what = f"the workflow '{workflow.name}', tried on the first row ({row.origin}) with the reply {REPLY!r}"
    if kind == "fault":
        raise UserError(f"{KEY}: {what}: {said}. Correct it; trust.check_rewards=false skips this trial")
    return [] if kind == "fine" else [f"note: {what}: {said}"]


def _outcome(spec: Spec, workflow: Workflow, row: PromptRow, tokenizer: Callable[[], Any]) -> str:
    """`fault` or `note` and what was wrong with an episode; `fine` if nothing was."""
    try:
        asyncio.run(_episode(spec, workflow, row, tokenizer()))
    except BaseException as error:  # the boundary to user code
        place = f" (at {found})" if (found := users_place(error)) else ""
        depends = "'NoneType'" in str(error) or not place  # such as the match of a pattern in the reply
        is_fault = isinstance(error, ChatError | _Wrong) or isinstance(error, _MISTAKES) and not depends
        hint = ": is `await` missing?" if "coroutine" in str(error) else ""
        shown = str(error) if isinstance(error, _Wrong) else f"{type(error).__name__}: {error}"
        return f"{'fault' if is_fault else 'note'} {shown[:1000]}{hint}{place}"
    return "fine"


class _Wrong(Exception):
    """An episode that ended, and cannot be used."""


async def _episode(spec: Spec, workflow: Workflow, row: PromptRow, tokenizer: Any) -> None:
    """Raises what the workflow raises, or _Wrong."""
    config, longest = spec.config, spec.sampling.max_tokens
    reply = tuple(tokenizer.encode(REPLY, add_special_tokens=False))

    async def generate(prompt: object, most: int, stop: object, num_drawn: int) -> tuple[Segment, str]:
        await asyncio.sleep(0)
        ids, nothing = reply[:most], (0.0,) * len(reply[:most])
        return Segment("policy", ids, nothing, nothing, (0,) * len(ids)), "stop"

    told = row_of(row, config.data.prompt_key, config.data.answer_key)
    tokens = TurnTokens(tokenizer, spec.sampling.stop_token_ids, template_kwargs(config, row.domain))
    limits = Limits(longest, config.data.max_prompt_length + longest)
    templated = bool(told.prompt.messages)
    chats = [Chat(tokens, generate, limits, templated) for _ in range(workflow.num_rows)]

    async def reward(reply: object = None) -> RewardOutcome:
        return RewardOutcome(Score(0.0), {}, 0.0)

    returned = await workflow(workflow.chats(chats, config.actor_rollout_ref.rollout.agents), told, reward)
    for chat, result in zip(chats, workflow.results(returned), strict=True):
        try:
            outcome = read_outcome(result)
        except ValueError as error:
            raise _Wrong(str(error)) from error
        if outcome is not None and not any(each.num_drawn for each in chat.conversations):
            raise _Wrong("its episode ended without a token of the policy: it must await chat.ask")


def _in_fork(work: Callable[[], str], within_s: float) -> str:
    """What it returns; a note if it does not. The fork and all processes that it started are killed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the fork would write again what is waiting
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1), os.dup2(nowhere, 2)
            sys.stdout = sys.stderr = open(nowhere, "w")  # noqa: SIM115  # it ends with the process
            os.write(writes, work().encode()[:4000])
        finally:
            os._exit(0)
    os.close(writes)
    ready, _, _ = select.select([reads], [], [], within_s)
    late = f"note its episode did not end within {within_s:g} s: it is slow, or asks forever"
    said = os.read(reads, 4096).decode(errors="replace") if ready else late
    os.close(reads)
    for kill in (os.killpg, os.kill):  # before it leads a group of its own, there is none
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said or "note its episode ended the process"


def describe_turns(config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> list[str]:
    """What the chat template does between turns, in sentences. Raises UserError if it, or its tools, cannot be used."""
    tokens = TurnTokens(tokenizer, stop_ids, template_kwargs(config, ""))
    settings = config.actor_rollout_ref.rollout
    if settings.workflow in ("tools", "harbor"):
        template, format = tokens.tool_template([{}]), settings.workflow_kwargs.get("format")
        return [*tokens.describe(), f"tool calls are read in the format {format or format_of(template)}"]
    return tokens.describe()
