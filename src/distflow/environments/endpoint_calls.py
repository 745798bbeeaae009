"""A call of the endpoint and its answer, whatever the wire format, and what the formats share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distflow.data.messages import check_unicode

Json = dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text")


class RequestError(ValueError):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        """status: of HTTP. code: as clients know it."""
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Call:
    """What an agent asks the endpoint for."""

    messages: Sequence[Json] | str
    """In the form of chat templates, or a text that the policy continues directly."""
    tools: Sequence[Json] = ()
    """Schemas of functions."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    parses_tools: bool = True
    """False if the caller wants tool calls as text."""
    temperature: float | None = None
    """This and the next two are for a served model; a run has its own."""
    top_p: float | None = None
    seed: int | None = None


class AnsweredCall(NamedTuple):
    """A tool call of the policy."""

    id: str
    name: str
    arguments: Json


@dataclass(frozen=True)
class Answer:
    """The policy's answer to a call."""

    text: str
    """Without the string that ended it."""
    calls: tuple[AnsweredCall, ...]
    finish_reason: str
    """stop, length or tool_calls."""
    stopped_by: str | None
    """The string of `Call.stop` that ended the answer."""
    num_tokens: int
    """Of the reply."""
    num_prompt_tokens: int

    @property
    def message(self) -> Json:
        """The message in the form of templates, as the caller is expected to return it."""
        calls = [tool_call(call.id, call.name, call.arguments) for call in self.calls]
        return _assistant_message(self.text, calls)


class Wire(NamedTuple):
    """A wire format."""

    read: Any
    """Parses the call in a request's body. Raises RequestError, KeyError, TypeError, ValueError."""
    write: Any
    """Makes the body of the response from the request's body, the answer and a head."""
    stream: Any
    """Makes the events of the response, with names if the format has them, from the same."""


Events = Iterator[tuple[str, Json | str]]


def read_common(body: Json, most: str, stop: str = "stop") -> Json:
    """The arguments of `Call` that have the same meaning in every format. most, stop: their names
    in this one."""
    check_unicode(body, "the request")
    stops = body.get(stop) or ()
    if isinstance(stops, str):
        stops = (stops,)
    if not all(isinstance(each, str) and each for each in stops):
        raise RequestError(400, f"'{stop}' must be a string or a list of strings")

    return {
        "stop": tuple(stops),
        "max_tokens": _number(body, most, int, 1),
        "temperature": _number(body, "temperature", float, 0),
        "top_p": _number(body, "top_p", float, 0),
        "seed": _number(body, "seed", int, None),
    }


def refuse(body: Json, harmless: Mapping[str, tuple[object, ...]]) -> None:
    """harmless: by parameter, values besides null that have no effect. Raises RequestError for
    others."""
    for name, values in harmless.items():
        value = body.get(name)
        if value is not None and value not in values:
            raise RequestError(
                400, f"'{name}' is not supported ({json.dumps(value):.80}): remove it"
            )


def text_of(content: object) -> str:
    """The text of a message, which may have parts. Raises RequestError for parts that are not
    text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    return "".join(_text_of_part(part) for part in parts)


def _text_of_part(part: object) -> str:
    kind: object = type(part).__name__
    if isinstance(part, dict):
        kind = part.get("type")
        text = part.get("text")
        if kind in _TEXT_PARTS and isinstance(text, str):
            return text

    raise RequestError(400, f"content of type '{kind}' is not supported: only text is")


def assistant(text: str, calls: Sequence[tuple[str, str, object]]) -> list[Json]:
    """The policy's message; empty if it says nothing. calls: id, name, and arguments or their JSON
    text."""
    made = [tool_call(id, str(name), _arguments(arguments)) for id, name, arguments in calls]
    if not text and not made:
        return []
    return [_assistant_message(text, made)]


def _assistant_message(text: str, calls: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return message


def named_tools(messages: Sequence[Json]) -> list[Json]:
    """The messages, with the tool's name in each tool message, which some templates need. Raises
    RequestError."""
    if not messages:
        raise RequestError(400, "there are no messages")

    names = dict[str, str]()
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]

    named = list[Json]()
    for message in messages:
        if message["role"] == "tool":
            message = {**message, "name": names.get(message["tool_call_id"], "unknown")}
        named.append(message)

    return named


def tool_schema(name: object, description: object, parameters: object) -> Json:
    """A tool schema in the form of chat templates."""
    parameters = parameters or {"type": "object"}
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise RequestError(400, "a tool needs a name, and a JSON schema of its parameters")

    parameters = {"properties": {}, **parameters}
    known = parameters["properties"]
    if not isinstance(known, dict) or not all(isinstance(each, dict) for each in known.values()):
        raise RequestError(400, f"the tool '{name:.80}': 'properties' must be an object of schemas")

    function = {"name": name, "description": str(description or ""), "parameters": parameters}

    return {"type": "function", "function": function}


def tool_call(id: str, name: str, arguments: object) -> Json:
    """A tool call in the form of chat templates."""
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

    is_number = type(value) in (int, kind)
    if not is_number or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise RequestError(400, f"'{name}' is {value!r:.40}: it must be a number{bound}")

    return value
