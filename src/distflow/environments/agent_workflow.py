"""The workflows `agent` and `verifiers`: a third-party agent, or environment with an agent, talks
to the policy through an endpoint of the run."""

import asyncio
import importlib.util
import os
import random
import re
import shutil
import subprocess
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, cast

from distflow.data.task_packages import VERIFIERS, missing
from distflow.environments import agent_process
from distflow.environments.chat import Chat
from distflow.environments.conversations import Conversations
from distflow.environments.endpoint import Endpoint, Session
from distflow.environments.endpoint_calls import (
    Answer,
    Call,
    RequestError,
)
from distflow.environments.parse_tool_calls import check_format
from distflow.environments.user_code_process import (
    MadeByOptions,
    ProcessServer,
    UserProcess,
    options_of,
)
from distflow.environments.workflows import REWARD, RewardFn, Row
from distflow.errors import UserError
from distflow.import_target import check_server_packages

KEY = "workflow_kwargs"
_LOOPBACK = "127.0.0.1,localhost"


class AgentWorkflow(MadeByOptions):
    """Runs a function or a command in a separate process per episode, and answers its calls with
    the policy until it ends. The score is the function's result, or that of `reward`."""

    def __init__(
        self,
        *,
        function: str | None = None,
        command: str | Sequence[str] | None = None,
        kwargs: Mapping[str, object] | None = None,
        reward: str | None = None,
        format: str | None = None,
        max_calls: int = 64,
    ) -> None:
        """function, reward: file.py:name or module:name. kwargs: further arguments of the function.
        reward: a function of the messages, or `reward_fn` for the run's reward functions. format:
        of tool calls; None for the chat template's. max_calls: maximum of calls answered per
        episode. Raises UserError."""
        self._options = options_of(locals())
        if (function is None) == (command is None):
            raise UserError(f"{KEY}: the workflow agent needs either function or command")
        if kwargs and function is None:
            raise UserError(
                f"{KEY}.kwargs are arguments of a function, and a command takes none: write them "
                "into it"
            )
        if command is not None and reward is None:
            raise UserError(
                f"{KEY}.reward is missing: a command returns no score. Name a function, or {REWARD}"
            )

        check_format(format)
        check_server_packages("the endpoint", "endpoint")
        self.uses_reward_fn = reward == REWARD
        self._reward = None if self.uses_reward_fn else reward
        self._kwargs = dict(kwargs or {})
        options = {
            "function": function,
            "command": _command(command),
            "reward": self._reward,
            "kwargs": list(self._kwargs),
        }
        self._server = ProcessServer(f"{agent_process.__name__}:Agent", options)
        weakref.finalize(self, self._server.close)
        self._format = format
        self._max_calls = max_calls
        self._endpoint = cast(Endpoint | None, None)

    async def __call__(self, chat: Chat, row: Row, reward_fn: RewardFn | None = None) -> object:
        """Raises CallFailed if the agent fails, RequestError if it makes no call: errors of the
        episode."""
        if self._endpoint is None:
            self._endpoint = Endpoint()
            weakref.finalize(self, self._endpoint.close)

        conversations = Conversations(chat, self._format, self._max_calls)
        seed = random.getrandbits(64)
        with chat.clock_stopped():
            process = await self._server.fork(seed)

        try:
            calls = _Calls(conversations)
            with self._endpoint.session(calls.submit) as session:
                given = {**self._kwargs, **_arguments(row, session)}
                running = process.call("run", None, environment=_environment(session), given=given)
                try:
                    returned = await calls.answer_while(running)
                finally:
                    chat.counts["agent/refused_calls"] += len(session.refused)
                    if conversations.templated_twice is not None:  # whatever the agent made of it
                        raise conversations.templated_twice

            _check_has_called(conversations, session)
            if reward_fn is not None:
                is_text = isinstance(returned, str) and returned
                return await reward_fn(returned if is_text else conversations.last)

            return await self._score(process, conversations, given, returned)
        finally:
            process.close()

    async def _score(
        self,
        process: UserProcess,
        conversations: Conversations,
        given: dict[str, Any],
        returned: object,
    ) -> object:
        """What the agent returned, or its `reward` function. given: the agent's arguments."""
        if self._reward is not None:
            talks = conversations.messages
            trace = {"result": returned, "conversations": talks, "messages": talks[-1]}
            return await process.call("reward", None, given={**given, **trace})

        if returned is None:
            raise UserError(f"the agent returned no score: return one, or set {KEY}.reward")
        return returned


class VerifiersWorkflow(AgentWorkflow):
    """The agent is an environment of the package `verifiers`, which scores the episode itself."""

    def __init__(
        self,
        *,
        env: Mapping[str, object] | None = None,
        format: str | None = None,
        max_calls: int = 64,
    ) -> None:
        """env: config of the environment, beside its taskset. Raises UserError."""
        options = options_of(locals())
        if importlib.util.find_spec(VERIFIERS) is None:
            raise UserError(f"the workflow verifiers {missing(VERIFIERS)}")

        target = "distflow.environments.verifiers_episode:play"
        super().__init__(
            function=target, kwargs={"env": dict(env or {})}, format=format, max_calls=max_calls
        )
        self._options = options


class _Calls:
    """The calls of an episode, which the endpoint's thread submits and the episode answers
    concurrently, in order of arrival."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._loop = asyncio.get_running_loop()

        # the episode's: its clock stops while calls are answered
        self._context = copy_context()
        self._answering = set[asyncio.Task[Any]]()
        self._has_ended = False
        self._failed: asyncio.Future[None] = self._loop.create_future()

    def submit(self, call: Call) -> "Future[Answer]":
        """Called on the endpoint's thread, alone."""
        return self._context.run(asyncio.run_coroutine_threadsafe, self._answer(call), self._loop)

    async def answer_while(self, running: Coroutine[Any, Any, Any]) -> Any:
        """The agent's result; later calls are rejected. Raises what it raises, and what ended a
        call that is no fault of the call: asyncio.CancelledError if the engine fails."""
        agent = asyncio.ensure_future(running)
        try:
            await asyncio.wait((agent, self._failed), return_when=asyncio.FIRST_COMPLETED)
            return await (self._failed if self._failed.done() else agent)
        finally:
            self._has_ended = True
            for task in (agent, *self._answering):
                task.cancel()  # no effect on finished ones

    async def _answer(self, call: Call) -> Answer:
        if self._has_ended:
            raise RequestError(410, "this episode has ended", "episode_ended")

        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)

        try:
            return await self._conversations.answer(call)
        except (UserError, RequestError):
            raise
        except asyncio.CancelledError:
            if not task.cancelling():  # neither the client has gone, nor the episode ended
                self._failed.cancel()
            raise
        except Exception as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise
        finally:
            self._answering.discard(task)


def _check_has_called(conversations: Conversations, session: Session) -> None:
    """Raises UserError for an agent of which no call was answered."""
    if conversations.messages:
        return
    if session.refused:
        raise UserError(f"every call of the agent was refused; the last: {session.refused[-1]}")

    raise UserError(
        "the agent ended without calling its endpoint: create its client inside the function, with "
        "the address in OPENAI_BASE_URL"
    )


def _command(command: str | Sequence[str] | None) -> Sequence[str]:
    """The command as a list; a str is a shell command. Raises UserError."""
    if isinstance(command, str):
        word = command.split()[0] if command.split() else ""

        # `type` also knows shell builtins; assignments and quotations are not plain words.
        is_plain = re.fullmatch(r"[\w./-]+", word) is not None
        if (
            is_plain
            and subprocess.run(["/bin/sh", "-c", f"type {word}"], capture_output=True).returncode
        ):
            raise UserError(f"{KEY}.command: there is no executable '{word}'")

        return ("/bin/sh", "-c", command)

    words = list(command or ())
    if not all(isinstance(word, str) for word in words) or (command is not None and not words):
        raise UserError(f"{KEY}.command={words}: write a string, or a list of strings")
    if words and shutil.which(words[0]) is None:
        raise UserError(f"{KEY}.command: there is no executable '{words[0]}'")

    return words


def _arguments(row: Row, session: Session) -> dict[str, Any]:
    """Arguments that functions may take by name; `row` is the whole row."""
    own = {
        "prompt": str(row.prompt),
        "messages": row.prompt.as_messages,
        "ground_truth": row.ground_truth,
    }
    whole = {**row.extra_info, **own, "domain": row.domain}

    return {
        **own,
        "row": whole,
        "base_url": f"{session.base_url}/v1",
        "api_key": session.key,
        "model": "policy",
    }


def _environment(session: Session) -> dict[str, str | None]:
    """Variables for the process: no proxy in between, and a command finds its modules as without
    us."""
    variables: dict[str, str | None] = {}
    variables |= agent_process.client_variables(session.base_url, session.key)
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        variables[name] = os.environ.get(name)

    for name in ("NO_PROXY", "no_proxy"):
        own = os.environ.get(name)
        variables[name] = f"{own},{_LOOPBACK}" if own else _LOOPBACK

    return variables
