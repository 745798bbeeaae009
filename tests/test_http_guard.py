"""Every HTTP server of ours, each started as it runs: what foreign pages and strangers get, and
whom they keep out."""

import http.client
import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distflow import http_guard
from distflow.commands.dashboard import make_server
from distflow.commands.dashboard_page_data import Dashboard
from distflow.environments.endpoint import MAX_BODY_BYTES, Endpoint
from distflow.environments.endpoint_calls import Answer, Call
from distflow.http_guard import token_of
from distflow.rewards.code import score_server
from distflow.rewards.code.score_client import PATH
from distflow.rewards.code.score_server import ScoreServer
from distflow.sandbox.local_sandbox import Sandbox
from tests.observe.conftest import write_run
from tests.patience import wait_until

for package in ("duckdb", "starlette", "uvicorn"):
    pytest.importorskip(package, reason="the servers are in the extras `ui` and `endpoint`")

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}
SCORE = {"response": "x", "ground_truth": ["assert f(1)"], "row": {}, "seconds": 60}
MANY = 300


@dataclass
class Served:
    """A server, with a request that it answers to who has the key."""

    port: int
    path: str
    key: str
    body: dict[str, Any] | None = None
    max_body_bytes: int = 0
    more: dict[str, str] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    @property
    def headers(self) -> dict[str, str]:
        kind = {} if self.body is None else {"Content-Type": "application/json"}
        return {"Authorization": f"Bearer {self.key}", **kind}

    def ask(self, leave_out: str = "", **changes: str) -> tuple[int, bool]:
        """The status, and whether the server ends the connection. changes: of headers, with _ for
        -."""
        headers = self.headers | {name.replace("_", "-"): value for name, value in changes.items()}
        headers.pop(leave_out, None)
        body = None if self.body is None else json.dumps(self.body).encode()

        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            connection.request(self.method, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.will_close

    def head(self, *lines: str) -> bytes:
        whole = [f"{self.method} {self.path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *lines]
        return "\r\n".join(whole).encode() + b"\r\n\r\n"

    def connect(self, sent: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(sent)
        return connection


def answer_two(call: Call) -> "Future[Answer]":
    future: Future[Answer] = Future()
    future.set_result(Answer("2", (), "stop", None, 1, 1))
    return future


@contextmanager
def dashboard(folder: Path) -> Iterator[Served]:
    write_run(folder / "run", num_steps=2)
    listening = socket.create_server(("127.0.0.1", 0))
    shown = Dashboard(folder)
    server = make_server(shown, "127.0.0.1", "a-token")
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()

    try:
        yield Served(listening.getsockname()[1], "/api/samples?run=run", "a-token")
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def endpoint_of_agents(folder: Path) -> Iterator[Served]:
    with closing(Endpoint()) as endpoint, endpoint.session(answer_two) as session:
        _, _, path = session.base_url.rpartition("/episodes/")
        port = int(endpoint.url.rpartition(":")[2])
        yield Served(
            port, f"/episodes/{path}/v1/chat/completions", session.key, CHAT, MAX_BODY_BYTES
        )


@contextmanager
def model(folder: Path) -> Iterator[Served]:
    """As `distflow serve` does; also what a judge runs on."""
    listening = socket.create_server(("127.0.0.1", 0))
    with closing(Endpoint(listening)) as endpoint:
        endpoint.serve("a-key", answer_two, "policy")
        yield Served(
            int(endpoint.url.rpartition(":")[2]),
            "/v1/chat/completions",
            "a-key",
            CHAT,
            MAX_BODY_BYTES,
        )


@contextmanager
def sandbox(folder: Path) -> Iterator[Served]:
    with Sandbox() as local, ScoreServer(local, 2, "127.0.0.1", 0, "") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()

        try:
            port = server.server_address[1]
            yield Served(port, PATH, token_of(port), SCORE, score_server.MAX_BODY_BYTES)
        finally:
            server.shutdown()
            thread.join()


SERVERS = (dashboard, endpoint_of_agents, model, sandbox)


@pytest.fixture(scope="module", params=SERVERS, ids=lambda start: start.__name__)
def served(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp("served")) as found:
        yield found


def test_every_listener_of_the_package_is_behind_the_guard():
    """One that is added is either one of the servers above, or no HTTP server."""
    source = Path(http_guard.__file__).parent
    words = (
        "ThreadingHTTPServer",
        "uvicorn.Server",
        "start_server(",
        "start_unix_server(",
        ".Listener(",
    )
    found = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if any(word in file.read_text("utf-8") for word in words)
    }
    assert found == {"http_guard.py", "rewards/code/score_server.py"}


def test_who_has_the_key_is_answered(served):
    assert served.ask() == (200, False)
    assert served.ask(Host="localhost:1")[0] == served.ask(Host=f"[::1]:{served.port}")[0] == 200
    assert (
        served.ask(Origin=f"http://127.0.0.1:{served.port}", Sec_Fetch_Site="same-origin")[0] == 200
    )


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Authorization": "Bearer other"}, 401),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer s\xe9same"}, 401),
        ({"Cookie": "distflow_dashboard=a-token", "Authorization": ""}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": "evil.example:127"}, 421),
        ({"Host": "192.0.2.1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example", "Host": "evil.example"}, 421),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        (
            {
                "Sec_Fetch_Site": "cross-site",
                "Sec_Fetch_Mode": "navigate",
                "Sec_Fetch_Dest": "document",
            },
            403,
        ),
    ],
    ids=str,
)
def test_what_a_foreign_page_or_a_stranger_sends_is_refused(served, changes, status):
    """And the connection ends, also before a body that was announced."""
    assert served.ask(**changes) == (status, True)
    assert served.ask()[0] == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_of_a_type_that_any_page_may_send_is_refused(served, kind):
    if served.body is not None:
        assert served.ask(Content_Type=kind) == (415, True)
        assert served.ask(Content_Type=kind, leave_out="Authorization")[0] in (401, 415)
        assert served.ask(Content_Type="application/json; charset=utf-8")[0] == 200


def status_of(connection: socket.socket) -> int:
    """0 if it was closed without an answer."""
    with connection, connection.makefile("rb") as lines:
        first = lines.readline().split()
        return int(first[1]) if first else 0


def test_what_is_too_long_is_not_read(served):
    key = f"Authorization: Bearer {served.key}"
    if served.body is not None and served.max_body_bytes != MAX_BODY_BYTES:
        long = ("Content-Type: application/json", f"Content-Length: {served.max_body_bytes + 1}")
        assert status_of(served.connect(served.head(key, *long))) == 413
        assert status_of(served.connect(served.head(key, long[0], "Content-Length: -1"))) in (
            400,
            413,
        )

    assert (
        status_of(
            served.connect(served.head(key, "X-Long: " + "x" * http_guard.MAX_HEAD_BYTES)[:-4])
        )
        == 431
    )
    assert served.ask()[0] == 200


def test_two_hosts_are_none(served):
    key = f"Authorization: Bearer {served.key}"
    assert (
        status_of(served.connect(served.head(key, "Host: evil.example", "Content-Length: 0")))
        == 400
    )


HALVES: dict[str, Callable[[Served], bytes]] = {
    "nothing": lambda served: b"",
    "half a head": lambda served: served.head("X: y")[:-2],
    "no body": lambda served: served.head("Content-Type: application/json", "Content-Length: 100"),
    "no body of the right key": lambda served: served.head(
        f"Authorization: Bearer {served.key}", "Content-Type: application/json", "Content-Length: 2"
    ),
    "no body of a wrong key": lambda served: served.head(
        "Authorization: Bearer x", "Content-Length: 100"
    ),
}


@pytest.mark.parametrize("half", HALVES)
def test_half_open_connections_keep_nobody_out(served, half, monkeypatch):
    monkeypatch.setattr(score_server, "_BODY_S", 0.2)
    with ExitStack() as stack:
        for _ in range(MANY):
            stack.enter_context(served.connect(HALVES[half](served)))
        wait_until(lambda: served.ask()[0] == 200, "an honest client is answered", 10)


def test_a_head_has_to_come_in_time(served, monkeypatch):
    """However slowly its bytes come."""
    monkeypatch.setattr(http_guard, "HEAD_WITHIN_S", 0.2)
    silent = served.connect(b"")
    slow = served.connect(b"POST ")
    assert status_of(silent) == status_of(slow) == 408


def test_a_reply_of_two_parts_waits_for_no_acknowledgement():
    with (
        closing(http_guard.Door(socket.create_server(("127.0.0.1", 0)))) as door,
        socket.create_connection(door.getsockname()) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: select.select([door], [], [], 0)[0], "its head has come")
        accepted, _ = door.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_place_that_is_taken_is_free_again(tmp_path, monkeypatch):
    monkeypatch.setattr(score_server, "_MAX_CONNECTIONS", 1)
    with sandbox(tmp_path) as served:
        body = json.dumps(SCORE).encode()
        key = (
            f"Authorization: Bearer {served.key}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        with served.connect(served.head(*key)) as first:  # a body is awaited from who has the key
            while status_of(served.connect(served.head(*key) + body)) != 503:
                pass
            first.sendall(body)
            assert b"200" in first.recv(100)

        while served.ask()[0] == 503:
            pass


def test_the_token_of_a_server_is_in_a_file_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with sandbox(tmp_path) as served:
        (file,) = (tmp_path / ".cache" / "distflow").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == served.key == token_of(
            served.port
        )
        file.chmod(0o644)
        assert token_of(served.port) == ""
        file.unlink()
        (tmp_path / "other").write_text("a-token")
        file.symlink_to(tmp_path / "other")
        assert token_of(served.port) == ""

    assert file.read_text() != served.key
