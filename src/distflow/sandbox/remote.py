"""The client of a sandbox on another machine (`distflow sandbox serve`). Connection errors are
faults of the sandbox, not results of a program."""

import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from distflow.errors import UserError
from distflow.http_guard import is_loopback, token_of
from distflow.sandbox import interface
from distflow.sandbox.inside.program_messages import from_text, to_text

TOKEN = "DISTFLOW_SANDBOX_TOKEN"
"""The environment variable with the password that a server and its clients share. Without it, a
server that listens on this machine alone makes one, which clients of its user find."""

_WAITS_S = (0.2, 0.4, 0.8, 1.6)
_BUSY_S = 60.0
_SLACK_S = 30.0
_MAX_BYTES = 256 * 2**20
_SHOWN = 300


class RemoteSandbox(interface.AnySandbox):
    """Used by one thread at a time; has one connection."""

    def __init__(self, url: str, limits: interface.Limits = interface.DEFAULT_LIMITS) -> None:
        """Raises UserError if the URL is not that of a server, SandboxFault if no server
        answers."""
        wrong = UserError(
            f"'{url}' is not the URL of a sandbox: write e.g. http://host:8750, its password in "
            f"{TOKEN}"
        )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise wrong from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.username
            or parts.query
        ):
            raise wrong
        self.url = url.rstrip("/")
        self.limits = limits
        self.waited_s = 0.0
        self._path = parts.path.rstrip("/")
        connection = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = connection(parts.hostname, port)
        self.level = interface.Level(
            f"{self.ask('level', {}, repeatable=True).get('level')} at {self.url}", {}
        )

    def run(
        self, code: str, stdin: str = "", limits: interface.Limits | None = None
    ) -> interface.RunResult:
        limits = limits or self.limits
        request = {"code": code, "stdin": stdin, "limits": limits._asdict()}
        return _decode(
            interface.RunResult, self.ask("run", request, limits.wall_s, repeatable=True).get("ran")
        )

    def open(self, code: str, limits: interface.Limits | None = None) -> "RemoteSession":
        limits = limits or self.limits
        reply = self.ask(
            "open", {"code": code, "limits": limits._asdict()}, limits.wall_s, repeatable=True
        )
        _raise(reply)
        if not isinstance(reply.get("session"), str):
            raise interface.SandboxFault(
                f"the sandbox at {self.url} sent an invalid reply: it names no program"
            )
        return RemoteSession(self, reply["session"], limits)

    def ask(
        self,
        action: str,
        request: Mapping[str, object],
        seconds: float = 0.0,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        """The server's reply. seconds: how long the program may take. repeatable: the request is
        sent again if the connection fails, since it is idempotent. Raises SandboxFault."""
        began = time.monotonic()
        waits_s = list(_WAITS_S if repeatable else ())
        while True:
            try:
                status, reply = self._exchange(action, request, seconds + _SLACK_S)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if not waits_s:
                    reason = str(error) or type(error).__name__
                    raise interface.SandboxFault(
                        f"the sandbox at {self.url} does not reply: {reason}"
                    ) from None
                time.sleep(waits_s.pop(0))
                continue
            if status != http.HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() - began >= _BUSY_S:
                break
            time.sleep(_WAITS_S[0])
        self.waited_s += max(time.monotonic() - began - float(reply.get("seconds", 0.0)), 0.0)
        if status != http.HTTPStatus.OK:
            reason = str(reply.get("error", ""))[:_SHOWN]
            hint = f" (see {TOKEN})" if status == http.HTTPStatus.UNAUTHORIZED else ""
            raise interface.SandboxFault(
                f"the sandbox at {self.url} answers {status}: {reason}{hint}"
            )
        return reply

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def _token(self) -> str:
        """The shared password, or that of this user's server on this machine."""
        if token := os.environ.get(TOKEN):
            return token
        return token_of(self._connection.port) if is_loopback(self._connection.host) else ""

    def _exchange(
        self, action: str, request: Mapping[str, object], timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token()}"}
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
            raise http.client.HTTPException(
                f"it returned {answer.status} and no JSON: it is not a sandbox"
            )
        return answer.status, reply


class RemoteSession(interface.AnySession):
    """A call is sent only once, since it may change the state of the process."""

    stdout = stderr = ""

    def __init__(self, sandbox: RemoteSandbox, name: str, limits: interface.Limits) -> None:
        self._sandbox = sandbox
        self._name = name
        self._limits = limits
        self._closed = False

    def call(
        self,
        name: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Any:
        question = to_text([name, list(args), dict(kwargs)])
        reply = self._sandbox.ask(
            "call", {"session": self._name, "question": question}, self._limits.wall_s
        )
        self.stdout = str(reply.get("stdout", ""))
        self.stderr = str(reply.get("stderr", ""))
        _raise(reply)
        try:
            return from_text(reply["value"])
        except (KeyError, TypeError, ValueError) as error:
            raise interface.SandboxFault(
                f"the sandbox at {self._sandbox.url} sent an invalid reply: {error}"
            ) from None

    def close(self) -> None:
        """Idempotent. An unreachable server ends the idle session by itself."""
        if not self._closed:
            self._closed = True
            with suppress(interface.SandboxFault):
                self._sandbox.ask("close", {"session": self._name})


def _raise(reply: Mapping[str, Any]) -> None:
    """Raise the error of the program that the server reports, if any."""
    if "raised" in reply:
        raise _decode(interface.Raised, reply["raised"])
    if "broken" in reply:
        raise _decode(interface.Broken, reply["broken"])


def _decode(kind: Any, fields: Any) -> Any:
    try:
        return kind(**fields)
    except TypeError as error:
        raise interface.SandboxFault(f"a sandbox sent an invalid reply: {error}") from None
