"""Runs one episode of a user's workflow with canned replies before a model is loaded, so that a
mistake in it is found in a second instead of after the first prompt groups. Describes what the chat
template does between its turns."""

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Segment
from distflow.environments.chat import Chat, ChatError, Limits
from distflow.environments.parse_tool_calls import format_of
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.workflows import KEY, Workflow, row_of
from distflow.errors import UserError, describe_fault, users_place
from distflow.pipelines.nodes.episode_outcome import read_outcome
from distflow.pipelines.nodes.workflow_rollout import template_kwargs
from distflow.processes.channel import Channel, PeerGone, encode
from distflow.processes.child import Child
from distflow.processes.interpreters import python_command
from distflow.rewards.reward_results import Score
from distflow.rewards.router import RewardOutcome
from distflow.runtime.spec import Spec

REPLY = "I do not know."
_WITHIN_S = 5.0
_LOADS_WITHIN_S = 120.0
_MISTAKES = (NameError, AttributeError, ImportError, TypeError)


class WorkflowTrial:
    """An episode of the user's workflow on the first row, in another process.

    That process has loaded the user's code itself. What it started there (pools, threads,
    connections) is no part of this process, where a lock that it held when it was killed would stay
    locked.
    """

    def __init__(self, spec: Spec, tokenizer: Callable[[], Any]) -> None:
        """Begin the episode, if there is one to try: skipped like the trial of reward functions."""
        self._child: Child | None = None
        trainer = spec.config.trainer
        workflow = _workflow_of(spec)
        if workflow is None or not workflow.is_tried or trainer.worker_env or trainer.worker_roles:
            return

        row = next(iter(spec.rows[:1]), None)
        if row is None:
            return

        self._what = (
            f"the workflow '{workflow.name}', tried on the first row ({row.origin}) with the reply "
            f"{REPLY!r}"
        )
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)

        with theirs, TemporaryFile() as given:  # which no other user can read
            given.write(pickle.dumps((spec, row, tokenizer)))
            given.seek(0)
            self._child = Child(
                python_command(__name__, theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=given,
            )

    def notes(self) -> list[str]:
        """Wait for the episode's end. Raises UserError for a mistake that does not depend on the
        reply."""
        if self._child is None:
            return []

        kind, _, said = self._wait().partition(" ")
        if kind == "fault":
            raise UserError(
                f"{KEY}: {self._what}: {said}. Correct it; trust.check_rewards=false skips this "
                "trial"
            )
        if kind == "fine":
            return []

        return [f"note: {self._what}: {said}"]

    def close(self) -> None:
        """End the process, and everything that it started."""
        if self._child is not None:
            self._child.end()
            self._channel.close()

    def _wait(self) -> str:
        within_s = _LOADS_WITHIN_S
        try:
            outcome = self._channel.receive(within_s)
            if outcome is None:  # the code is loaded
                within_s = _WITHIN_S
                outcome = self._channel.receive(within_s)
            return str(outcome)
        except TimeoutError:
            return (
                f"note its episode did not end within {within_s:g} s: it is slow, or asks forever"
            )
        except PeerGone:
            return "note its episode ended the process"


@contextmanager
def tried_workflow(spec: Spec, tokenizer: Callable[[], Any]) -> Iterator[WorkflowTrial]:
    """A trial that runs beside what is done inside."""
    trial = WorkflowTrial(spec, tokenizer)
    try:
        yield trial
    finally:
        trial.close()


def main() -> None:
    """The other process: load what standard input names, send null, and then the outcome."""
    connected = socket.socket(fileno=int(sys.argv[1]))
    connected.set_inheritable(False)

    channel = Channel(connected)
    try:
        spec, row, tokenizer = pickle.load(sys.stdin.buffer)
        workflow = _workflow_of(spec)
        loaded = tokenizer()
        assert workflow is not None, "it was found in the process that started this one"
    except Exception as error:  # of the user's code
        outcome = f"note it was not tried, as it cannot be loaded in another process: {error}"
    else:
        channel.send(encode(None))
        process = os.getpid()
        outcome = _outcome(spec, workflow, row, loaded)
        if os.getpid() != process:  # a fork that the workflow did not end
            os._exit(0)

    channel.send(encode(outcome))
    os._exit(0)


def _workflow_of(spec: Spec) -> Workflow | None:
    for node in spec.pipeline().rollout_nodes:
        found = getattr(node.fn, "keywords", {}).get("workflow")
        if isinstance(found, Workflow):
            return found
    return None


def _outcome(spec: Spec, workflow: Workflow, row: PromptRow, tokenizer: Any) -> str:
    """`fault` or `note` and what was wrong with an episode; `fine` if nothing was."""
    try:
        asyncio.run(_episode(spec, workflow, row, tokenizer))
    except BaseException as error:  # the boundary to user code
        if isinstance(error, _Wrong):
            return f"fault {error}"

        # such as the match of a pattern in the reply
        depends_on_reply = "'NoneType'" in str(error) or users_place(error) is None

        is_mistake = isinstance(error, _MISTAKES) and not depends_on_reply
        if is_mistake or isinstance(error, ChatError):
            kind = "fault"
        else:
            kind = "note"

        return f"{kind} {describe_fault(error)}"

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
    chat = Chat(tokens, generate, limits, templated=bool(told.prompt.messages))

    async def reward(reply: object = None) -> RewardOutcome:
        return RewardOutcome(Score(0.0), {}, 0.0)

    talk = workflow.talk(chat, config.actor_rollout_ref.rollout.agents)
    returned = await workflow(talk, told, reward)
    try:
        outcome = read_outcome(returned)
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
