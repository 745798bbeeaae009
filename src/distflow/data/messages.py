"""A row's values for the chat template: messages, tools and further arguments, checked and in the
templates' form.

Entries that are null count as absent: files with typed columns have them where other rows have a
value.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.builtin_names import PROMPT_CHAT, TEMPLATE_PARAMETERS
from distflow.errors import hint
from distflow.observe.crash_safe_files import JSON

Messages = list[dict[str, JSON]]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")


class RowError(ValueError):
    """A row is bad; the message says why."""


def read_prompt(found: JSON, name: str) -> str | Messages:
    """A str, or chat messages. name: of the column. Raises RowError."""
    what = f"the prompt (column '{name}')"
    if isinstance(found, list):
        return _messages(found, what)
    if not isinstance(found, str):
        raise RowError(f"{what} is {kind(found)}, neither a str nor a list of chat messages")
    if not found:
        raise RowError(f"{what} is empty")

    check_unicode(found, what)

    return found


def read_conversation(found: JSON, name: str) -> Messages:
    """Messages, or their JSON text, whose last is the assistant's. name: of the column. Raises
    RowError."""
    what = f"the conversation (column '{name}')"
    found = _parsed(found, what)
    if not isinstance(found, list):
        raise RowError(f"{what} is {kind(found)}, not a list of chat messages")

    messages = _messages(found, what)
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise RowError(f"{what} has no turn of the {ASSISTANT}, so there is nothing to train on")
    if roles[-1] != ASSISTANT:
        raise RowError(
            f"{what} ends with a message of the {roles[-1]}, which has no answer: end it with the "
            f"{ASSISTANT}'s turn"
        )
    if roles[0] == ASSISTANT:
        raise RowError(
            f"{what} begins with the {ASSISTANT}'s turn, which answers nothing: add a message "
            "before it"
        )

    for number, message in enumerate(messages, 1):
        if (
            message["role"] == ASSISTANT
            and not message.get("content")
            and "tool_calls" not in message
        ):
            raise RowError(f"message {number} of {what} is empty, so there is nothing to train on")

    return messages


def asked_text(messages: Sequence[Mapping[str, object]]) -> str:
    """What a chat's messages ask, as text without a template: those of the system are left out."""
    texts = [
        message.get("content")
        for message in messages
        if message.get("role") not in ("system", "developer")
    ]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def prompt_of(text: str, extra_info: Mapping[str, Any] | None) -> str:
    """A row's prompt as the user's code gets it: of a chat what its messages ask, else the text."""
    messages = (extra_info or {}).get(PROMPT_CHAT)
    return asked_text(messages) if messages else text


def read_tools(found: JSON, name: str) -> list[JSON]:
    """Functions as JSON schemas, from a list or its JSON text; empty if none. name: of the column.
    Raises RowError."""
    what = f"the tools (column '{name}')"
    found = _without_nulls(_parsed(found, what)) if found else []
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise RowError(
            f"{what} are {kind(found)}, not a list of JSON schemas; data.tools_key names another "
            "column"
        )

    check_unicode(found, what)
    return found


def read_template_kwargs(found: JSON, name: str) -> dict[str, JSON]:
    """Further arguments of the chat template, as a mapping or its JSON text. Raises RowError."""
    what = f"the arguments of the chat template (column '{name}')"
    found = _without_nulls(_parsed(found, what)) if found else {}
    if not isinstance(found, dict):
        raise RowError(f"{what} are {kind(found)}, not a mapping")
    if reserved := [key for key in found if key in TEMPLATE_PARAMETERS]:
        raise RowError(f"{what} may not hold '{reserved[0]}', which is set already")

    check_unicode(found, what)

    return found


def check_unicode(value: JSON, what: str) -> None:
    """Raises RowError for half a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RowError(f"{what} holds half a surrogate pair") from None


def kind(value: object) -> str:
    """A value in an error message: its type and beginning."""
    if value is None:
        return "missing"
    return f"{type(value).__name__} {value!r:.40}"


def _messages(found: list[JSON], what: str) -> Messages:
    if not found:
        raise RowError(f"{what} is an empty list of chat messages")
    return [
        _message(message, f"message {number} of {what}") for number, message in enumerate(found, 1)
    ]


def _message(message: JSON, what: str) -> dict[str, JSON]:
    if not isinstance(message, dict):
        raise RowError(f"{what} is {kind(message)}, not a mapping with 'role' and 'content'")

    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str):
        raise RowError(f"{what} needs the str values 'role' and 'content'")
    if role not in ROLES:
        raise RowError(f"{what} has the role '{role}'{hint(role, ROLES)}")

    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], what)
        if not message["tool_calls"]:
            del message["tool_calls"]

    content = message.get("content")
    if isinstance(content, list):
        raise RowError(
            f"{what} has a list of parts as its content: make one str of it (only text can be "
            "trained on)"
        )
    if not isinstance(content, str) and (content is not None or "tool_calls" not in message):
        raise RowError(
            f"{what} needs the str values 'role' and 'content'; its content is {kind(content)}"
        )

    check_unicode(message, what)
    return message


def _tool_calls(found: JSON, what: str) -> list[JSON]:
    """Tool calls with arguments as an object, as templates expect; OpenAI's have JSON text."""
    calls: list[JSON] = []
    for call in found if isinstance(found, list) else [found]:
        call = _without_nulls(call)
        function = None
        if isinstance(call, dict):
            function = call.get("function", call)

        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{what} has a tool call without the name of a function: {kind(call)}")

        if isinstance(text := function.get("arguments"), str):
            arguments = _parsed(text, f"the arguments of '{function['name']}' in {what}")
            if isinstance(arguments, dict):
                function["arguments"] = arguments

        calls.append(call)

    return calls


def _parsed(value: JSON, what: str) -> JSON:
    """The value of a JSON text; anything else unchanged."""
    if not isinstance(value, str):
        return value

    try:
        parsed: JSON = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is text, but not JSON ({error})") from None

    return parsed


def _without_nulls(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value
