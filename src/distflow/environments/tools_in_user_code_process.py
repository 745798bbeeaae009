"""The tools in the processes of episodes, where each call results in bounded text."""

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

from distflow.errors import UserError
from distflow.import_target import load, users_code

_CONTROL = re.compile(
    # escape sequences of terminals
    "\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|.)?"
    # control characters except tabs and line ends; unpaired surrogates
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)

_SHOWN = 500


class ToolAnswer(NamedTuple):
    """The answer for the model. failed: the tool failed, or its answer had to be changed."""

    text: str
    failed: bool


class Toolbox:
    """The tools, created in the server process and called in those of episodes."""

    def __init__(self, targets: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
        """targets: target and options of each, by name. Raises UserError for a tool that cannot be
        created."""
        self._functions: dict[str, Callable[..., object]] = {}
        for name, (target, options) in targets.items():
            found = cast(Callable[..., Any], load(target))
            with users_code(f"the tool '{name}' cannot be made:", passes=UserError):
                is_class = isinstance(found, type)
                if is_class:
                    self._functions[name] = found(**options)
                else:
                    self._functions[name] = partial(found, **options)

    def call(self, name: str, arguments: dict[str, Any], max_characters: int) -> list[Any]:
        """Call a tool; returns the fields of a `ToolAnswer`. Raises what the tool raises."""
        function = self._functions[name]
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = self._loop.run(awaited(returned))
        if isinstance(returned, str):
            return list(bounded(returned, max_characters))

        try:
            text = json.dumps(returned, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            kind = type(returned).__name__
            return [f"error: {name} returned {kind}, which is neither text nor a JSON value", True]

        return list(bounded(text, max_characters))

    @cached_property
    def _loop(self) -> asyncio.Runner:
        """One event loop for all calls, since connections that an async function keeps open belong
        to it."""
        return asyncio.Runner()


def bounded(text: str, max_characters: int) -> ToolAnswer:
    """The text, cut and without terminal control characters; if changed, a last line says so and
    `failed` is set."""
    kept = text[:max_characters]
    plain = without_control(kept)
    remarks = ["control characters are left out"]
    if len(plain) == len(kept.replace("\r\n", "\n")):
        remarks = []
    if len(text) > max_characters:
        remarks.append(f"cut: the answer has {len(text):,} characters")
    return ToolAnswer("\n".join([plain, *(f"[{remark}]" for remark in remarks)]), bool(remarks))


def failure(what: str) -> ToolAnswer:
    """The answer that says what went wrong."""
    return ToolAnswer(f"error: {bounded(what, _SHOWN).text}", True)


def without_control(text: str) -> str:
    return _CONTROL.sub("", text.replace("\r\n", "\n"))


async def awaited(work: Awaitable[object]) -> object:
    return await work
