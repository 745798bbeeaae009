"""The guard of every HTTP server of ours: a web page, or whoever lacks the token, gets nothing from
a server and keeps nobody out.

`Guard` judges the head of each request. `Door` stands in place of the socket that listens: a
connection takes a place of the server only once the head of its first request has come.
"""

import hmac
import ipaddress
import json
import os
import re
import secrets
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote

MAX_CONNECTIONS: Final = 4096
MAX_WAITING: Final = 256
"""Connections whose first head has not come. One more ends the oldest of them, so that they keep
nobody out."""
MAX_HEAD_BYTES: Final = 2**16
HEAD_WITHIN_S: Final = 5.0

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_END_OF_HEAD: Final = re.compile(rb"\r?\n\r?\n")
_HAS_BODY: Final = ("content-length", "transfer-encoding")

Headers = Iterable[tuple[str, str]]
"""Names in lower case, and values."""


class Refused(Exception):
    """A request that is not answered. headers: of the reply."""

    def __init__(self, status: HTTPStatus, text: str, headers: Headers = ()) -> None:
        super().__init__(text)
        self.status = status
        self.headers = tuple(headers)

    def body(self) -> bytes:
        return json.dumps({"error": str(self)}).encode()


def new_token() -> str:
    return secrets.token_urlsafe(24)


def is_same(given: str, token: str) -> bool:
    """Whether it is the token, in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


def key_of(headers: Headers) -> str:
    """What a client sends as its token or key; empty if nothing."""
    found = dict(headers)
    return found.get("x-api-key") or found.get("authorization", "").removeprefix("Bearer ")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Guard:
    """Judges requests by their heads."""

    host: str
    """The address that the server listens on."""

    token: str | None
    """Wanted with each request; None for a server that compares keys of its own."""

    max_body_bytes: int | None = 0
    """Of a request; None for a server that counts what it reads."""

    body_types: frozenset[str] = frozenset({"application/json"})
    """What a request may send. No form of a page has these."""

    cookie: str = ""
    """The name, before the port, of the cookie in which a browser keeps the token; empty for a
    server without pages. An address with the token sets it. A browser sends the cookies of a host
    to all of its ports."""

    by_scripts: frozenset[str] = frozenset()
    """Paths that want the token in a header, which no image and no form of another page can
    send."""

    secret_below: str | None = None
    """Paths that begin so are secrets themselves, and need no token."""

    def check(self, method: str, target: str, headers: Headers) -> None:
        """Raises Refused."""
        given = list(headers)
        found = dict(given)
        path, _, query = target.partition("?")
        self._check_names(given)
        self._check_page(method, path, found)
        is_secret = self.secret_below is not None and path.startswith(self.secret_below)
        if self.token is not None and not is_secret:
            self._check_token(self.token, path, query, given)
        self._check_body(found)

    def _check_names(self, headers: list[tuple[str, str]]) -> None:
        for name in ("host", "origin", "content-length"):
            if sum(given == name for given, _ in headers) > 1:
                raise Refused(
                    HTTPStatus.BAD_REQUEST, f"the request has more than one header '{name}'"
                )

        found = dict(headers)
        host = found.get("host", "")
        if not self._is_own(host) and (is_loopback(self.host) or not key_of(headers)):
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                (
                    f"this server does not answer under the name {host!r:.80}: use the address "
                    "that it printed"
                ),
            )

        origin = found.get("origin")
        if origin is not None and origin.lower() not in (
            f"http://{host}".lower(),
            f"https://{host}".lower(),
        ):
            raise Refused(
                HTTPStatus.FORBIDDEN, f"this server does not answer pages of {origin!r:.80}"
            )

    def _is_own(self, host: str) -> bool:
        """Whether it is a name of this server. Nobody but us can lead a number here."""
        name = host.lower().removesuffix(f":{_port_of(host)}").strip("[]")
        is_everywhere = self.host in ("0.0.0.0", "::")

        with suppress(ValueError):
            address = ipaddress.ip_address(name)
            return is_everywhere or address.is_loopback or name == self.host.lower()

        own = {*_LOOPBACK, self.host.lower()}
        if is_everywhere:
            own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        return name in own

    def _check_page(self, method: str, path: str, found: dict[str, str]) -> None:
        """Refuses what a page of another site makes a browser send; somebody may follow a link to
        one of our pages."""
        site = found.get("sec-fetch-site", "none")
        if site in ("none", "same-origin"):
            return

        is_link = (
            found.get("sec-fetch-mode") == "navigate" and found.get("sec-fetch-dest") == "document"
        )
        if not (self.cookie and method == "GET" and is_link and path not in self.by_scripts):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"this server does not answer other pages (Sec-Fetch-Site: {site:.20})",
            )

    def _check_body(self, found: dict[str, str]) -> None:
        if not any(name in found for name in _HAS_BODY) or found.get("content-length") == "0":
            return

        # A page sends text and forms wherever it likes, and a body of no type if it needs no header
        # of its own.
        kind = found.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in self.body_types and (kind or not key_of(found.items())):
            known = " or ".join(sorted(self.body_types))
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a body is {known}, not {kind!r:.80}")

        length = found.get("content-length", "0")
        if self.max_body_bytes is None:
            return
        if not re.fullmatch(r"[0-9]{1,18}", length) or int(length) > self.max_body_bytes:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a request may have at most {self.max_body_bytes:,} bytes",
            )

    def _check_token(
        self, token: str, path: str, query: str, headers: list[tuple[str, str]]
    ) -> None:
        if is_same(key_of(headers), token):
            return

        if self.cookie and path not in self.by_scripts:
            found = dict(headers)
            cookie = f"{self.cookie}_{_port_of(found['host'])}"
            asked = parse_qsl(query, keep_blank_values=True)
            if is_same(dict(asked).get("token", ""), token):
                raise _redirection(f"{cookie}={token}", path, asked)

            kept = dict(
                each.strip().partition("=")[::2] for each in found.get("cookie", "").split(";")
            )
            if is_same(kept.get(cookie, ""), token):
                return

        where = "send it as 'Authorization: Bearer ...'"
        if self.cookie:
            where = "open the whole address that it printed"

        raise Refused(HTTPStatus.UNAUTHORIZED, f"this server wants its token: {where}")


def _port_of(host: str) -> str:
    """As text; empty if the name of a host has none."""
    found = re.fullmatch(r"(?:\[.*\]|[^:]*):(\d+)", host)
    return found[1] if found else ""


def _redirection(cookie: str, path: str, asked: list[tuple[str, str]]) -> Refused:
    """To the same page without the token in its address."""
    rest = "&".join(f"{quote(name)}={quote(value)}" for name, value in asked if name != "token")
    to = "/" + quote(path).lstrip("/") + (f"?{rest}" if rest else "")
    kept = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
    return Refused(HTTPStatus.SEE_OTHER, "", [("location", to), ("set-cookie", kept)])


class Door(socket.socket):
    """Listens in place of the given socket: `accept` returns connections whose first head has come.
    A server may use it as it uses a socket that listens."""

    def __init__(self, listening: socket.socket, max_connections: int = MAX_CONNECTIONS) -> None:
        """Readable while a connection may come in."""
        ours, theirs = socket.socketpair()
        super().__init__(ours.family, ours.type, ours.proto, ours.detach())
        self._bell = theirs
        self._listening = listening
        self._max = max_connections
        listening.setblocking(False)
        self._ready = deque[tuple[socket.socket, Any]]()
        self._waiting: dict[int, _Waiting] = {}
        self._num_open = 0
        self._lock = threading.Lock()
        self._watching = threading.Thread(target=self._watch, name="door", daemon=True)
        self._watching.start()

    def accept(self) -> tuple[socket.socket, Any]:
        with self._lock:
            if not self._ready:
                raise BlockingIOError
            accepted = self._ready.popleft()
            if not self._ready:
                self.recv(1)

        return accepted

    def listen(self, backlog: int = 0) -> None:
        """It does already."""

    def getsockname(self) -> Any:
        return self._listening.getsockname()

    def close(self) -> None:
        """Idempotent. Connections that were let in stay open."""
        super().close()
        self._watching.join()

    def _watch(self) -> None:
        """Consumes connections · waits for their heads, each at most `HEAD_WITHIN_S` · unblocked by
        `close` · produces the connections that `accept` returns."""
        with self._listening, self._bell, select.epoll() as poll:
            poll.register(self._listening, select.EPOLLIN)
            poll.register(self._bell, 0)  # reports that the other end is closed

            while True:
                oldest = next(iter(self._waiting.values()), None)
                left_s = None
                if oldest is not None:
                    left_s = max(oldest.due - time.monotonic(), 0.0)

                happened = poll.poll(left_s)
                if any(place == self._bell.fileno() for place, _ in happened):
                    break

                for place, _ in happened:
                    if place == self._listening.fileno():
                        self._take_in(poll)
                    elif place in self._waiting:
                        self._look(self._waiting[place])

                for late in [
                    each for each in self._waiting.values() if each.due <= time.monotonic()
                ]:
                    self._end(late, HTTPStatus.REQUEST_TIMEOUT)

            for each in [*self._waiting.values()]:
                self._end(each, HTTPStatus.SERVICE_UNAVAILABLE)
            while self._ready:
                self._ready.popleft()[0].close()

    def _take_in(self, poll: "select.epoll") -> None:
        try:
            # `accept` makes a plain socket
            number, address = self._listening._accept()  # type: ignore[attr-defined]
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left
            if self._waiting:
                self._end_oldest()
            else:
                time.sleep(0.05)
            return

        if len(self._waiting) >= MAX_WAITING:
            self._end_oldest()
        connection = _Connection(self._listening, number, self._release)
        connection.setblocking(False)
        # else a reply of two parts waits 40 ms for the client's acknowledgement of the first
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._waiting[number] = _Waiting(connection, address, time.monotonic() + HEAD_WITHIN_S)

        # By edges: what has come stays in the connection, for the server.
        poll.register(connection, select.EPOLLIN | select.EPOLLET)

    def _look(self, waiting: "_Waiting") -> None:
        try:
            come = waiting.connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            come = b""

        if _END_OF_HEAD.search(come):
            self._let_in(waiting)
        elif not come or len(come) == MAX_HEAD_BYTES:
            self._end(waiting, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _let_in(self, waiting: "_Waiting") -> None:
        if self._num_open >= self._max:
            self._end(waiting, HTTPStatus.SERVICE_UNAVAILABLE)
            return

        waiting.connection.is_in = True
        del self._waiting[waiting.connection.fileno()]
        waiting.connection.setblocking(True)

        with self._lock:
            self._num_open += 1
            if not self._ready:
                with suppress(BrokenPipeError):  # closed meanwhile, which `_watch` sees next
                    self._bell.send(b"!")
            self._ready.append((waiting.connection, waiting.address))

    def _end_oldest(self) -> None:
        self._end(next(iter(self._waiting.values())), HTTPStatus.SERVICE_UNAVAILABLE)

    def _end(self, waiting: "_Waiting", status: HTTPStatus) -> None:
        del self._waiting[waiting.connection.fileno()]
        body = Refused(status, status.description or status.phrase).body()
        head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\n"

        with waiting.connection, suppress(OSError):
            waiting.connection.send(
                f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
            )
            # what is left unread would take the reply back
            waiting.connection.recv(2 * MAX_HEAD_BYTES)

    def _release(self) -> None:
        with self._lock:
            self._num_open -= 1


class _Connection(socket.socket):
    """Gives its place back when it is closed."""

    def __init__(self, of: socket.socket, number: int, release: Callable[[], None]) -> None:
        super().__init__(of.family, of.type, of.proto, number)
        self._release = release
        self.is_in = False

    def close(self) -> None:
        if self.is_in:
            self.is_in = False
            self._release()
        super().close()


@dataclass(frozen=True)
class _Waiting:
    connection: _Connection
    address: Any
    due: float


def make_server(app: Any, guard: Guard, headers: Headers, stops_within_s: int) -> Any:
    """A server of uvicorn for an ASGI application, to be run on sockets that listen. headers: of
    what is refused."""
    uvicorn = import_module("uvicorn")

    class Server(uvicorn.Server):  # type: ignore[name-defined]
        def run(self, sockets: list[socket.socket]) -> None:
            super().run([Door(each) for each in sockets])

    options: dict[str, Any] = {
        "log_config": None,
        "lifespan": "off",
        "access_log": False,
        "ws": "none",
        "loop": "asyncio",
    }
    options["log_level"] = "error"  # what clients send wrongly is told to them
    config = uvicorn.Config(_Guarded(app, guard, tuple(headers)), http="h11", **options)
    config.h11_max_incomplete_event_size = MAX_HEAD_BYTES
    config.timeout_graceful_shutdown = stops_within_s

    return Server(config)


class _Guarded:
    """An ASGI application behind a guard."""

    def __init__(self, app: Any, guard: Guard, headers: Headers) -> None:
        self._app = app
        self._guard = guard
        self._headers = headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        target = scope["path"] + (
            "?" + scope["query_string"].decode("latin-1") if scope["query_string"] else ""
        )

        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        try:
            self._guard.check(scope["method"], target, headers)
        except Refused as refused:
            own = [
                *self._headers,
                *refused.headers,
                ("content-type", "application/json"),
                ("connection", "close"),
            ]
            raw = [(name.encode(), value.encode("latin-1")) for name, value in own]
            await send({"type": "http.response.start", "status": refused.status, "headers": raw})
            await send({"type": "http.response.body", "body": refused.body()})
            return

        await self._app(scope, receive, send)


@contextmanager
def token_for_this_user(port: int, token: str) -> Iterator[Path | None]:
    """Meanwhile keep the token of a server on this machine in a file that only its user can read,
    where `token_of` finds it; None if there is no place for it."""
    with ExitStack() as stack:
        file: Path | None = None
        try:
            file = _token_file(port)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = file.with_name(f".{file.name}-{os.getpid()}")
            new.unlink(missing_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
                written.write(token)
            new.replace(file)
            stack.callback(_forget, file, token)
        except (OSError, RuntimeError):  # the latter without a home
            file = None

        yield file


def token_of(port: int) -> str:
    """The token of this user's server at a port of this machine; empty if there is none."""
    try:
        with open(os.open(_token_file(port), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            is_ours = (
                found.st_uid == os.getuid()
                and stat.S_ISREG(found.st_mode)
                and not found.st_mode & 0o077
            )
            return file.read(1000) if is_ours else ""
    except (OSError, RuntimeError, ValueError):
        return ""


def _forget(file: Path, token: str) -> None:
    with suppress(OSError):
        if file.read_text() == token:  # else it is of a later server at this port
            file.unlink()


def _token_file(port: int) -> Path:
    return Path("~/.cache/distflow").expanduser() / f"token-{socket.gethostname()}-{port}"
