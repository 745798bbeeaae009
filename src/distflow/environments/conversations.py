"""The conversations of an episode whose agent sends whole histories: a call that extends one
continues its tokens."""

import hashlib
import json
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distflow.data.sample import on_token
from distflow.environments.chat import Chat, Reply, TemplatedTwice
from distflow.environments.endpoint_calls import Answer, AnsweredCall, Call, Json, RequestError
from distflow.environments.parse_tool_calls import (
    ToolCall,
    find_tool_calls,
    format_of,
    marks_of_calls,
    text_before_calls,
)
from distflow.environments.tool_workflow import typed_argument


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
    the longest. A call that extends none is a branch, and so is each further answer to one call,
    and a call that extends a conversation still waiting for a reply: calls are answered
    concurrently.
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
        partial_text = None
        if call.told is not None:
            partial_text = _PartialText(chat, call, format).add
        on_token.set(partial_text)
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
        if call.choice > 0:
            return None
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
            chat = chat.fork([{"role": "user", "content": ""}])
            chat.why = self._why(call)
        # Calls contain their whole history.
        chat.messages = []
        chat.tools = ()
        chat.templated = not is_text
        return _Conversation(chat, _tools(call), "" if is_text else [], [])

    def _why(self, call: Call) -> str:
        """Why the call begins a branch: `answers` (a further one to one call), `at_once` (it
        extends a conversation that waits), `tools` (others), `again` (nothing new), `reply` (a
        reply came back changed) or `history` (so did anything else)."""
        if call.choice:
            return "answers"
        if not self._conversations:
            return "at_once"
        whole = _history(call.messages)
        extended = list[_Conversation]()
        nearest: _Conversation | None = None
        num_nearest = -1
        for each in self._conversations:
            if type(each.so_far) is not type(whole):
                continue
            num_common = _num_common(each.so_far, whole)
            if num_common == len(whole):
                return "again"
            if num_common == len(each.so_far):
                extended.append(each)
            if num_common > num_nearest:
                nearest = each
                num_nearest = num_common
        if extended:
            tools = _tools(call)
            return "at_once" if any(each.tools == tools for each in extended) else "tools"
        if nearest is not None and nearest.so_far[num_nearest].startswith('["assistant"'):
            return "reply"
        return "history"


class _PartialText:
    """Tells the caller the text of a reply while it is drawn, except what may still change: an
    incomplete character, white space at the end, what may be the beginning of a stop string or a
    tool call, and everything after these. If the format of calls has no mark of its own, it tells
    nothing."""

    def __init__(self, chat: Chat, call: Call, format: str | None) -> None:
        """format: of tool calls; None if none are read."""
        assert call.told is not None
        self._tokens = chat.tokens
        self._tell = call.told
        self._reads_calls = format is not None
        marks = () if format is None else marks_of_calls(format)
        self._marks = (*call.stop, *marks)
        self._ended = self._reads_calls and not marks
        self._ids = list[int]()
        # Text is decoded together with the tokens of the last piece before it, which is enough for
        # a tokenizer.
        self._piece_begin = 0
        self._num_read = 0
        self._text = ""
        self._num_told = 0

    def add(self, token: int) -> None:
        self._ids.append(token)
        if self._ended:
            return
        if self._reads_calls and self._tokens.written([token]) != self._tokens.decode([token]):
            self._ended = True  # a special token, with which a call may begin
            return
        known = self._tokens.decode(self._ids[self._piece_begin : self._num_read])
        text = self._tokens.decode(self._ids[self._piece_begin :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return
        self._text += text[len(known) :]
        self._piece_begin = self._num_read
        self._num_read = len(self._ids)
        sure = self._sure_text().rstrip()
        if len(sure) > self._num_told:
            self._tell(sure[self._num_told :])
            self._num_told = len(sure)

    def _sure_text(self) -> str:
        """The text before the first mark, which ends it, or before what may become a mark."""
        end = len(self._text)
        for mark in self._marks:
            place = self._text.find(mark)
            if place >= 0:
                self._ended = True
                end = min(end, place)
        if not self._ended:
            end -= self._num_held()
        return self._text[:end]

    def _num_held(self) -> int:
        """The length of the longest end of the text with which a mark begins."""
        longest = 0
        for mark in self._marks:
            for length in range(longest + 1, len(mark)):
                if self._text.endswith(mark[:length]):
                    longest = length
        return longest


def _num_common(history: str | list[str], other: str | list[str]) -> int:
    """The length of what both begin with."""
    both: list[Any] = [history, other]
    return len(os.path.commonprefix(both))


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
    tokens = list[tuple[str, float]]()
    if reply.token_ids:
        drawn = chat.segments[-1]
        for token, log_prob in zip(drawn.token_ids, drawn.rollout_log_probs, strict=True):
            tokens.append((chat.tokens.decode([token]), log_prob))
    if calls:
        reason = "tool_calls"
    elif reply.finish_reason != "stop" and stopped_by is None:
        reason = "length"
    else:
        reason = "stop"
    num_prompt = len(chat.token_ids) - len(tokens)
    return Answer(text, calls, reason, stopped_by, tokens, num_prompt)


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
        arguments = _typed_arguments(found, schemas.get(found.name, {}))
        try:
            json.dumps([found.name, arguments], allow_nan=False, ensure_ascii=False).encode()
        except ValueError:  # 1e999, or half of a surrogate pair: not possible in a JSON response
            return ()
        seen = json.dumps([_history(call.messages), number, written])
        # Templates of Mistral take nine characters.
        id = hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()[:9]
        calls.append(AnsweredCall(id, found.name, arguments))
    return tuple(calls)


def _typed_arguments(found: ToolCall, schemas: Json) -> Json:
    """The arguments in the types of their schemas, where the format has only text."""
    arguments = dict(found.arguments)
    if not found.typed:
        for name, text in arguments.items():
            arguments[name] = typed_argument(str(text), schemas.get(name, {}))
    return arguments
