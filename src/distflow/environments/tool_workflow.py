"""The workflow `tools`: the model calls tools until it gives an answer."""

import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence

from distflow.environments.chat import Chat, Reply
from distflow.environments.tool_calls import ToolCall, check_format, find_tool_calls, format_of
from distflow.environments.tools import Entry, EpisodeTools, Tools
from distflow.environments.user_process import MadeByOptions, options_of
from distflow.environments.workflows import Rewarded, RewardFn, Row
from distflow.errors import UserError


class ToolWorkflow(MadeByOptions):
    """Asks, runs the calls in the reply and returns their results to the model, until a reply has no calls. The run's
    reward functions score the last reply."""

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
        """timeout_s: of each call. max_characters: of each answer. format: of the calls; None for the chat template's.
        mcp: commands and URLs of MCP servers, whose tools are added. Raises UserError."""
        self._options = options_of(locals())
        if not all(isinstance(names, list | tuple) for names in (tools, mcp)) or not (*tools, *mcp):
            raise UserError("workflow_kwargs.tools: name at least one tool in a list, e.g. tools=[calculator]")
        if wrong := [server for server in mcp if not isinstance(server, str) or not server.strip()]:
            raise UserError(f"workflow_kwargs.mcp: {wrong[0]!r} is neither a command nor a URL")
        check_format(format)
        self._tools = Tools(tools, timeout_s, max_characters, mcp)
        weakref.finalize(self, self._tools.close)
        self._max_turns, self._format = max_turns, format

    async def __call__(self, chat: Chat, row: Row, reward_fn: RewardFn) -> Rewarded:
        template = chat.tokens.tool_template(self._tools.schemas)
        format = self._format or format_of(template)
        with EpisodeTools(self._tools, (row.prompt, row.ground_truth)) as episode:
            try:
                reply = await chat.ask(row.prompt, tools=self._tools.schemas)
                await answer_calls(chat, reply, format, self._max_turns, episode.run, self._tools.parameters)
            finally:
                for kind, counts in (("calls", episode.calls), ("errors", episode.errors), ("ms", episode.ms)):
                    chat.counts.update({f"tool/{name}/{kind}": number for name, number in counts.items()})
        return await reward_fn(None)


async def answer_calls(
    chat: Chat,
    reply: Reply,
    format: str,
    max_turns: int,
    run: Callable[[ToolCall], Awaitable[str]],
    names: Collection[str],
) -> None:
    """Run the calls in each reply and return their results to the model, until a reply has none. names: of tools."""
    while calls := find_tool_calls(chat.tokens.written(reply.token_ids), format):
        if reply.finish_reason != "stop":  # the reply is truncated
            break
        if chat.turns >= max_turns:
            chat.finish_reason = "max_turns"
            break
        texts = []
        for call in calls:
            with chat.clock_stopped(f"tool {call.name if call.name in names else 'unknown'}"):
                texts.append(await run(call))
        ids = [f"{number:09d}" for number in range(len(calls))]  # Mistral's templates require this form
        answers = [
            {"role": "tool", "name": call.name, "tool_call_id": id, "content": text}
            for call, id, text in zip(calls, ids, texts, strict=True)
        ]
        reply = await chat.ask(answers)
