"""Finds the tool calls in a model's reply, in the format of its chat template: a table of five.

An unreadable call is also returned, with the reason, so that the model can be informed. Text
written while thinking (up to `</think>`) contains no calls.
"""

import ast
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
    """A call as the model wrote it. name: "" if unreadable. problem: why it cannot be run, "" if it
    can. typed: False if the arguments are text whose types the format does not give."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    typed: bool = True


def find_tool_calls(text: str, format: str, in_thought: bool = False) -> list[ToolCall]:
    """All calls in a reply, in order. text: with special tokens, but without the one that ends the
    turn. in_thought: whether the prompt has opened the thinking."""
    return list(FORMATS[format](text[_thought_end(text, format, in_thought) :].strip()))


def opens_thought(prompt: str) -> bool:
    """Whether the reply to this prompt, or to its end, begins within the thinking."""
    return prompt.rstrip().endswith("<think>")


def _thought_end(text: str, format: str, in_thought: bool) -> int:
    """Where the text after the thinking begins. `</think>` in an argument of a call ends none."""
    end = text.find(_THOUGHT_END)
    if in_thought or text.lstrip().startswith("<think>"):
        return end + len(_THOUGHT_END) if end >= 0 else len(text)
    marks = _BEGINS.get(format)
    if marks is None:
        has_begun = text.lstrip().startswith(("{", "[", "<|python"))
    else:
        has_begun = any(0 <= text.find(mark) < end for mark in marks)
    return 0 if end < 0 or has_begun else end + len(_THOUGHT_END)


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
        "to the one that "
        f"the model writes ({', '.join(FORMATS)})"
    )


def text_before_calls(text: str, format: str, in_thought: bool = False) -> str:
    """The text of a reply before its calls; the rest is omitted."""
    begins = _thought_end(text, format, in_thought)
    marks = _BEGINS.get(format)
    if marks is None:  # apart from the thinking, the whole reply is calls
        return text[:begins]
    return text[: min(at for mark in marks if (at := text.find(mark, begins)) >= 0)].rstrip()


def marks_of_calls(format: str) -> tuple[str, ...]:
    """The texts with which calls begin; empty if the whole reply is calls."""
    return _BEGINS.get(format, ())


_BEGINS = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "xml": ("<tool_call>", "<function="),
}
_MARKS = (
    ("mistral", "[TOOL_CALLS]"),
    ("xml", "<function="),
    ("hermes", "<tool_call>"),
    ("pythonic", "func_name1("),
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
        wrong = problem or f"{rest[:_SHOWN]!r} follows the JSON of a tool call"
        yield ToolCall(
            "",
            problem=wrong
            if closed and body.strip()
            else f"a tool call is cut off: it has no {end}",
        )


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
        tag = _NEXT_TAG.search(text, place, next_call if next_call >= 0 else len(text))
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
        ends = tag["ends"] is not None
        first = tag.start() if ends and first < 0 else first
        if (
            depth == 0
            and ends
            and (tag["closes"] is not None or tag["ends"].endswith("<parameter="))
        ):
            return tag.start()
        depth = max(depth - 1, 0)
    return -1 if _FUNCTION in text[begin : max(first, begin)] else first  # of another call


def _llama3(text: str) -> Iterator[ToolCall]:
    """The whole reply is `{"name": "add", "parameters": {"a": 1}}`, several separated by `;`: Llama
    3."""
    marked = "<|python_tag|>" in text and not text.startswith("{")  # else it is in an argument
    text = text.partition("<|python_tag|>")[2].strip() if marked else text
    if marked or (text.startswith("{") and '"name"' in text):
        while text:
            value, text, problem = _first_json(text)
            yield ToolCall("", problem=problem) if problem else _call(value)
            text = text.removeprefix("<|python_tag|>").lstrip("; \n\t")


def _mistral(text: str) -> Iterator[ToolCall]:
    """`[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`, or `[TOOL_CALLS]add[ARGS]{"a": 1}`
    (since v11)."""
    mark = "[TOOL_CALLS]"
    while mark in text:
        text = text.partition(mark)[2].strip()
        is_json = text.startswith(("[", "{"))
        name, has_arguments, body = ("", "", text) if is_json else text.partition("[ARGS]")
        if not is_json and (not has_arguments or mark in name):
            part = text.partition(mark)[0]
            yield from _calls(part.strip())
            continue
        # the JSON may contain the mark in a string
        value, rest, problem = _first_json(body.strip())
        text = body if problem else rest
        after = text.partition(mark)[0].strip()
        if not is_json:
            yield _call(
                {"name": name.partition("[CALL_ID]")[0].strip(), "arguments": value}, problem
            )
        elif problem or after:
            yield ToolCall(
                "", problem=problem or f"{after[:_SHOWN]!r} follows the JSON of a tool call"
            )
        else:
            for each in value if isinstance(value, list) else [value]:
                yield _call(each)


def _pythonic(text: str) -> Iterator[ToolCall]:
    """The whole reply is a list of calls, `[add(a=1), add(a=2)]`, with literals as arguments: Llama
    4, OLMo."""
    text = text.removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", text):
        return
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        yield ToolCall("", problem=f"the list of calls cannot be read: {error}"[:_SHOWN])
        return
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        try:
            name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
        except (ValueError, RecursionError) as error:
            yield ToolCall("", problem=f"the name of a call cannot be read: {error}"[:_SHOWN])
            continue
        if not isinstance(node, ast.Call):
            yield ToolCall("", problem=f"{name[:_SHOWN]!r} in the list is not a call")
            continue
        try:
            found = {str(key.arg): ast.literal_eval(key.value) for key in node.keywords if key.arg}
            _check_plain(found)
        except (ValueError, TypeError, RecursionError):
            yield ToolCall(name, problem="an argument is not a plain value")
            continue
        has_names = len(found) == len(node.keywords) and not node.args
        yield ToolCall(
            name, found, "" if has_names else "every argument needs its name, as in f(a=1)"
        )


FORMATS: Mapping[str, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "xml": _xml,
}


def _calls(body: str) -> Iterator[ToolCall]:
    """The calls of a JSON text, which is one call or a list."""
    value, rest, problem = _first_json(body.strip())
    if not problem and rest:
        problem = f"{rest[:_SHOWN]!r} follows the JSON of a tool call"
    if problem:
        yield ToolCall("", problem=problem)
        return
    for each in value if isinstance(value, list) else [value]:
        yield _call(each)


def _call(value: Any, problem: str = "") -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return ToolCall("", problem='a tool call must be {"name": ..., "arguments": {...}}')
    found = value.get("arguments", value.get("parameters", {}))
    if isinstance(found, str):  # as in OpenAI's API
        found, rest, problem = _first_json(found.strip())
    if not problem and found is not None and not isinstance(found, dict):
        problem = "the arguments of a tool call must be a JSON object"
    return ToolCall(name, found if isinstance(found, dict) else {}, problem)


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
