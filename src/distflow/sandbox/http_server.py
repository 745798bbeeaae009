"""An HTTP server that runs programs for other machines: JSON requests and replies, with a
password."""

import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6, create_server, socket
from typing import Any

from distflow.errors import UserError
from distflow.http_guard import Door, Guard, Refused, is_loopback, new_token, token_for_this_user
from distflow.sandbox.inside.program_messages import from_text, to_text
from distflow.sandbox.interface import Broken, Limits, Raised, SandboxFault
from distflow.sandbox.local_sandbox import Sandbox, Session
from distflow.sandbox.remote import TOKEN

MAX_BODY_BYTES = 64 * 2**20
MOST = Limits(60.0, 120.0, 4 * 2**30, 1024, 64 * 2**20, 64 * 2**20)
"""Upper bounds of the limits that a request may set."""
IDLE_S = 120.0
_MAX_CONNECTIONS = 256
_SESSIONS_EACH = 32
_SLOT_S = 5.0
_SOCKET_S = 150.0
_BODY_S = 5.0
"""For the next part of a body."""


@dataclass
class _OpenSession:
    session: Session
    used_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class SandboxService:
    """Answers requests with a sandbox, running at most `at_once` programs at a time. A session has
    an unguessable name, and is ended after `IDLE_S` without a request."""

    def __init__(self, sandbox: Sandbox, at_once: int) -> None:
        self._sandbox = sandbox
        self._at_once = at_once
        self._free = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._sessions: dict[str, _OpenSession] = {}

    def answer(self, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Refused, SandboxFault."""
        try:
            match action:
                case "level":
                    return {"level": self._sandbox.level.name}
                case "run":
                    with self._running() as reply:
                        ran = self._sandbox.run(
                            _text(request, "code"), _text(request, "stdin"), _limits(request)
                        )
                        reply["ran"] = ran._asdict()
                    return reply
                case "open":
                    return self._open(_text(request, "code"), _limits(request))
                case "call":
                    return self._call(_text(request, "session"), _text(request, "question"))
                case "close":
                    self._close(_text(request, "session"))
                    return {}
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the request is invalid: {error}") from None
        raise Refused(HTTPStatus.NOT_FOUND, f"there is no '{action}'")

    def close(self) -> None:
        for name in list(self._sessions):
            self._close(name)

    def _open(self, code: str, limits: Limits) -> dict[str, Any]:
        if len(self._sessions) >= _SESSIONS_EACH * self._at_once:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many programs are open")
        with self._running() as reply:
            opened = _OpenSession(self._sandbox.open(code, limits))
            name = secrets.token_urlsafe(16)
            with self._lock:
                self._sessions[name] = opened
            reply["session"] = name
        return reply

    def _call(self, name: str, question: str) -> dict[str, Any]:
        function, args, kwargs = from_text(question)
        opened = self._sessions.get(name)
        if opened is None:
            raise Refused(HTTPStatus.GONE, "this program has ended")
        with opened.lock:
            with self._running() as reply:
                reply["value"] = to_text(opened.session.call(str(function), args, kwargs))
            reply |= {"stdout": opened.session.stdout, "stderr": opened.session.stderr}
            opened.used_at = time.monotonic()
        return reply

    @contextmanager
    def _running(self) -> Iterator[dict[str, Any]]:
        """Yields the reply, to which errors of the program and the elapsed seconds are added."""
        if not self._free.acquire(timeout=_SLOT_S):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "all places are taken")
        began = time.monotonic()
        reply = dict[str, Any]()
        try:
            yield reply
        except Raised as error:
            reply["raised"] = {"type": error.type, "text": error.text}
        except Broken as error:
            reply["broken"] = {"cause": error.cause, "reason": error.reason}
        finally:
            self._free.release()
            reply["seconds"] = time.monotonic() - began

    def _close(self, name: str) -> None:
        with self._lock:
            opened = self._sessions.pop(name, None)
        if opened is not None:
            with opened.lock:
                opened.session.close()

    def end_idle(self) -> None:
        """End the sessions that have been idle for too long."""
        used_before = time.monotonic() - IDLE_S
        with self._lock:
            sessions = list(self._sessions.items())
        for name, opened in sessions:
            if opened.used_at < used_before and not opened.lock.locked():
                self._close(name)


class Server(ThreadingHTTPServer):
    """Use as `with Server(...) as server: server.serve_forever()`; `server_address` has its
    port."""

    daemon_threads = True

    def __init__(self, service: SandboxService, host: str, port: int, token: str) -> None:
        """token: empty for a random one, which clients of this user find on this machine. Raises
        UserError if clients on other machines would have to know a random one, or if the port is in
        use."""
        if not (token or is_loopback(host)):
            raise UserError(
                f"at {host} other machines can run programs: set {TOKEN} to the same password on "
                "both sides"
            )
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.service = service
        self.kept_token = ExitStack()
        try:
            listening = create_server((host, port), family=AF_INET6 if ":" in host else AF_INET)
        except (OSError, OverflowError) as error:  # the latter for a port above 65535
            raise UserError(
                f"{host}:{port} cannot be listened on: {getattr(error, 'strerror', error)}"
            ) from None
        self.socket = Door(listening, _MAX_CONNECTIONS)
        self.server_address = listening.getsockname()
        self.token_file: Path | None = None
        if not token:
            token = new_token()
            self.token_file = self.kept_token.enter_context(
                token_for_this_user(self.server_address[1], token)
            )
        self.guard = Guard(host, token, MAX_BODY_BYTES)

    def server_close(self) -> None:
        super().server_close()
        self.kept_token.close()

    def service_actions(self) -> None:
        """Called by `serve_forever`, twice a second."""
        self.service.end_idle()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client is gone, so there is nobody to report to."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _SOCKET_S
    connection: socket

    def parse_request(self) -> bool:
        """Refuse what the guard refuses, whatever its method."""
        if not super().parse_request():
            return False
        try:
            self.server.guard.check(
                self.command, self.path, [(n.lower(), v) for n, v in self.headers.items()]
            )
        except Refused as refused:
            self.close_connection = True
            self._reply(refused.status, refused.body())
            return False
        return True

    def do_POST(self) -> None:
        try:
            answer = self.server.service.answer(self.path.rpartition("/v1/")[2], self._request())
            self._reply(HTTPStatus.OK, json.dumps(answer).encode())
        except Refused as refused:
            # Read the rest of the body, which would be taken for the next request.
            self.close_connection = refused.status not in (
                HTTPStatus.SERVICE_UNAVAILABLE,
                HTTPStatus.GONE,
            )
            self._reply(refused.status, refused.body())
        except SandboxFault as fault:
            self._reply(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                Refused(HTTPStatus.INTERNAL_SERVER_ERROR, str(fault)).body(),
            )

    def _request(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length")
        if length is None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a request says how long it is")
        self.connection.settimeout(_BODY_S)
        sent = self.rfile.read(int(length))
        self.connection.settimeout(_SOCKET_S)
        try:
            request = json.loads(sent)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "a request is a JSON object")
        return request

    def _reply(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests: programs may be private."""


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request[name]
    if not isinstance(value, str):
        raise TypeError(f"'{name}' is no text")
    return value


def _limits(request: Mapping[str, Any]) -> Limits:
    wanted = Limits(**request["limits"])
    for name, value in wanted._asdict().items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"'{name}' is no limit")
    bounded = {
        name: type(most)(min(getattr(wanted, name), most)) for name, most in MOST._asdict().items()
    }
    return Limits(**bounded)
