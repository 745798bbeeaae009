"""The workflow `tools`: the model calls tools until it gives an answer. Tools have schemas for the
model, and each call becomes a text.

A tool is a plain or async function, or a class whose instances are called; the signature and the
docstring are its schema. Calls run in a separate process per episode (`user_code_process.py`), so
module state lasts for the episode; the model's Python code runs in the sandbox.
"""

import asyncio
import inspect
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from distflow.environments import builtin_tools, mcp_tools, tools_in_user_code_process
from distflow.environments.builtin_tools import BUILTIN_TOOLS, PYTHON_SESSION
from distflow.environments.chat import Chat, Reply
from distflow.environments.mcp_tools import mcp_schemas
from distflow.environments.parse_tool_calls import (
    ToolCall,
    check_format,
    find_tool_calls,
    format_of,
)
from distflow.environments.tools_in_user_code_process import ToolAnswer, bounded
from distflow.environments.user_code_process import (
    CallFailed,
    MadeByOptions,
    ProcessEnded,
    ProcessServer,
    UserProcess,
    options_of,
)
from distflow.environments.workflows import Rewarded, RewardFn, Row
from distflow.errors import UserError, hint
from distflow.import_target import LoadError, load
from distflow.sandbox.interface import DEFAULT_LIMITS, Broken, Raised
from distflow.sandbox.local_sandbox import Sandbox, Session

Entry = str | Mapping[str, Any]
"""A tool: a built-in name or a target ("file.py:function"), or {name, options} with keyword
arguments that the model does not see."""
PYTHON = "python"
_SESSION_CPU_S = 600.0
_SHOWN = 500


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
            try:
                reply = await chat.ask(row.prompt, tools=self._tools.schemas)
                await answer_calls(
                    chat, reply, format, self._max_turns, episode.run, self._tools.parameters
                )
            finally:
                episode.add_counts(chat.counts)
        return await reward_fn(None)


async def answer_calls(
    chat: Chat,
    reply: Reply,
    format: str,
    max_turns: int,
    run: Callable[[ToolCall], Awaitable[str]],
    names: Collection[str],
) -> None:
    """Run the calls in each reply and return their results to the model, until a reply has none.
    names: of tools."""
    while True:
        written = chat.tokens.written(reply.token_ids)
        calls = find_tool_calls(written, format, chat.opened_thought(reply))
        is_truncated = reply.finish_reason != "stop"
        if not calls or is_truncated:
            return
        if chat.turns >= max_turns:
            chat.finish_reason = "max_turns"
            return
        answers = list[Mapping[str, Any]]()
        for number, call in enumerate(calls):
            known_name = call.name if call.name in names else "unknown"
            with chat.clock_stopped(f"tool {known_name}"):
                text = await run(call)
            id = f"{number:09d}"  # Mistral's templates require this form.
            answers.append({"role": "tool", "name": call.name, "tool_call_id": id, "content": text})
        reply = await chat.ask(answers)


class Tools:
    """The tools of a run, in the run's process.

    `schemas` are in the form of chat templates."""

    def __init__(
        self,
        entries: Sequence[Entry],
        timeout_s: float,
        max_characters: int,
        mcp: Sequence[str] = (),
    ) -> None:
        """mcp: commands and URLs of servers. Raises UserError for a tool that cannot be used."""
        targets = [_read(entry) for entry in entries]
        self.schemas = [_schema(target, options) for target, options in targets]
        for server in mcp:
            for schema in mcp_schemas(server):
                self.schemas.append(schema)
                options = {"server": server, "tool": schema["function"]["name"]}
                targets.append((f"{mcp_tools.__name__}:McpTool", options))
        functions = [schema["function"] for schema in self.schemas]
        names = [function["name"] for function in functions]
        self.parameters = {
            function["name"]: function["parameters"]["properties"] for function in functions
        }
        if len(self.parameters) < len(names):
            raise UserError(f"two tools have the same name: {', '.join(names)}")
        named = dict(zip(names, targets, strict=True))
        self.server = ProcessServer(
            f"{tools_in_user_code_process.__name__}:Toolbox", {"targets": named}
        )
        self.timeout_s = timeout_s
        self.max_characters = max_characters
        self.sandbox = None
        if PYTHON in self.parameters:
            limits = DEFAULT_LIMITS._replace(
                wall_s=timeout_s, cpu_s=_SESSION_CPU_S, output_bytes=4 * max_characters
            )
            self.sandbox = Sandbox(limits)

    def close(self) -> None:
        self.server.close()
        if self.sandbox is not None:
            self.sandbox.close()


class EpisodeTools:
    """A context manager; leaving it ends everything that calls have started."""

    def __init__(self, tools: Tools, identity: Sequence[object]) -> None:
        """identity: seeds what the tools draw."""
        self._tools = tools
        self._identity = identity
        self._process: UserProcess | None = None
        self._session: Session | None = None
        self._session_used = threading.Lock()
        self._has_ended = False
        # by tool
        self.calls = Counter[str]()
        self.errors = Counter[str]()
        self.ms = Counter[str]()

    def __enter__(self) -> "EpisodeTools":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
        self._has_ended = True
        self._close_session()

    def add_counts(self, counts: Counter[str]) -> None:
        """Add the numbers of calls and errors, and their time, to the metrics of the episode."""
        for name, num_calls in self.calls.items():
            counts[f"tool/{name}/calls"] += num_calls
            counts[f"tool/{name}/errors"] += self.errors[name]
            counts[f"tool/{name}/ms"] += self.ms[name]

    async def run(self, call: ToolCall) -> str:
        """The text of the tool message that answers a call, whatever happened."""
        started = time.monotonic()
        answer = await self._answer(call)
        name = call.name if call.name in self._tools.parameters else "unknown"
        self.ms[name] += round(1000 * (time.monotonic() - started))
        self.calls[name] += 1
        self.errors[name] += answer.failed
        return answer.text

    async def _answer(self, call: ToolCall) -> ToolAnswer:
        problem = call.problem or self._misfit(call)
        if problem:
            return ToolAnswer(f"error: {bounded(problem, _SHOWN).text}", True)
        arguments = dict(call.arguments)
        declared = self._tools.parameters[call.name]
        if not call.typed:
            for name, text in arguments.items():
                arguments[name] = typed_argument(str(text), declared[name])
        try:
            if call.name == PYTHON:
                return await self._run_python(call.name, arguments)
            return await self._call(call.name, arguments)
        except ProcessEnded as error:
            self._process = None
            return ToolAnswer(
                f"error: {call.name} ended its process: {bounded(str(error), _SHOWN).text}", True
            )
        except CallFailed as error:
            return ToolAnswer(f"error: {call.name} raised {bounded(str(error), _SHOWN).text}", True)
        except RecursionError:
            return ToolAnswer(f"error: the arguments of {call.name} are nested too deeply", True)

    def _misfit(self, call: ToolCall) -> str:
        """Why the call fits no tool; empty if it fits."""
        known = self._tools.parameters.get(call.name)
        if known is None:
            return f"there is no tool {call.name!r}{hint(call.name, self._tools.parameters)}"
        for name in call.arguments:
            if name not in known:
                return f"{call.name} has no parameter {name!r}{hint(name, known)}"
        return ""

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        if self._process is None:
            self._process = await self._tools.server.fork(*self._identity, sum(self.calls.values()))
        asked: dict[str, Any] = {
            "name": name,
            "arguments": arguments,
            "max_characters": self._tools.max_characters,
        }
        text, failed = cast(
            tuple[str, bool], await self._process.call("call", self._tools.timeout_s, **asked)
        )
        return ToolAnswer(text, failed)

    async def _run_python(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Run Python code on a thread, which the sandbox's own deadline ends."""
        if not isinstance(arguments.get("code"), str):
            raise CallFailed("TypeError: code must be a text")
        try:
            printed, failed = await asyncio.to_thread(self._execute, arguments["code"])
        except Raised as error:
            raise CallFailed(str(error)) from None
        except Broken as error:
            if self._session is not None and error.cause != "value":
                self._session.close()
                self._session = None
            late = f"no answer within {self._tools.timeout_s:g} s"
            reason = late if error.cause == "time" else error.reason
            return ToolAnswer(
                f"error: {name} ended its process: {reason}; names defined before are lost", True
            )
        text, cut = bounded(str(printed), self._tools.max_characters)
        return ToolAnswer(text, bool(failed) or cut)

    def _execute(self, code: object) -> Any:
        assert self._tools.sandbox is not None
        try:
            with self._session_used:
                if self._session is None:
                    self._session = self._tools.sandbox.open(PYTHON_SESSION)
                self._session.renew_time()
                return self._session.call("run", [code])
        finally:
            if self._has_ended:
                self._close_session()

    def _close_session(self) -> None:
        """Close the session of an ended episode, unless a thread still uses it: that thread calls
        this later."""
        if self._session_used.acquire(blocking=False):
            if self._session is not None:
                self._session.close()
            self._session_used.release()


def _read(entry: Entry) -> tuple[str, dict[str, Any]]:
    """Target and options of an entry. Raises UserError."""
    whole = {"name": entry} if isinstance(entry, str) else entry
    if (
        not isinstance(whole, Mapping)
        or not isinstance(whole.get("name"), str)
        or set(whole) - {"name", "options"}
    ):
        raise UserError(
            f"the tool {entry!r} is neither a name nor {{name, options}}: write e.g. "
            "{name: search, options: {file: texts.txt}}"
        )
    name = str(whole["name"])
    options = dict(cast(Mapping[str, Any], whole.get("options", {})))
    if name in BUILTIN_TOOLS:
        return f"{builtin_tools.__name__}:{BUILTIN_TOOLS[name]}", options
    if ":" not in name:  # code that the config names (`code_of_workflow`)
        raise UserError(
            f"there is no built-in tool '{name}'{hint(name, BUILTIN_TOOLS)}; one of your own is "
            '"file.py:function"'
        )
    return name, options


def _schema(target: str, options: Mapping[str, object]) -> dict[str, Any]:
    """A tool's schema for the model, without the parameters that are options. Raises UserError."""
    try:
        found: Any = load(target)
    except LoadError as error:
        raise UserError(f"the tool {error}") from error
    is_class = isinstance(found, type)
    try:
        inspect.signature(found).bind_partial(**options)
        schema: dict[str, Any] = get_json_schema(found.__call__ if is_class else found)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError) as error:
        raise UserError(
            f"the tool '{target}' cannot be described to the model or does not take its options: "
            f"{error}. Give every "
            "parameter a type, and a line in the docstring under 'Args:', as 'name: what it is'"
        ) from None
    parameters = schema["function"]["parameters"]
    if is_class:
        schema["function"]["name"] = found.__name__.lower()
        return schema
    schema["function"]["name"] = found.__name__
    for hidden in options:
        parameters["properties"].pop(hidden, None)
        parameters["required"] = [name for name in parameters.get("required", []) if name != hidden]
    return schema


def typed_argument(text: str, declared: Mapping[str, Any]) -> Any:
    """An untyped argument, converted as its schema declares: strings are unchanged, others parsed
    as JSON if possible."""
    with suppress(ValueError, RecursionError):
        return text if declared.get("type") == "string" else cast(Any, json.loads(text))
    return text
