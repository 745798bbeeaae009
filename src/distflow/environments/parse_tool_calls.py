"""Finds the tool calls in a model's reply, in the format of its chat template: a table of four.

An unreadable call is also returned, with the reason, so that the model can be informed. Text
written while thinking (up to `</think>`) contains no calls.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from distflow.errors import UserError, hint

_THOUGHT_END = "</think>"
_SHOWN = 80


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str
    """Empty if it is unreadable."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be run; empty if it can."""
    typed: bool = True
    """False if the arguments are text whose types the format does not give."""


def find_tool_calls(text: str, format: str, in_thought: bool = False) -> list[ToolCall]:
    """All calls in a reply, in order. text: with special tokens, but without the one that ends the
    turn. in_thought: whether the prompt has opened the thinking."""
    spoken = text[_thought_end(text, format, in_thought) :].strip()
    return list(FORMATS[format](spoken))


def opens_thought(prompt: str) -> bool:
    """Whether the reply to this prompt, or to its end, begins within the thinking."""
    return prompt.rstrip().endswith("<think>")


def _thought_end(text: str, format: str, in_thought: bool) -> int:
    """Where the text after the thinking begins. `</think>` in an argument of a call ends none."""
    end = text.find(_THOUGHT_END)
    thinks = in_thought or text.lstrip().startswith("<think>")
    if end < 0:
        return len(text) if thinks else 0
    if not thinks and _begins_call(text[:end], format):
        return 0
    return end + len(_THOUGHT_END)


def _begins_call(text: str, format: str) -> bool:
    marks = _BEGINS.get(format)
    if marks is None:
        return text.lstrip().startswith(("{", "[", "<|python"))
    return any(mark in text for mark in marks)


def check_format(format: str | None) -> None:
    """Raises UserError."""
    if format is not None and format not in FORMATS:
        raise UserError(
            f"workflow_kwargs.format={format}: no such format of tool calls{hint(format, FORMATS)}"
        )


def format_of(template: str) -> str:
    """The format of a chat template. Raises UserError if it contains none of them."""
    for name, mark in _MARKS:
        if mark in template:
            return name

    raise UserError(
        "the chat template shows no format of tool calls that is known: set workflow_kwargs.format "
        f"to the one that the model writes ({', '.join(FORMATS)})"
    )


def text_before_calls(text: str, format: str, in_thought: bool = False) -> str:
    """The text of a reply before its calls; the rest is omitted."""
    begins = _thought_end(text, format, in_thought)
    marks = _BEGINS.get(format)
    if marks is None:  # apart from the thinking, the whole reply is calls
        return text[:begins]
    first = min(text.find(mark, begins) for mark in marks if mark in text[begins:])
    return text[:first].rstrip()


_BEGINS = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "xml": ("<tool_call>", "<function="),
}
_MARKS = (
    ("mistral", "[TOOL_CALLS]"),
    ("xml", "<function="),
    ("hermes", "<tool_call>"),
    ("llama3", "<|python_tag|>"),
    ("llama3", '"parameters": '),
    ("llama3", "ipython"),
)
"""Marks that only templates of that format have; the first match counts."""


def _hermes(text: str) -> Iterator[ToolCall]:
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`: Qwen 2.5 and 3, Hermes."""
    begin = "<tool_call>"
    end = "</tool_call>"

    while begin in text:
        text = text.partition(begin)[2].strip()
        value, rest, problem = _first_json(text)  # the JSON may contain the end mark in a string
        if not problem and rest.startswith(end):
            yield _call(value)
            text = rest
            continue

        body, closed, text = text.partition(end)
        if not closed or not body.strip():
            problem = f"a tool call is cut off: it has no {end}"
        elif not problem:
            problem = f"{rest[:_SHOWN]!r} follows the JSON of a tool call"

        yield ToolCall("", problem=problem)


def _xml(text: str) -> Iterator[ToolCall]:
    """`<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`: Qwen3-Coder."""
    if "<tool_call>" in text and "<function=" not in text:
        yield ToolCall("", problem="a tool call has no <function=...> in it")

    place = text.find(_FUNCTION)
    while place >= 0:
        name, _, _ = text[place + len(_FUNCTION) :].partition(">")
        found, place, problem = _xml_parameters(text, place + len(_FUNCTION) + len(name) + 1)
        yield ToolCall(name.strip(), found, problem, typed=False)
        place = text.find(_FUNCTION, place)


_FUNCTION = "<function="
_NEXT_TAG = re.compile(r"<parameter=([^>]*)>|</function>")
_VALUE_TAG = re.compile(
    r"<parameter=|</parameter>(?=(?P<ends>\s*(?:<parameter=|</function>"
    r"(?P<closes>\s*(?:</tool_call>\s*)?(?:<tool_call>|<function=|\Z))?))?)"
)
"""ends: whether a parameter or the end of the call follows. closes: whether the reply ends there,
or a call begins."""


def _xml_parameters(text: str, place: int) -> tuple[dict[str, str], int, str]:
    """The parameters that begin here, where the call ends, and what is wrong with it."""
    found: dict[str, str] = {}
    while True:
        next_call = text.find(_FUNCTION, place)
        if next_call < 0:
            next_call = len(text)
        tag = _NEXT_TAG.search(text, place, next_call)
        if tag is None:
            return found, place, "a tool call is cut off: it has no </function>"
        if tag[1] is None:
            return found, tag.end(), ""

        end = _xml_value_end(text, tag.end())
        if end < 0 and text.find("</function>", tag.end()) < 0:
            return found, tag.end(), "a tool call is cut off: it has no </function>"
        if end < 0:
            return found, tag.end(), f"the parameter {tag[1][:_SHOWN]!r} has no </parameter>"
        found[tag[1].strip()] = text[tag.end() : end].removeprefix("\n").removesuffix("\n")
        place = end + len("</parameter>")


def _xml_value_end(text: str, begin: int) -> int:
    """Where a value ends: at an end mark behind which there is a parameter, or the end of the call
    and no further text; not at that of a parameter in the value. Else at the first behind which
    there is an end; -1 if there is none."""
    depth = 0
    first = -1
    for tag in _VALUE_TAG.finditer(text, begin):
        if tag[0] != "</parameter>":
            depth += 1
            continue

        if tag["ends"] is not None:
            if first < 0:
                first = tag.start()
            is_sure = tag["closes"] is not None or tag["ends"].endswith("<parameter=")
            if depth == 0 and is_sure:
                return tag.start()

        depth = max(depth - 1, 0)

    if _FUNCTION in text[begin : max(first, begin)]:
        return -1  # The mark is one of another call.
    return first


def _llama3(text: str) -> Iterator[ToolCall]:
    """The whole reply is `{"name": "add", "parameters": {"a": 1}}`, several separated by `;`: Llama
    3."""
    mark = "<|python_tag|>"
    if text.startswith("{"):  # A mark behind this is in an argument.
        if '"name"' not in text:
            return
    elif mark in text:
        text = text.partition(mark)[2].strip()
    else:
        return

    while text:
        value, text, problem = _first_json(text)
        if problem:
            yield ToolCall("", problem=problem)
        else:
            yield _call(value)
        text = text.removeprefix(mark).lstrip("; \n\t")


def _mistral(text: str) -> Iterator[ToolCall]:
    """`[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`, or `[TOOL_CALLS]add[ARGS]{"a": 1}`
    (since v11)."""
    mark = "[TOOL_CALLS]"
    while mark in text:
        text = text.partition(mark)[2].strip()
        if text.startswith(("[", "{")):
            body = text
            value, rest, problem = _first_json(body)  # the JSON may contain the mark in a string
            text = body if problem else rest
            after = text.partition(mark)[0].strip()
            if not problem and after:
                problem = f"{after[:_SHOWN]!r} follows the JSON of a tool call"
            yield from _each_call(value, problem)
            continue

        name, has_arguments, body = text.partition("[ARGS]")
        if not has_arguments or mark in name:
            yield from _calls(text.partition(mark)[0])
            continue

        value, rest, problem = _first_json(body.strip())
        text = body if problem else rest
        plain_name = name.partition("[CALL_ID]")[0].strip()
        yield _call({"name": plain_name, "arguments": value}, problem)


FORMATS: Mapping[str, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "xml": _xml,
}


def _calls(body: str) -> Iterator[ToolCall]:
    """The calls of a JSON text, which is one call or a list."""
    value, rest, problem = _first_json(body.strip())
    if not problem and rest:
        problem = f"{rest[:_SHOWN]!r} follows the JSON of a tool call"
    yield from _each_call(value, problem)


def _each_call(value: Any, problem: str) -> Iterator[ToolCall]:
    """value: of JSON, which is one call or a list. problem: why it is not used."""
    if problem:
        yield ToolCall("", problem=problem)
        return
    values = value if isinstance(value, list) else [value]
    for each in values:
        yield _call(each)


def _call(value: Any, problem: str = "") -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall("", problem='a tool call must be {"name": ..., "arguments": {...}}')

    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as in OpenAI's API
        arguments, _, problem = _first_json(arguments.strip())
    if isinstance(arguments, dict):
        return ToolCall(name, arguments, problem)

    if not problem and arguments is not None:
        problem = "the arguments of a tool call must be a JSON object"
    return ToolCall(name, {}, problem)


def _first_json(text: str) -> tuple[Any, str, str]:
    """The JSON value at the start of the text, the text after it, and why there is none."""
    try:
        value, end = _DECODER.raw_decode(text)
        _check_plain(value)
        return value, text[end:].strip(), ""
    except (ValueError, RecursionError) as error:
        return None, "", f"the JSON of a tool call cannot be read: {error}"


def _check_plain(value: object) -> None:
    """Raises ValueError for what no tool can receive: infinities, halves of surrogate pairs;
    TypeError for what JSON lacks."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# models break lines within strings
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
