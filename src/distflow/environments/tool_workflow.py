"""The workflow `tools`: the model calls tools until it gives an answer. Tools have schemas for the
model, and each call becomes a text.

A tool is a plain or async function, or a class whose instances are called; the signature and the
docstring are its schema. Calls run in a separate process per episode (`user_code_process.py`), so
module state lasts for the episode; the model's Python code runs in the sandbox.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from distflow.environments.answer_calls import answer_calls
from distflow.environments.chat import Chat
from distflow.environments.parse_tool_calls import check_format, format_of
from distflow.environments.python_session import PythonSession
from distflow.environments.tools import PYTHON, Entry, Tools
from distflow.environments.tools_in_user_code_process import ToolAnswer, bounded, failure
from distflow.environments.user_code_process import (
    CallFailed,
    MadeByOptions,
    ProcessEnded,
    UserProcess,
    options_of,
)
from distflow.environments.workflows import Rewarded, RewardFn, Row
from distflow.errors import UserError
from distflow.sandbox.interface import Broken, Raised


class ToolWorkflow(MadeByOptions):
    """Asks, runs the calls in the reply and returns their results to the model, until a reply has
    no calls. The run's reward functions score the last reply."""

    def __init__(
        self,
        *,
        tools: Sequence[Entry] = (),
        mcp: Sequence[str] = (),
        max_turns: int = 8,
        timeout_s: float = 10.0,
        max_characters: int = 4000,
        format: str | None = None,
    ) -> None:
        """timeout_s: of each call. max_characters: of each answer. format: of the calls; None for
        the chat template's. mcp: commands and URLs of MCP servers, whose tools are added. Raises
        UserError."""
        self._options = options_of(locals())
        are_lists = isinstance(tools, list | tuple) and isinstance(mcp, list | tuple)
        if not are_lists or not (tools or mcp):
            raise UserError(
                "workflow_kwargs.tools: name at least one tool in a list, e.g. tools=[calculator]"
            )

        for server in mcp:
            if not isinstance(server, str) or not server.strip():
                raise UserError(f"workflow_kwargs.mcp: {server!r} is neither a command nor a URL")

        check_format(format)
        self._tools = Tools(tools, timeout_s, max_characters, mcp)
        weakref.finalize(self, self._tools.close)
        self._max_turns = max_turns
        self._format = format

    async def __call__(self, chat: Chat, row: Row, reward_fn: RewardFn) -> Rewarded:
        template = chat.tokens.tool_template(self._tools.schemas)
        format = self._format or format_of(template)

        with EpisodeTools(self._tools, (row.prompt, row.ground_truth)) as episode:
            reply = await chat.ask(row.prompt, tools=self._tools.schemas)
            await answer_calls(
                chat, reply, format, self._max_turns, self._tools.parameters, episode.run
            )

        return await reward_fn(None)


class EpisodeTools:
    """The tools of one episode, as a context manager: leaving it ends everything that calls have
    started."""

    def __init__(self, tools: Tools, identity: Sequence[object]) -> None:
        """identity: seeds what the tools draw."""
        self._tools = tools
        self._identity = identity
        self._num_calls = 0
        self._process: UserProcess | None = None
        self._python: PythonSession | None = None

    def __enter__(self) -> "EpisodeTools":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
        if self._python is not None:
            self._python.close()

    async def run(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Call a tool. Raises ServerLost, ServerGivenUp."""
        self._num_calls += 1
        try:
            if name == PYTHON:
                return await self._run_python(arguments.get("code"))
            return await self._call(name, arguments)
        except ProcessEnded as error:
            self._process = None
            return failure(f"{name} ended its process: {error}")
        except CallFailed as error:
            return failure(f"{name} raised {error}")
        except RecursionError:
            return failure(f"the arguments of {name} are nested too deeply")

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        if self._process is None:
            self._process = await self._tools.server.fork(*self._identity, self._num_calls)
        text, failed = await self._process.call(
            "call",
            self._tools.timeout_s,
            name=name,
            arguments=arguments,
            max_characters=self._tools.max_characters,
        )

        return ToolAnswer(text, failed)

    async def _run_python(self, code: object) -> ToolAnswer:
        assert self._tools.sandbox is not None
        if not isinstance(code, str):
            return failure("code must be a text")

        if self._python is None:
            self._python = PythonSession(self._tools.sandbox)

        try:
            printed, has_failed = await self._python.run(code)
        except Raised as error:
            return failure(f"python raised {error}")
        except Broken as error:
            reason = error.reason
            if error.cause == "time":
                reason = f"no answer within {self._tools.timeout_s:g} s"
            return failure(f"python ended its process: {reason}; names defined before are lost")

        text, is_cut = bounded(printed, self._tools.max_characters)
        return ToolAnswer(text, has_failed or is_cut)
