"""A sandbox for others, over HTTP: JSON in, JSON out, with a password where it is not of this machine alone."""

import hmac
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import socket
from typing import Any

from distflow.errors import UserError
from distflow.sandbox.inside.values import from_text, to_text
from distflow.sandbox.limits import Broken, Limits, Raised, SandboxFault
from distflow.sandbox.remote import TOKEN
from distflow.sandbox.sandbox import Sandbox, Session

MAX_BODY_BYTES = 64 * 2**20
MOST = Limits(60.0, 120.0, 4 * 2**30, 1024, 64 * 2**20, 64 * 2**20)
"""What a program may be given, whatever is asked for."""
IDLE_S = 120.0
_MAX_CONNECTIONS = 256
_SESSIONS_EACH = 32
_SLOT_S = 5.0
_SOCKET_S = 150.0
_Told = dict[str, object]


class Refused(Exception):
    """status: of HTTP."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class _Open:
    session: Session
    used_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Desk:
    """Answers requests with a sandbox, `at_once` programs running at a time. A session has a name that cannot be
    guessed; one that is left alone for `idle_s` is ended."""

    def __init__(self, sandbox: Sandbox, at_once: int, idle_s: float = IDLE_S) -> None:
        self._sandbox, self._at_once, self._idle_s = sandbox, at_once, idle_s
        self._free = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._sessions: dict[str, _Open] = {}

    def answer(self, action: str, asked: Mapping[str, Any]) -> _Told:
        """Raises Refused, SandboxFault."""
        try:
            match action:
                case "level":
                    return {"level": self._sandbox.level.name}
                case "run":
                    with self._running() as told:
                        ran = self._sandbox.run(_text(asked, "code"), _text(asked, "stdin"), _limits(asked))
                        told["ran"] = ran._asdict()
                    return told
                case "open":
                    return self._open(_text(asked, "code"), _limits(asked))
                case "call":
                    return self._call(_text(asked, "session"), _text(asked, "question"))
                case "close":
                    self._close(_text(asked, "session"))
                    return {}
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"what is asked means nothing: {error}") from None
        raise Refused(HTTPStatus.NOT_FOUND, f"there is no '{action}'")

    def close(self) -> None:
        for name in list(self._sessions):
            self._close(name)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def _open(self, code: str, limits: Limits) -> _Told:
        if len(self._sessions) >= _SESSIONS_EACH * self._at_once:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many programs are open")
        with self._running() as told:
            opened = _Open(self._sandbox.open(code, limits))
            name = secrets.token_urlsafe(16)
            with self._lock:
                self._sessions[name] = opened
            told["session"] = name
        return told

    def _call(self, name: str, question: str) -> _Told:
        function, args, kwargs = from_text(question)
        opened = self._sessions.get(name)
        if opened is None:
            raise Refused(HTTPStatus.GONE, "this program has ended")
        with opened.lock:
            with self._running() as told:
                told["value"] = to_text(opened.session.call(str(function), args, kwargs))
            told |= {"stdout": opened.session.stdout, "stderr": opened.session.stderr}
            opened.used_at = time.monotonic()
        return told

    @contextmanager
    def _running(self) -> Iterator[_Told]:
        """What a program does inside is told, and how long it took."""
        if not self._free.acquire(timeout=_SLOT_S):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "all places are taken")
        began, told = time.monotonic(), dict[str, Any]()
        try:
            yield told
        except Raised as error:
            told["raised"] = {"type": error.type, "text": error.text}
        except Broken as error:
            told["broken"] = {"cause": error.cause, "reason": error.reason}
        finally:
            self._free.release()
            told["seconds"] = time.monotonic() - began

    def _close(self, name: str) -> None:
        with self._lock:
            opened = self._sessions.pop(name, None)
        if opened is not None:
            with opened.lock:
                opened.session.close()

    def end_idle(self) -> None:
        """End what was left alone."""
        now = time.monotonic()
        with self._lock:
            idle = [
                name
                for name, opened in self._sessions.items()
                if now - opened.used_at > self._idle_s and not opened.lock.locked()
            ]
        for name in idle:
            self._close(name)


class Server(ThreadingHTTPServer):
    """`with Server(...) as server: server.serve_forever()`; its port is in `server_address`."""

    daemon_threads = True

    def __init__(self, desk: Desk, host: str, port: int, token: str) -> None:
        """Raises UserError where others than this machine could ask without a password, or the port is taken."""
        if not (token or _is_loopback(host)):
            raise UserError(
                f"at {host} others can ask for programs to be run: set {TOKEN} to a password here and there"
            )
        self.desk, self.token = desk, token
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(f"{host}:{port} cannot be listened on: {error.strerror or error}") from None

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def service_actions(self) -> None:
        """Twice a second."""
        self.desk.end_idle()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked is gone: nobody is to be told."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _SOCKET_S
    connection: socket

    def do_POST(self) -> None:
        try:
            self._tell(HTTPStatus.OK, self.server.desk.answer(self._action(), self._asked()))
        except Refused as refused:
            # What of the body was not read would be taken for the next request.
            self.close_connection = refused.status not in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GONE)
            self._tell(refused.status, {"fault": str(refused)})
        except SandboxFault as fault:
            self._tell(HTTPStatus.INTERNAL_SERVER_ERROR, {"fault": str(fault)})

    def _action(self) -> str:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if self.server.token and not hmac.compare_digest(given, self.server.token.encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, "another password")
        return self.path.rpartition("/v1/")[2]

    def _asked(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has a length of at most {MAX_BODY_BYTES:,} bytes"
            )
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "a request is a JSON object")
        return asked

    def _tell(self, status: HTTPStatus, told: _Told) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """What programs are asked for is nobody's business."""


def _text(asked: Mapping[str, Any], name: str) -> str:
    value = asked[name]
    if not isinstance(value, str):
        raise TypeError(f"'{name}' is no text")
    return value


def _limits(asked: Mapping[str, Any]) -> Limits:
    wanted = Limits(**asked["limits"])
    for name, value in wanted._asdict().items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"'{name}' is no limit")
    bounded = {name: type(most)(min(getattr(wanted, name), most)) for name, most in MOST._asdict().items()}
    return Limits(**bounded)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
