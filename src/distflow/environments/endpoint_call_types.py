"""A call of the endpoint and its answer, independent of the wire format, and code shared by the formats."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distflow.data.messages import check_unicode

Json = dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text")


class RequestError(ValueError):
    """status: of HTTP. code: as known by clients."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Call:
    """messages: in the form of chat templates, or a str that is continued directly. tools: schemas of functions.
    parses_tools: False if the caller wants text. temperature etc.: for a served model; a run has its own. n: number of
    answers. choice: which of them this is; the second and later begin a branch. told: called with pieces of the
    answer's text while it is drawn."""

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
    """finish_reason: stop, length or tool_calls. stopped_by: the string of `stop` that ended it, which the text
    excludes. tokens: text and log-prob of each drawn token."""

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
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


class Wire(NamedTuple):
    """A wire format. read: parses the call in a request's body; raises RequestError, KeyError, TypeError, ValueError.
    write: the body of the response, with all answers. stream: its events, with names if the format has them."""

    read: Any
    write: Any
    stream: Any


class Piece(NamedTuple):
    """The event with the text of an answer, which may be sent in pieces. data: the event's, from a text."""

    name: str
    text: str
    data: Callable[[str], Json]


Events = Iterator[tuple[str, Json | str] | Piece]


def read_common(body: Json, most: str, stop: str = "stop") -> Json:
    """Arguments of `Call` that have the same meaning in every format. most, stop: their names in this one."""
    check_unicode(body, "the request")
    stops = body.get(stop) or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if not all(isinstance(each, str) and each for each in stops):
        raise RequestError(400, f"'{stop}' must be a string or a list of strings")
    found: Json = {"stop": stops, "max_tokens": _number(body, most, int, 1)}
    found |= {"temperature": _number(body, "temperature", float, 0), "top_p": _number(body, "top_p", float, 0)}
    return {**found, "seed": _number(body, "seed", int, None)}


def refuse(body: Json, harmless: Mapping[str, tuple[object, ...]]) -> None:
    """harmless: by parameter, values besides null that have no effect. Raises RequestError for others."""
    for name, values in harmless.items():
        if (value := body.get(name)) is not None and value not in values:
            raise RequestError(400, f"'{name}' is not supported ({json.dumps(value):.80}): remove it")


def text_of(content: object) -> str:
    """The text of a message, which may have parts. Raises RequestError for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(400, f"content of type '{kind}' is not supported: only text is")
    return "".join(part["text"] for part in parts)


def assistant(text: str, calls: Sequence[tuple[str, str, object]]) -> list[Json]:
    """The policy's message; empty if it says nothing. calls: id, name, and arguments or their JSON text."""
    made = [_tool_call(id, str(name), _arguments(arguments)) for id, name, arguments in calls]
    if not text and not made:
        return []
    return [{"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}]


def named_tools(messages: Sequence[Json]) -> list[Json]:
    """The messages, with the tool's name in each tool message, which some templates need. Raises RequestError."""
    if not messages:
        raise RequestError(400, "there are no messages")
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    return [
        {**message, "name": names.get(message["tool_call_id"], "unknown")} if message["role"] == "tool" else message
        for message in messages
    ]


def tool_schema(name: str, description: object, parameters: object) -> Json:
    """A tool schema in the form of chat templates."""
    if not isinstance(name, str) or not isinstance(parameters := parameters or {"type": "object"}, dict):
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
