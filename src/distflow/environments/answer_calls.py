"""The loop of an episode with tools: the calls in a reply are run, and their answers are the next
prompt."""

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from distflow.environments.chat import Chat, Message, Reply
from distflow.environments.parse_tool_calls import ToolCall, find_tool_calls
from distflow.environments.tools_in_user_code_process import ToolAnswer, failure
from distflow.errors import hint

RunTool = Callable[[str, dict[str, Any]], Awaitable[ToolAnswer]]
"""(a tool's name, arguments) → its answer, whatever happened."""
Parameters = Mapping[str, Mapping[str, Any]]
"""By tool, the JSON schema of each of its parameters."""


async def answer_calls(
    chat: Chat, reply: Reply, format: str, max_turns: int, tools: Parameters, run: RunTool
) -> None:
    """Run the calls in each reply and return their answers to the model, until a reply has none."""
    while True:
        written = chat.tokens.written(reply.token_ids)
        calls = find_tool_calls(written, format, chat.opened_thought(reply))
        is_truncated = reply.finish_reason != "stop"
        if not calls or is_truncated:
            return
        if chat.turns >= max_turns:
            chat.finish_reason = "max_turns"
            return

        answers = list[Message]()
        for number, call in enumerate(calls):
            text = await answer_call(chat, call, tools, run)
            id = f"{number:09d}"  # Mistral's templates require this form.
            answers.append({"role": "tool", "name": call.name, "tool_call_id": id, "content": text})

        reply = await chat.ask(answers)


async def answer_call(chat: Chat, call: ToolCall, tools: Parameters, run: RunTool) -> str:
    """The text of the tool message for a call, which is counted by the tool's name."""
    name = call.name if call.name in tools else "unknown"
    problem = call.problem or _misfit(call, tools)
    started = time.monotonic()

    if problem:
        answer = failure(problem)
    else:
        with chat.clock_stopped(f"tool {name}"):
            answer = await run(name, typed_arguments(call, tools[name]))

    chat.counts[f"tool/{name}/ms"] += round(1000 * (time.monotonic() - started))
    chat.counts[f"tool/{name}/calls"] += 1
    chat.counts[f"tool/{name}/errors"] += answer.failed
    return answer.text


def _misfit(call: ToolCall, tools: Parameters) -> str:
    """Why the call fits no tool; empty if it fits."""
    known = tools.get(call.name)
    if known is None:
        return f"there is no tool {call.name!r}{hint(call.name, tools)}"

    for name in call.arguments:
        if name not in known:
            return f"{call.name} has no parameter {name!r}{hint(name, known)}"

    return ""


def typed_arguments(call: ToolCall, declared: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call. If its format has only text, an argument that is declared as
    anything but a string is parsed as JSON where that is possible."""
    arguments = dict(call.arguments)
    if call.typed:
        return arguments

    for name, text in call.arguments.items():
        if declared.get(name, {}).get("type") == "string":
            continue
        with suppress(ValueError, RecursionError):
            arguments[name] = json.loads(str(text))

    return arguments
