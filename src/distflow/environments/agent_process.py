"""The process of an episode's third-party agent: a function or a command."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from tempfile import TemporaryFile
from typing import Any, cast

from distflow.environments.tools_in_user_code_process import awaited, without_control
from distflow.errors import UserError
from distflow.import_target import load

_READ_BYTES = 64 * 2**10
_SHOWN = 500
GIVEN = ("base_url", "api_key", "model", "prompt", "messages", "ground_truth", "row")
"""Arguments that a user's function may take by name. messages: of the row's prompt."""
JUDGED = ("conversations", "result")
"""Further arguments that a reward function may take. messages are those of the last conversation
with a call."""
_OPENAI_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_BASE_URL")
_ANTHROPIC_URLS = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL")
"""The official variables, and those of frameworks that pass an address of their own to the official
clients."""


def client_variables(base_url: str, key: str) -> dict[str, str]:
    """The environment variables by which clients find an endpoint. base_url: without /v1."""
    urls = {
        **dict.fromkeys(_OPENAI_URLS, f"{base_url}/v1"),
        **dict.fromkeys(_ANTHROPIC_URLS, base_url),
    }
    return {**urls, "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}


_IMPORTED_LATE = {
    "openai": ("openai.resources.chat.chat", "openai.resources.responses.responses"),
    "anthropic": ("anthropic.resources.messages.messages",),
    "httpx": ("httpcore",),
    "httpx2": ("httpcore2",),
}
"""Modules that clients import only with their first call."""


class Agent:
    """An agent, loaded in the server process and run in an episode's."""

    def __init__(
        self,
        function: str | None,
        command: Sequence[str],
        reward: str | None,
        kwargs: Sequence[str] = (),
    ) -> None:
        """reward: a function of the trace. kwargs: names of further arguments of the function.
        Raises UserError for uncallable functions."""
        # Clients that a module creates on import would otherwise use the user's keys. Nothing
        # listens here.
        os.environ.update(client_variables("http://127.0.0.1:9", "of-the-episode"))
        os.environ.pop("ANTHROPIC_AUTH_TOKEN", None)
        self._command = command
        self._function: Callable[..., object] | None = None
        if function is not None:
            self._function = _loaded("function", function, GIVEN, kwargs)
        self._reward: Callable[..., object] | None = None
        if reward is not None:
            self._reward = _loaded("reward", reward, (*GIVEN, *JUDGED))

        # import here once, instead of in each episode
        for package in _IMPORTED_LATE.keys() & sys.modules.keys():
            for name in _IMPORTED_LATE[package]:
                with suppress(ImportError):  # module names depend on the version
                    import_module(name)

    def run(self, environment: Mapping[str, str | None], given: dict[str, Any]) -> object:
        """Returns the function's result or the command's output. environment: changed variables;
        None removes one."""
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

        if self._function is not None:
            return _called(self._function, given)
        return self._printed(given["row"])

    def reward(self, given: dict[str, Any]) -> object:
        assert self._reward is not None
        return _called(self._reward, given)

    def _printed(self, row: object) -> str:
        """The command's output. Raises RuntimeError if it fails. It gets the row as JSON on
        standard input."""
        with TemporaryFile() as told, TemporaryFile() as out, TemporaryFile() as errors:
            told.write(json.dumps(row).encode())
            told.seek(0)

            status = subprocess.run(self._command, stdin=told, stdout=out, stderr=errors).returncode
            if status:
                raise RuntimeError(
                    f"the command ended with exit status {status}: {_end(errors, _SHOWN)}"
                )

            return _end(out, _READ_BYTES)


def _loaded(
    option: str, target: str, known: Sequence[str], own: Sequence[str] = ()
) -> Callable[..., object]:
    """own: the function's other arguments."""
    found = cast(Callable[..., object], load(target))
    if not callable(found):
        raise UserError(f"workflow_kwargs.{option}: '{target}' cannot be called")

    signature = inspect.signature(found)
    for name in own:
        if name in known:
            raise UserError(f"workflow_kwargs.kwargs: '{name}' is an argument of every agent")
        if name not in signature.parameters:
            raise UserError(f"workflow_kwargs.kwargs: '{name}' is no parameter of '{target}'")

    names = (*known, *own)
    try:
        signature.bind(**{name: None for name in names if name in signature.parameters})
    except TypeError as error:
        raise UserError(
            f"workflow_kwargs.{option}: '{target}': {error}; it may take {', '.join(names)}"
        ) from None

    return found


def _called(function: Callable[..., object], given: Mapping[str, object]) -> object:
    parameters = inspect.signature(function).parameters
    returned = function(**{name: value for name, value in given.items() if name in parameters})
    if inspect.isawaitable(returned):
        return asyncio.run(awaited(returned))
    return returned


def _end(file: Any, most: int) -> str:
    file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
    return without_control(file.read().decode("utf-8", "replace")).strip()
