"""Environments in the process of an episode, with gymnasium's `reset` and `step`: observations
become text, and the model's text becomes an action.

An environment is any class (or function) whose object has these methods, the id of one that is
registered with gymnasium, or the address of an OpenEnv server, which is called by the client of the
package openenv-core.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.request import urlopen

from distflow.environments.tools_in_user_code_process import bounded, without_control
from distflow.errors import UserError
from distflow.import_target import load, load_module
from distflow.user_values import finite_number

MAX_CHARACTERS = 20_000
_READ = 200
_NUMBER = re.compile(r"-?\d+")
_TIMEOUT_S = 30
_NOT_OBSERVED = ("done", "reward", "metadata")
_INVALID = "VALIDATION_ERROR"
_REWARD = "step returned the reward"
"""How the error of a reward that is no finite number begins."""


class TextEnv:
    """Loaded in the server process; `reset` creates the environment itself in an episode's
    process."""

    def __init__(self, env: str, options: Mapping[str, Any]) -> None:
        """env: module:Class, file.py:function or a gymnasium id. Raises UserError if it cannot be
        loaded."""
        self._make: Any = find_registered(env) if is_registered(env) else load(env)
        if not callable(self._make):
            raise UserError(
                f"'{env}' cannot be called: name a class, or a function that makes the environment"
            )

        for name in ("reset", "step"):
            if isinstance(self._make, type) and not hasattr(self._make, name):
                raise UserError(
                    f"'{env}' has no {name}: an environment has gymnasium's reset and step"
                )

        self._options = dict(options)
        self._env: Any = None

    def reset(self, seed: int, options: dict[str, Any] | None) -> str:
        """The first observation. `reset` gets those of the arguments that it takes. Raises what the
        environment raises."""
        self._env = self._make(**self._options)
        given = {"seed": seed, "options": options}
        parameters = inspect.signature(self._env.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        returned = self._env.reset(**given)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"reset returned {returned!r:.80}, not (observation, info)")

        return self._text(returned[0])

    def step(self, text: str) -> list[Any]:
        """The observation, the reward, and whether the episode has ended. A text without an action
        gets a message and is not a step."""
        space: Any = getattr(self._env, "action_space", None)
        action: object = text
        if hasattr(space, "n"):
            first = int(getattr(space, "start", 0))
            last = first + int(space.n) - 1
            found = _NUMBER.findall(text[-_READ:])
            if not found or not space.contains(int(found[-1])):
                return [f"That is no action. Write a number from {first} to {last}.", 0.0, False]
            action = int(found[-1])

        returned = self._env.step(action)
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise TypeError(
                f"step returned {returned!r:.80}, not (observation, reward, terminated, truncated, "
                "info)"
            )

        observation, reward, terminated, truncated, _ = returned
        has_ended = bool(terminated) or bool(truncated)
        return [self._text(observation), finite_number(reward, _REWARD), has_ended]

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()

    def _text(self, observation: object) -> str:
        """A textual observation, else the environment's text rendering, else the observation's
        values as JSON."""
        if not isinstance(observation, str) and getattr(self._env, "render_mode", None) == "ansi":
            observation = self._env.render()
        if not isinstance(observation, str):
            observation = json.dumps(observation, default=_plain)
        return shown(observation)


def shown(observation: str) -> str:
    """The observation as shown to the model: without control characters, at most 20,000
    characters."""
    return bounded(without_control(observation), MAX_CHARACTERS).text


def _plain(value: Any) -> object:
    """numpy's arrays and numbers as plain values. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"an observation of {type(value).__name__} is not text: wrap the environment in one that "
        "writes text"
    )


def is_registered(env: str) -> bool:
    """Whether it is an id of gymnasium, with or without its module, and not module:Class or
    file.py:function."""
    module, _, name = env.rpartition(":")
    return not module or not all(part.isidentifier() for part in name.split("."))


def find_registered(env: str) -> Callable[..., Any]:
    """The maker of a registered environment; module:ID imports the module that registers it. Raises
    UserError."""
    module, _, name = env.rpartition(":")
    if module:
        load_module(module)

    try:
        gymnasium = importlib.import_module("gymnasium")
        gymnasium.spec(name)
    except ImportError as error:
        raise UserError(
            f"'{name}' is an id of gymnasium, which is not installed ({error}): pip install "
            "'distflow[gymnasium]'"
        ) from None
    except gymnasium.error.Error as error:
        advice = "; if a package registers it at its import, write package:ID"
        if module:
            advice = ""
        raise UserError(f"gymnasium has no environment '{name}': {error}{advice}") from None

    return partial(gymnasium.make, name)


class OpenEnv:
    """Created in the server process; a session begins in an episode's process with `reset`, and
    ends with it.

    If an action has a single required string, the whole reply goes there. Otherwise the model
    writes the fields as a JSON object.
    """

    def __init__(self, env: str, options: Mapping[str, Any]) -> None:
        """env: the server's address. options: further arguments of its `reset`. Raises
        UserError."""
        try:
            client = importlib.import_module("openenv.core.generic_client")
        except ImportError as error:
            raise UserError(
                f"'{env}' is an address of OpenEnv, whose client is not installed ({error}): pip "
                "install 'distflow[openenv]'"
            ) from None

        self._client: Any = client.GenericEnvClient
        self._url = env.rstrip("/")
        self._options = dict(options)
        self._session: Any = None
        schema = self._schema()
        fields = dict(schema.get("properties", {}))
        fields.pop("metadata", None)
        required = schema.get("required", [])
        self._text_field = None
        if len(required) == 1 and fields.get(required[0], {}).get("type") == "string":
            self._text_field = required[0]
        described = [f"{name} ({field.get('type', 'any')})" for name, field in fields.items()]
        self._form = ", ".join(described)

    def reset(self, seed: int, options: dict[str, Any] | None) -> str:
        """The first observation. options: columns of the row, of which the server takes those that
        are parameters of its `reset`. Raises what the client raises."""
        self._session = self._client(self._url).sync()
        given = {**(options or {}), **self._options, "seed": seed}
        return str(self._read(self._session.reset(**given))[0])

    def step(self, text: str) -> list[Any]:
        """The observation, the reward, and whether the episode has ended. A text that is not an
        action gets a message and is not a step."""
        action = {self._text_field: text} if self._text_field else _object_in(text)
        try:
            if action is not None:
                return self._read(self._session.step(action))
        except RuntimeError as error:
            if _INVALID not in str(error):
                raise

        return [f"That is no action. Write a JSON object with the fields {self._form}.", 0.0, False]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _read(self, result: Any) -> list[Any]:
        reward = 0.0
        if result.reward is not None:
            reward = finite_number(result.reward, _REWARD)
        seen = dict(result.observation)
        for name in _NOT_OBSERVED:
            seen.pop(name, None)
        said = [value for value in seen.values() if value is not None]
        text = json.dumps(seen, ensure_ascii=False)
        if len(said) == 1 and isinstance(said[0], str):
            text = said[0]
        return [shown(text), reward, bool(result.done)]

    def _schema(self) -> dict[str, Any]:
        """The schema of an action. Raises UserError."""
        try:
            with urlopen(f"{self._url}/schema", timeout=_TIMEOUT_S) as response:
                schema: dict[str, Any] = json.load(response)["action"]
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"no server of OpenEnv answers at {self._url} ({error}): start it, or correct the "
                "address (env)"
            ) from None

        return schema


def _object_in(text: str) -> dict[str, Any] | None:
    """The JSON object within a text, whatever surrounds it."""
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
