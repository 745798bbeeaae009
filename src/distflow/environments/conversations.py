"""The conversations of an episode whose agent sends whole histories: a call that extends one
continues its tokens."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from distflow.environments.answer_calls import typed_arguments
from distflow.environments.chat import Chat, Reply, TemplatedTwice
from distflow.environments.endpoint_calls import Answer, AnsweredCall, Call, Json, RequestError
from distflow.environments.parse_tool_calls import (
    find_tool_calls,
    format_of,
    text_before_calls,
)


@dataclass
class _Conversation:
    chat: Chat
    tools: str
    so_far: str | list[str]
    """The history, as text or as keys of its messages."""
    messages: list[Json]
    """As the agent sees them."""

    def begins(self, whole: str | list[str]) -> bool:
        """Whether a history continues this one with something new."""
        length = len(self.so_far)
        return length < len(whole) and whole[:length] == self.so_far


class Conversations:
    """The conversations of one episode.

    A call extends a conversation if it has the same tools and its messages begin with those of the
    conversation, with the policy's replies as returned; of several such conversations, it extends
    the longest. A call that extends none is a branch, and so is a call that extends a
    conversation still waiting for a reply: calls are answered concurrently.
    """

    def __init__(self, chat: Chat, format: str | None, max_calls: int) -> None:
        """format: of tool calls; None for the chat template's. max_calls: maximum of calls
        answered."""
        self._chat = chat
        self._format = format
        self._max_calls = max_calls
        self._conversations: list[_Conversation] = []
        self.last: Reply | None = None
        """The reply to the last call."""
        self.templated_twice: TemplatedTwice | None = None
        """Why such a call was refused, which the agent may have ignored."""

    @property
    def messages(self) -> list[list[Json]]:
        """The messages of each conversation, ordered by their last call."""
        return [conversation.messages for conversation in self._conversations]

    async def answer(self, call: Call) -> Answer:
        """Answer a call. Raises UserError for unsupported content; RequestError beyond max_calls,
        when the finish reason becomes max_turns; asyncio.CancelledError if the engine fails."""
        if sum(chat.turns for chat in self._chat.conversations) >= self._max_calls:
            self._chat.conversations[-1].finish_reason = "max_turns"
            raise RequestError(
                410, f"this episode has had its {self._max_calls} replies (max_calls)", "max_calls"
            )

        extended = self._extended(call)
        conversation = extended or self._begun(call)
        chat = conversation.chat
        format = self._format_of_calls(call, chat)

        try:
            reply = await chat.ask(
                call.messages[len(conversation.so_far) :],
                stop=call.stop,
                max_tokens=call.max_tokens,
                tools=call.tools if extended is None else (),
            )
        except TemplatedTwice as error:
            self.templated_twice = error
            raise

        answer = _answer(call, chat, reply, format)
        self.last = reply

        if reply.token_ids:
            conversation.so_far = _history_after(call.messages, answer, reply)
            conversation.messages = [*_messages(call.messages), answer.message]
            if extended is not None:
                self._conversations.remove(extended)
            self._conversations.append(conversation)

        return answer

    def _format_of_calls(self, call: Call, chat: Chat) -> str | None:
        """None if no tool calls are read."""
        if not call.tools:
            return None
        # Raises for a template that has no tools, also if the caller wants text.
        format = self._format or format_of(chat.tokens.tool_template(call.tools))
        return format if call.parses_tools else None

    def _extended(self, call: Call) -> _Conversation | None:
        whole = _history(call.messages)
        tools = _tools(call)

        longest: _Conversation | None = None
        for each in self._conversations:
            if each.chat.waiting or each.tools != tools or not each.begins(whole):
                continue
            if longest is None or len(each.so_far) > len(longest.so_far):
                longest = each

        return longest

    def _begun(self, call: Call) -> _Conversation:
        chat = self._chat
        is_text = isinstance(call.messages, str)
        if chat.segments or chat.waiting:
            chat = chat.fork(())

        # Calls contain their whole history.
        chat.messages = []
        chat.tools = ()
        chat.templated = not is_text

        return _Conversation(chat, _tools(call), "" if is_text else [], [])


def _tools(call: Call) -> str:
    return json.dumps(call.tools, sort_keys=True)


def _messages(messages: Sequence[Json] | str) -> list[Json]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return list(messages)


def _history(messages: Sequence[Json] | str) -> str | list[str]:
    """A history for comparison: equal if the meaning is."""
    if isinstance(messages, str):
        return messages
    return [_key(message) for message in messages]


def _history_after(messages: Sequence[Json] | str, answer: Answer, reply: Reply) -> str | list[str]:
    """The history with the answer to it. reply: everything that was drawn for it. A text whose stop
    string was drawn continues where that is in the text, or it would be there twice."""
    if isinstance(messages, str):
        return messages + reply.text
    keys = [_key(message) for message in messages]
    if answer.text or answer.calls:
        keys.append(_key(answer.message))
    return keys


def _key(message: Json) -> str:
    """A message without ids, which clients may change, and without the white space around a reply,
    which some strip."""
    text = message["content"]
    if message["role"] == "assistant":
        text = text.strip()
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], text, calls], sort_keys=True)


def _answer(call: Call, chat: Chat, reply: Reply, format: str | None) -> Answer:
    """The answer from a reply. format: of its tool calls; None if none are read."""
    text = reply.text
    stopped_by = None

    ends = [(text.find(stop), stop) for stop in call.stop if stop in text]
    if ends:
        end, stopped_by = min(ends)
        text = text[:end]

    calls: tuple[AnsweredCall, ...] = ()
    if format is not None and reply.finish_reason == "stop":
        written = chat.tokens.written(reply.token_ids)
        in_thought = chat.opened_thought(reply)
        calls = _calls(call, written, format, in_thought)
        if calls:
            text = text_before_calls(written, format, in_thought)
            stopped_by = None

    if calls:
        reason = "tool_calls"
    elif reply.finish_reason != "stop" and stopped_by is None:
        reason = "length"
    else:
        reason = "stop"

    num_tokens = len(reply.token_ids)
    num_prompt = len(chat.token_ids) - num_tokens
    return Answer(text, calls, reason, stopped_by, num_tokens, num_prompt)


def _calls(call: Call, written: str, format: str, in_thought: bool) -> tuple[AnsweredCall, ...]:
    """The tool calls; empty if one is unreadable, in which case the reply is text."""
    schemas = dict[str, Json]()
    for tool in call.tools:
        function = tool["function"]
        schemas[function["name"]] = function["parameters"]["properties"]

    calls = list[AnsweredCall]()
    for number, found in enumerate(find_tool_calls(written, format, in_thought)):
        if found.problem:
            return ()

        arguments = typed_arguments(found, schemas.get(found.name, {}))
        try:
            json.dumps([found.name, arguments], allow_nan=False, ensure_ascii=False).encode()
        except ValueError:  # 1e999, or half of a surrogate pair: not possible in a JSON response
            return ()

        seen = json.dumps([_history(call.messages), number, written])

        # Templates of Mistral take nine characters.
        id = hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()[:9]
        calls.append(AnsweredCall(id, found.name, arguments))

    return tuple(calls)
