"""The workflow `tools`: the model calls tools until it answers."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from distflow.environments.chat import Chat
from distflow.environments.tool_calls import FORMATS, find_tool_calls, format_of
from distflow.environments.tools import Entry, Tools
from distflow.environments.workflows import Rewarded, RewardFn, Row
from distflow.errors import UserError, hint


class ToolWorkflow:
    """Asks, runs the calls in the reply and tells what they returned, until a reply has no call. The last reply is
    scored by the run's reward functions."""

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
        """timeout_s: of each call. max_characters: of each answer. format: of the calls; None for what the chat
        template shows. mcp: commands and URLs of MCP servers, whose tools these are as well. Raises UserError."""
        if not all(isinstance(names, list | tuple) for names in (tools, mcp)) or not (*tools, *mcp):
            raise UserError("workflow_kwargs.tools: name at least one tool in a list, e.g. tools=[calculator]")
        if wrong := [server for server in mcp if not isinstance(server, str) or not server.strip()]:
            raise UserError(f"workflow_kwargs.mcp: {wrong[0]!r} is neither a command nor a URL")
        if format is not None and format not in FORMATS:
            raise UserError(f"workflow_kwargs.format={format}: no such format of tool calls{hint(format, FORMATS)}")
        self._tools = Tools(tools, timeout_s, max_characters, mcp)
        weakref.finalize(self, self._tools.close)
        self._max_turns, self._format = max_turns, format
        self._options: dict[str, Any] = {"timeout_s": timeout_s, "max_characters": max_characters, "format": format}
        self._options |= {"tools": tools, "max_turns": max_turns, "mcp": mcp}

    def __reduce__(self) -> tuple[object, ...]:
        """In another process it has a server of its own."""
        return partial(type(self), **self._options), ()

    async def __call__(self, chat: Chat, row: Row, reward_fn: RewardFn) -> Rewarded:
        template = chat.tokens.tool_template(self._tools.schemas)
        format = self._format or format_of(template)
        with self._tools.episode(row.prompt, row.ground_truth) as episode:
            try:
                reply = await chat.ask(row.prompt, tools=self._tools.schemas)
                while calls := find_tool_calls(chat.tokens.written(reply.token_ids), format):
                    if reply.finish_reason != "stop":  # it is cut off
                        break
                    if chat.turns >= self._max_turns:
                        chat.finish_reason = "max_turns"
                        break
                    with chat.clock_stopped():
                        texts = [await episode.run(call) for call in calls]
                    ids = [f"{number:09d}" for number in range(len(calls))]  # which templates of Mistral ask for
                    answers = [
                        {"role": "tool", "name": call.name, "tool_call_id": id, "content": text}
                        for call, id, text in zip(calls, ids, texts, strict=True)
                    ]
                    reply = await chat.ask(answers)
            finally:
                for kind, counts in (("calls", episode.calls), ("errors", episode.errors)):
                    chat.counts.update({f"tool/{name}/{kind}": number for name, number in counts.items()})
        return await reward_fn(None)
