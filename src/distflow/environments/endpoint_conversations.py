"""The conversations of an episode whose agent sends whole histories: a call that extends one continues its tokens."""

import hashlib
import json
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distflow.data.episode_event_hook import on_token
from distflow.environments.chat import Chat, Reply
from distflow.environments.endpoint_call_types import Answer, AnsweredCall, Call, Json, RequestError
from distflow.environments.tool_calls import find_tool_calls, format_of, marks_of_calls, text_before_calls
from distflow.environments.tools import typed_argument


@dataclass
class _Conversation:
    """so_far: the history, as text or as keys of its messages. messages: as the agent sees them."""

    chat: Chat
    tools: str
    so_far: str | list[str]
    messages: list[Json]


class Conversations:
    """The conversations of one episode. last: the reply to its last call.

    A call extends a conversation if it has the same tools and its messages begin with those of the conversation, with
    the policy's replies as returned; of several such conversations, it extends the longest. A call that
    extends none is a branch, and so is each further answer to one call, and a call that extends a conversation still
    waiting for a reply: calls are answered concurrently.
    """

    def __init__(self, chat: Chat, format: str | None, max_calls: int) -> None:
        """format: of tool calls; None for the chat template's. max_calls: maximum of calls answered."""
        self._chat, self._format, self._max_calls = chat, format, max_calls
        self._conversations: list[_Conversation] = []
        self.last: Reply | None = None

    @property
    def messages(self) -> list[list[Json]]:
        """The messages of each conversation, ordered by their last call."""
        return [conversation.messages for conversation in self._conversations]

    async def answer(self, call: Call) -> Answer:
        """Answer a call. Raises UserError for unsupported content; RequestError beyond max_calls, when the finish
        reason becomes max_turns; asyncio.CancelledError if the engine fails."""
        if sum(chat.turns for chat in self._chat.conversations) >= self._max_calls:
            self._chat.conversations[-1].finish_reason = "max_turns"
            raise RequestError(410, f"this episode has had its {self._max_calls} replies (max_calls)", "max_calls")
        found = self._extended(call) if call.choice == 0 else None
        begun = found or self._begun(call)
        num_known, chat = len(begun.so_far), begun.chat
        format = None
        if call.tools:
            format = self._format or format_of(chat.tokens.tool_template(call.tools))
        format = format if call.parses_tools else None
        on_token.set(None if call.told is None else _PartialText(chat, call, format).add)
        reply = await chat.ask(
            call.messages[num_known:],
            stop=call.stop,
            max_tokens=call.max_tokens,
            tools=call.tools if found is None else (),
        )
        answer = _answer(call, chat, reply, format)
        self.last = reply
        if reply.token_ids:
            begun.so_far = _so_far(call.messages, answer, reply)
            begun.messages = _messages(call.messages) + [answer.message]
            if found is not None:
                self._conversations.remove(found)
            self._conversations.append(begun)
        return answer

    def _extended(self, call: Call) -> _Conversation | None:
        whole, tools = _so_far(call.messages), _tools(call)
        fitting = [
            each
            for each in self._conversations
            if each.tools == tools and len(each.so_far) < len(whole) and whole[: len(each.so_far)] == each.so_far
            if not each.chat.waiting
        ]
        return max(fitting, key=lambda each: len(each.so_far), default=None)

    def _begun(self, call: Call) -> _Conversation:
        chat, is_text = self._chat, isinstance(call.messages, str)
        if chat.segments or chat.waiting:
            chat = chat.fork([{"role": "user", "content": ""}])
            chat.why = self._why(call)
        chat.messages, chat.tools, chat.templated = [], (), not is_text  # calls contain their whole history
        return _Conversation(chat, _tools(call), "" if is_text else [], [])

    def _why(self, call: Call) -> str:
        """Why the call begins a branch: `answers` (a further one to one call), `at_once` (it extends a conversation
        that waits), `tools` (others), `again` (nothing new), `reply` (a reply came back changed) or `history` (so did
        anything else)."""
        if call.choice:
            return "answers"
        whole, tools = _so_far(call.messages), _tools(call)
        alike: list[Any] = [each for each in self._conversations if type(each.so_far) is type(whole)]
        common = [len(os.path.commonprefix([each.so_far, whole])) for each in alike]
        if len(whole) in common:
            return "again"
        extended = [each for each, length in zip(alike, common, strict=True) if length == len(each.so_far)]
        if extended or not self._conversations:
            return "at_once" if not extended or any(each.tools == tools for each in extended) else "tools"
        nearest = max(zip(common, alike, strict=True), key=lambda pair: pair[0], default=None)
        is_reply = nearest is not None and nearest[1].so_far[nearest[0]].startswith('["assistant"')
        return "reply" if is_reply else "history"


class _PartialText:
    """Tells the caller the text of a reply while it is drawn, except what may still change: an incomplete character,
    white space at the end, what may be the beginning of a stop string or a tool call, and everything after these. If
    the format of calls has no mark of its own, it tells nothing. format: None if no calls are read."""

    def __init__(self, chat: Chat, call: Call, format: str | None) -> None:
        assert call.told is not None
        self._tokens, self._tell, self._reads_calls = chat.tokens, call.told, format is not None
        marks = () if format is None else marks_of_calls(format)
        self._marks, self._ended = (*call.stop, *marks), format is not None and not marks
        self._ids, self._begin, self._read = list[int](), 0, 0
        self._text, self._num_told = "", 0

    def add(self, token: int) -> None:
        self._ids.append(token)
        if self._ended:
            return
        if self._reads_calls and self._tokens.written([token]) != self._tokens.decode([token]):
            self._ended = True  # a special token, with which a call may begin
            return
        # Text is decoded together with the tokens before it, as far as the last piece, which is enough for a tokenizer.
        known, text = (self._tokens.decode(self._ids[self._begin : end]) for end in (self._read, None))
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return
        self._text += text[len(known) :]
        self._begin, self._read = self._read, len(self._ids)
        places = [place for mark in self._marks if (place := self._text.find(mark)) >= 0]
        self._ended = bool(places)
        sure = self._text[: min(places)] if places else self._text[: len(self._text) - self._num_held()]
        sure = sure.rstrip()
        if len(sure) > self._num_told:
            self._tell(sure[self._num_told :])
            self._num_told = len(sure)

    def _num_held(self) -> int:
        """The length of the longest end of the text with which a mark begins."""
        ends = [i for mark in self._marks for i in range(1, len(mark)) if self._text.endswith(mark[:i])]
        return max(ends, default=0)


def _tools(call: Call) -> str:
    return json.dumps(call.tools, sort_keys=True)


def _messages(messages: Sequence[Json] | str) -> list[Json]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _so_far(messages: Sequence[Json] | str, answer: Answer | None = None, reply: Reply | None = None) -> Any:
    """A history for comparison, equal if the meaning is. answer: the last one. reply: everything drawn for it: a text
    whose stop string was drawn continues where that is in the text, or it would be there twice."""
    if isinstance(messages, str):
        return messages + (reply.text if reply is not None else "")
    said = answer is not None and (answer.text or answer.calls)
    return [_key(message) for message in (*messages, *([answer.message] if answer is not None and said else ()))]


def _key(message: Json) -> str:
    """A message without ids, which clients may change, and without the white space around a reply, which some strip."""
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], text, calls], sort_keys=True)


def _answer(call: Call, chat: Chat, reply: Reply, format: str | None) -> Answer:
    """The answer from a reply. format: of its tool calls; None if there are none."""
    text, stopped_by = reply.text, None
    if ends := [(text.find(stop), stop) for stop in call.stop if stop in text]:
        at, stopped_by = min(ends)
        text = text[:at]
    calls: tuple[AnsweredCall, ...] = ()
    if format is not None and reply.finish_reason == "stop":
        written = chat.tokens.written(reply.token_ids)
        if calls := _calls(call, written, format):
            text, stopped_by = text_before_calls(written, format), None
    drawn = chat.segments[-1] if reply.token_ids else None
    tokens = (
        []
        if drawn is None
        else [
            (chat.tokens.decode([token]), number)
            for token, number in zip(drawn.token_ids, drawn.log_probs, strict=True)
        ]
    )
    is_cut = reply.finish_reason != "stop" and stopped_by is None
    reason = "tool_calls" if calls else "length" if is_cut else "stop"
    num_prompt = len(chat.token_ids) - len(tokens)
    return Answer(text, calls, reason, stopped_by, tokens, num_prompt)


def _calls(call: Call, written: str, format: str) -> tuple[AnsweredCall, ...]:
    """The tool calls; empty if one is unreadable, in which case the reply is text."""
    found = find_tool_calls(written, format)
    if any(each.problem for each in found):
        return ()
    declared = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in call.tools}
    made = []
    for number, each in enumerate(found):
        seen = json.dumps([_so_far(call.messages), number, written])
        id = hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()[:9]  # templates of Mistral take nine characters
        schemas = declared.get(each.name, {})
        arguments = dict(each.arguments)
        if not each.typed:
            arguments = {name: typed_argument(str(text), schemas.get(name, {})) for name, text in arguments.items()}
        try:
            json.dumps([each.name, arguments], allow_nan=False, ensure_ascii=False).encode()
        except ValueError:  # 1e999, or half of a surrogate pair: not possible in a JSON response
            return ()
        made.append(AnsweredCall(id, each.name, arguments))
    return tuple(made)
