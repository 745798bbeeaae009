"""A call of the endpoint and its answer, independent of the wire format, and code shared by the
formats; and the conversations of an episode whose agent sends whole histories: a call that extends
one continues its tokens."""

import hashlib
import json
import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distflow.data.messages import check_unicode
from distflow.data.sample import on_token
from distflow.environments.chat import Chat, Reply, TemplatedTwice
from distflow.environments.parse_tool_calls import (
    find_tool_calls,
    format_of,
    marks_of_calls,
    text_before_calls,
)
from distflow.environments.tool_workflow import typed_argument

Json = dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text")


class RequestError(ValueError):
    """status: of HTTP. code: as known by clients."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Call:
    """messages: in the form of chat templates, or a str that is continued directly. tools: schemas
    of functions. parses_tools: False if the caller wants text. temperature etc.: for a served
    model; a run has its own. n: number of answers. choice: which of them this is; the second and
    later begin a branch. told: called with pieces of the answer's text while it is drawn."""

    messages: Sequence[Json] | str
    tools: Sequence[Json] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    parses_tools: bool = True
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int = 1
    choice: int = 0
    told: Callable[[str], None] | None = None


class AnsweredCall(NamedTuple):
    """A tool call of the policy."""

    id: str
    name: str
    arguments: Json


@dataclass(frozen=True)
class Answer:
    """finish_reason: stop, length or tool_calls. stopped_by: the string of `stop` that ended it,
    which the text excludes. tokens: text and log-prob of each drawn token."""

    text: str
    calls: tuple[AnsweredCall, ...]
    finish_reason: str
    stopped_by: str | None
    tokens: Sequence[tuple[str, float]]
    num_prompt_tokens: int

    @property
    def message(self) -> Json:
        """The message in the form of templates, as the caller is expected to return it."""
        calls = [_tool_call(call.id, call.name, call.arguments) for call in self.calls]
        return {
            "role": "assistant",
            "content": self.text,
            **({"tool_calls": calls} if calls else {}),
        }


class Wire(NamedTuple):
    """A wire format. read: parses the call in a request's body; raises RequestError, KeyError,
    TypeError, ValueError. write: the body of the response, with all answers. stream: its events,
    with names if the format has them."""

    read: Any
    write: Any
    stream: Any


class Piece(NamedTuple):
    """The event with the text of an answer, which may be sent in pieces. data: the event's, from a
    text."""

    name: str
    text: str
    data: Callable[[str], Json]


Events = Iterator[tuple[str, Json | str] | Piece]


def read_common(body: Json, most: str, stop: str = "stop") -> Json:
    """Arguments of `Call` that have the same meaning in every format. most, stop: their names in
    this one."""
    check_unicode(body, "the request")
    stops = body.get(stop) or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if not all(isinstance(each, str) and each for each in stops):
        raise RequestError(400, f"'{stop}' must be a string or a list of strings")
    found: Json = {"stop": stops, "max_tokens": _number(body, most, int, 1)}
    found |= {
        "temperature": _number(body, "temperature", float, 0),
        "top_p": _number(body, "top_p", float, 0),
    }
    return {**found, "seed": _number(body, "seed", int, None)}


def refuse(body: Json, harmless: Mapping[str, tuple[object, ...]]) -> None:
    """harmless: by parameter, values besides null that have no effect. Raises RequestError for
    others."""
    for name, values in harmless.items():
        if (value := body.get(name)) is not None and value not in values:
            raise RequestError(
                400, f"'{name}' is not supported ({json.dumps(value):.80}): remove it"
            )


def text_of(content: object) -> str:
    """The text of a message, which may have parts. Raises RequestError for parts that are not
    text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        if (
            not isinstance(part, dict)
            or part.get("type") not in _TEXT_PARTS
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(400, f"content of type '{kind}' is not supported: only text is")
    return "".join(part["text"] for part in parts)


def assistant(text: str, calls: Sequence[tuple[str, str, object]]) -> list[Json]:
    """The policy's message; empty if it says nothing. calls: id, name, and arguments or their JSON
    text."""
    made = [_tool_call(id, str(name), _arguments(arguments)) for id, name, arguments in calls]
    if not text and not made:
        return []
    return [{"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}]


def named_tools(messages: Sequence[Json]) -> list[Json]:
    """The messages, with the tool's name in each tool message, which some templates need. Raises
    RequestError."""
    if not messages:
        raise RequestError(400, "there are no messages")
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    return [
        {**message, "name": names.get(message["tool_call_id"], "unknown")}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def tool_schema(name: str, description: object, parameters: object) -> Json:
    """A tool schema in the form of chat templates."""
    if not isinstance(name, str) or not isinstance(
        parameters := parameters or {"type": "object"}, dict
    ):
        raise RequestError(400, "a tool needs a name, and a JSON schema of its parameters")
    parameters = {"properties": {}, **parameters}
    known = parameters["properties"]
    if not isinstance(known, dict) or not all(isinstance(each, dict) for each in known.values()):
        raise RequestError(400, f"the tool '{name:.80}': 'properties' must be an object of schemas")
    function = {"name": name, "description": str(description or ""), "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_call(id: str, name: str, arguments: object) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(found: object) -> object:
    """JSON text of an object is parsed, since templates take objects."""
    if not isinstance(found, str):
        return found
    try:
        parsed = json.loads(found or "{}")
    except ValueError:
        return found
    return parsed if isinstance(parsed, dict) else found


def _number(body: Json, name: str, kind: type, least: int | None) -> Any:
    value: Any = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, kind) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise RequestError(400, f"'{name}' is {value!r:.40}: it must be a number{bound}")
    return value


@dataclass
class _Conversation:
    """so_far: the history, as text or as keys of its messages. messages: as the agent sees them."""

    chat: Chat
    tools: str
    so_far: str | list[str]
    messages: list[Json]


class Conversations:
    """The conversations of one episode. last: the reply to its last call.

    A call extends a conversation if it has the same tools and its messages begin with those of the
    conversation, with the policy's replies as returned; of several such conversations, it extends
    the longest. A call that
    extends none is a branch, and so is each further answer to one call, and a call that extends a
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
        found = self._extended(call) if call.choice == 0 else None
        begun = found or self._begun(call)
        num_known = len(begun.so_far)
        chat = begun.chat
        format = None
        if call.tools:
            format = self._format or format_of(chat.tokens.tool_template(call.tools))
        format = format if call.parses_tools else None
        on_token.set(None if call.told is None else _PartialText(chat, call, format).add)
        try:
            reply = await chat.ask(
                call.messages[num_known:],
                stop=call.stop,
                max_tokens=call.max_tokens,
                tools=call.tools if found is None else (),
            )
        except TemplatedTwice as error:
            self.templated_twice = error
            raise
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
        whole = _so_far(call.messages)
        tools = _tools(call)
        fitting = [
            each
            for each in self._conversations
            if each.tools == tools
            and len(each.so_far) < len(whole)
            and whole[: len(each.so_far)] == each.so_far
            if not each.chat.waiting
        ]
        return max(fitting, key=lambda each: len(each.so_far), default=None)

    def _begun(self, call: Call) -> _Conversation:
        chat = self._chat
        is_text = isinstance(call.messages, str)
        if chat.segments or chat.waiting:
            chat = chat.fork([{"role": "user", "content": ""}])
            chat.why = self._why(call)
        # calls contain their whole history
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
        whole = _so_far(call.messages)
        tools = _tools(call)
        alike: list[Any] = [
            each for each in self._conversations if type(each.so_far) is type(whole)
        ]
        common = [len(os.path.commonprefix([each.so_far, whole])) for each in alike]
        if len(whole) in common:
            return "again"
        extended = [
            each for each, length in zip(alike, common, strict=True) if length == len(each.so_far)
        ]
        if extended or not self._conversations:
            return (
                "at_once"
                if not extended or any(each.tools == tools for each in extended)
                else "tools"
            )
        nearest = max(zip(common, alike, strict=True), key=lambda pair: pair[0], default=None)
        is_reply = nearest is not None and nearest[1].so_far[nearest[0]].startswith('["assistant"')
        return "reply" if is_reply else "history"


class _PartialText:
    """Tells the caller the text of a reply while it is drawn, except what may still change: an
    incomplete character, white space at the end, what may be the beginning of a stop string or a
    tool call, and everything after these. If the format of calls has no mark of its own, it tells
    nothing. format: None if no calls are read."""

    def __init__(self, chat: Chat, call: Call, format: str | None) -> None:
        assert call.told is not None
        self._tokens = chat.tokens
        self._tell = call.told
        self._reads_calls = format is not None
        marks = () if format is None else marks_of_calls(format)
        self._marks = (*call.stop, *marks)
        self._ended = format is not None and not marks
        self._ids = list[int]()
        self._begin = 0
        self._read = 0
        self._text = ""
        self._num_told = 0

    def add(self, token: int) -> None:
        self._ids.append(token)
        if self._ended:
            return
        if self._reads_calls and self._tokens.written([token]) != self._tokens.decode([token]):
            self._ended = True  # a special token, with which a call may begin
            return
        # Text is decoded together with the tokens before it, as far as the last piece, which is
        # enough for a tokenizer.
        known, text = (
            self._tokens.decode(self._ids[self._begin : end]) for end in (self._read, None)
        )
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return
        self._text += text[len(known) :]
        self._begin = self._read
        self._read = len(self._ids)
        places = [place for mark in self._marks if (place := self._text.find(mark)) >= 0]
        self._ended = bool(places)
        sure = (
            self._text[: min(places)]
            if places
            else self._text[: len(self._text) - self._num_held()]
        )
        sure = sure.rstrip()
        if len(sure) > self._num_told:
            self._tell(sure[self._num_told :])
            self._num_told = len(sure)

    def _num_held(self) -> int:
        """The length of the longest end of the text with which a mark begins."""
        ends = []
        for mark in self._marks:
            for i in range(1, len(mark)):
                if self._text.endswith(mark[:i]):
                    ends.append(i)
        return max(ends, default=0)


def _tools(call: Call) -> str:
    return json.dumps(call.tools, sort_keys=True)


def _messages(messages: Sequence[Json] | str) -> list[Json]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _so_far(
    messages: Sequence[Json] | str, answer: Answer | None = None, reply: Reply | None = None
) -> Any:
    """A history for comparison, equal if the meaning is. answer: the last one. reply: everything
    drawn for it: a text whose stop string was drawn continues where that is in the text, or it
    would be there twice."""
    if isinstance(messages, str):
        return messages + (reply.text if reply is not None else "")
    said = answer is not None and (answer.text or answer.calls)
    return [
        _key(message)
        for message in (*messages, *([answer.message] if answer is not None and said else ()))
    ]


def _key(message: Json) -> str:
    """A message without ids, which clients may change, and without the white space around a reply,
    which some strip."""
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], text, calls], sort_keys=True)


def _answer(call: Call, chat: Chat, reply: Reply, format: str | None) -> Answer:
    """The answer from a reply. format: of its tool calls; None if there are none."""
    text = reply.text
    stopped_by = None
    if ends := [(text.find(stop), stop) for stop in call.stop if stop in text]:
        at, stopped_by = min(ends)
        text = text[:at]
    calls: tuple[AnsweredCall, ...] = ()
    if format is not None and reply.finish_reason == "stop":
        written = chat.tokens.written(reply.token_ids)
        in_thought = chat.opened_thought(reply)
        if calls := _calls(call, written, format, in_thought):
            text = text_before_calls(written, format, in_thought)
            stopped_by = None
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


def _calls(call: Call, written: str, format: str, in_thought: bool) -> tuple[AnsweredCall, ...]:
    """The tool calls; empty if one is unreadable, in which case the reply is text."""
    found = find_tool_calls(written, format, in_thought)
    if any(each.problem for each in found):
        return ()
    declared = {
        tool["function"]["name"]: tool["function"]["parameters"]["properties"]
        for tool in call.tools
    }
    made = []
    for number, each in enumerate(found):
        seen = json.dumps([_so_far(call.messages), number, written])
        # templates of Mistral take nine characters
        id = hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()[:9]
        schemas = declared.get(each.name, {})
        arguments = dict(each.arguments)
        if not each.typed:
            arguments = {
                name: typed_argument(str(text), schemas.get(name, {}))
                for name, text in arguments.items()
            }
        try:
            json.dumps([each.name, arguments], allow_nan=False, ensure_ascii=False).encode()
        except ValueError:  # 1e999, or half of a surrogate pair: not possible in a JSON response
            return ()
        made.append(AnsweredCall(id, each.name, arguments))
    return tuple(made)
