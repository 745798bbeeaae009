"""A sandbox on another machine, `distflow sandbox serve`, by its URL. Errors of the connection are faults, not
results."""

import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import urlsplit

from distflow.errors import UserError
from distflow.sandbox.inside.values import from_text, to_text
from distflow.sandbox.interface import Ran
from distflow.sandbox.isolation_level import Level
from distflow.sandbox.limits import DEFAULT_LIMITS, Broken, Limits, Raised, SandboxFault

TOKEN = "DISTFLOW_SANDBOX_TOKEN"
"""The environment variable of the password that a server and those who use it share."""

_WAITS_S = (0.2, 0.4, 0.8, 1.6)
_BUSY_S = 60.0
_SLACK_S = 30.0
_MAX_BYTES = 256 * 2**20
_SHOWN = 300
_Told = dict[str, Any]


class RemoteSandbox:
    """Used by one thread at a time. A context manager; holds one connection."""

    def __init__(self, url: str, limits: Limits = DEFAULT_LIMITS) -> None:
        """Raises UserError for what is no URL of a server, SandboxFault where none answers there."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise UserError(f"'{url}' is no URL of a sandbox: write e.g. http://host:8750, and its password in {TOKEN}")
        self.url, self.limits, self.waited_s = url.rstrip("/"), limits, 0.0
        self._path = parts.path.rstrip("/")
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = make(parts.hostname, parts.port)
        self.level = Level(f"{self.ask('level', {}, again=True).get('level')} at {self.url}", {})

    def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> Ran:
        """As `Sandbox.run`."""
        asked = {"code": code, "stdin": stdin, "limits": (limits or self.limits)._asdict()}
        return _decode(Ran, self.ask("run", asked, (limits or self.limits).wall_s, again=True).get("ran"))

    def open(self, code: str, limits: Limits | None = None) -> "RemoteSession":
        """As `Sandbox.open`."""
        chosen = limits or self.limits
        reply = self.ask("open", {"code": code, "limits": chosen._asdict()}, chosen.wall_s, again=True)
        _raise(reply)
        if not isinstance(reply.get("session"), str):
            raise SandboxFault(f"the sandbox at {self.url} answers nonsense: it names no program")
        return RemoteSession(self, reply["session"], chosen)

    def ask(
        self, action: str, asked: Mapping[str, object], seconds: float = 0.0, again: bool = False
    ) -> dict[str, Any]:
        """The server's answer. seconds: that a program may take. again: it may be asked again where the connection
        fails, since nothing depends on how often it is. Raises SandboxFault."""
        began, attempt = time.monotonic(), 0
        while True:
            try:
                status, reply = self._exchange(action, asked, seconds + _SLACK_S)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if not again or attempt == len(_WAITS_S):
                    raise SandboxFault(
                        f"the sandbox at {self.url} does not answer: {str(error) or type(error).__name__}"
                    ) from None
                time.sleep(_WAITS_S[attempt])
                attempt += 1
                continue
            if status == http.HTTPStatus.SERVICE_UNAVAILABLE and time.monotonic() - began < _BUSY_S:
                time.sleep(_WAITS_S[0])
                continue
            break
        self.waited_s += max(time.monotonic() - began - float(reply.get("seconds", 0.0)), 0.0)
        if status != http.HTTPStatus.OK:
            said = str(reply.get("fault", ""))[:_SHOWN]
            hint = f" (see {TOKEN})" if status == http.HTTPStatus.UNAUTHORIZED else ""
            raise SandboxFault(f"the sandbox at {self.url} answers {status}: {said}{hint}")
        return reply

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    def _exchange(self, action: str, asked: Mapping[str, object], timeout_s: float) -> tuple[int, _Told]:
        body = json.dumps(asked).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get(TOKEN, '')}"}
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        self._connection.request("POST", f"{self._path}/v1/{action}", body, headers)
        answer = self._connection.getresponse()
        read = answer.read(_MAX_BYTES + 1)
        if len(read) > _MAX_BYTES:
            raise http.client.HTTPException("its answer is too long")
        try:
            reply = json.loads(read)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise http.client.HTTPException(f"it answers {answer.status} and no JSON: it is no sandbox")
        return answer.status, reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteSession:
    """As `Session`. A call is asked once: what an earlier one left in the process may depend on it."""

    def __init__(self, sandbox: RemoteSandbox, name: str, limits: Limits) -> None:
        self._sandbox, self._name, self._limits = sandbox, name, limits
        self.stdout = self.stderr = ""
        self._closed = False

    def call(self, name: str, args: Sequence[object] = (), kwargs: Mapping[str, object] = MappingProxyType({})) -> Any:
        """As `Session.call`."""
        question = to_text([name, list(args), dict(kwargs)])
        reply = self._sandbox.ask("call", {"session": self._name, "question": question}, self._limits.wall_s)
        self.stdout, self.stderr = str(reply.get("stdout", "")), str(reply.get("stderr", ""))
        _raise(reply)
        try:
            return from_text(reply["value"])
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxFault(f"the sandbox at {self._sandbox.url} answers nonsense: {error}") from None

    def close(self) -> None:
        """Idempotent. A server that cannot be reached ends an idle session by itself."""
        if not self._closed:
            self._closed = True
            with suppress(SandboxFault):
                self._sandbox.ask("close", {"session": self._name})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise(reply: Mapping[str, Any]) -> None:
    """Raise what the server reports of the program."""
    if "raised" in reply:
        raise _decode(Raised, reply["raised"])
    if "broken" in reply:
        raise _decode(Broken, reply["broken"])


def _decode(kind: Any, fields: Any) -> Any:
    try:
        return kind(**fields)
    except TypeError as error:
        raise SandboxFault(f"a sandbox answers nonsense: {error}") from None
