"""An OpenEnv environment at the address of its server, through the client of the package openenv-core: observations
become text, and the model's text becomes an action, whose fields the server describes."""

import importlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from distflow.environments.gymnasium_adapter import finite_reward, shown
from distflow.errors import UserError

_TIMEOUT_S = 30
_NOT_OBSERVED = ("done", "reward", "metadata")
_INVALID = "VALIDATION_ERROR"


class OpenEnv:
    """Created in the server process; a session begins in an episode's process with `reset`, and ends with it.

    If an action has a single required string, the whole reply goes there. Otherwise the model writes the fields as a
    JSON object.
    """

    def __init__(self, env: str, options: Mapping[str, Any]) -> None:
        """env: the server's address. options: further arguments of its `reset`. Raises UserError."""
        try:
            self._client: Any = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        except ImportError as error:
            raise UserError(
                f"'{env}' is an address of OpenEnv, whose client is not installed ({error}): "
                "pip install 'distflow[openenv]'"
            ) from None
        self._url, self._options = env.rstrip("/"), dict(options)
        self._session: Any = None
        schema = self._schema()
        fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
        required = [name for name in schema.get("required", ()) if fields.get(name, {}).get("type") == "string"]
        self._text_field = required[0] if required == schema.get("required") and len(required) == 1 else None
        self._form = ", ".join(f"{name} ({field.get('type', 'any')})" for name, field in fields.items())

    def reset(self, seed: int, options: dict[str, Any] | None) -> str:
        """The first observation. options: columns of the row, of which the server takes those that are parameters of
        its `reset`. Raises what the client raises."""
        self._session = self._client(self._url).sync()
        return self._read(self._session.reset(**{**(options or {}), **self._options, "seed": seed}))[0]

    def step(self, text: str) -> list[Any]:
        """The observation, the reward, and whether the episode has ended. A text that is not an action gets a message
        and is not a step."""
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
        reward = 0.0 if result.reward is None else finite_reward(result.reward)
        seen = {name: value for name, value in result.observation.items() if name not in _NOT_OBSERVED}
        said = [value for value in seen.values() if value is not None]
        is_text = len(said) == 1 and isinstance(said[0], str)
        text = said[0] if is_text else json.dumps(seen, ensure_ascii=False)
        return [shown(text), reward, bool(result.done)]

    def _schema(self) -> dict[str, Any]:
        """The schema of an action. Raises UserError."""
        try:
            with urlopen(f"{self._url}/schema", timeout=_TIMEOUT_S) as response:
                schema: dict[str, Any] = json.load(response)["action"]
        except (URLError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"no server of OpenEnv answers at {self._url} ({error}): start it, or correct the address (env)"
            ) from None
        return schema


def _object_in(text: str) -> dict[str, Any] | None:
    """The JSON object within a text, whatever surrounds it."""
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
