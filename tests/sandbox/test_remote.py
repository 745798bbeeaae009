"""The sandbox behind a URL: the same answers as here, and a fault, never a score, if the connection
fails."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from distflow.errors import UserError
from distflow.http_guard import token_of
from distflow.rewards.code.reward import compute_score, compute_share
from distflow.sandbox import http_server as serving
from distflow.sandbox import remote
from distflow.sandbox.http_server import SandboxService, Server
from distflow.sandbox.interface import Broken, Limits, Raised, RunResult, SandboxFault
from distflow.sandbox.local_sandbox import Sandbox, probe
from distflow.sandbox.remote import TOKEN, RemoteSandbox
from tests.sandbox.conftest import LIMITS

TELLS_WHEN = "import time\nprint(time.monotonic())\ntime.sleep(0.2)\nprint(time.monotonic())"
DOUBLE = "```python\ndef f(x):\n    return 2 * x\n```"


@contextmanager
def served(
    sandbox: Sandbox, at_once: int = 2, token: str = ""
) -> Iterator[tuple[str, SandboxService]]:
    with (
        closing(SandboxService(sandbox, at_once)) as service,
        Server(service, "127.0.0.1", 0, token) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", service
        finally:
            server.shutdown()
            thread.join()


def headers_to(url: str) -> dict[str, str]:
    """Of this user's requests to its own server."""
    token = token_of(int(url.rpartition(":")[2]))
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def local() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def url(local: Sandbox) -> Iterator[str]:
    with served(local) as (url, _):
        yield url


def test_a_program_runs_as_it_does_here(local: Sandbox, url: str) -> None:
    with RemoteSandbox(url, LIMITS) as there:
        assert there.level.name == f"{local.level.name} at {url}"
        for code, given in (
            ("print(input() + '\\u00e9')", "a\udce9"),
            ("import sys\nprint('x' * 70_000, file=sys.stderr)\nsys.exit(3)", ""),
            ("x = [0] * 10**9", ""),
            ("import os\nos.fork()", ""),
            ("print(open('/etc/passwd').read())", ""),
        ):
            here = local.run(code, given)
            away = there.run(code, given)
            assert away._replace(seconds=0) == here._replace(seconds=0)
        assert there.run("while True: pass", limits=LIMITS._replace(wall_s=0.3)).status == "time"


def test_calls_keep_types_and_say_what_went_wrong(url: str) -> None:
    code = (
        "import os\ndef f(x, *, y=1):\n  print('said')\n  return [x, y]\ndef g(): return g\n"
        "def h(): os._exit(3)"
    )
    with RemoteSandbox(url, LIMITS) as there, there.open(code) as session:
        plain = [(1, 2.5), {"a": {3}}, b"\xff", 10**400, None, "\ud800"]
        assert session.call("f", [plain], {"y": ()}) == [plain, ()]
        assert session.stdout == "said\n"
        with pytest.raises(Raised, match="TypeError") as raised:
            session.call("f")
        assert raised.value.type == "TypeError"
        with pytest.raises(Broken) as broken:
            session.call("g")
        assert broken.value.cause == "value"
        for _ in range(2):
            with pytest.raises(Broken) as broken:
                session.call("h")
            assert broken.value.cause == "exit"
        with pytest.raises(Raised, match="ZeroDivisionError"):
            there.open("1 / 0")


def test_scores_of_code_are_the_same_and_name_the_server(url: str) -> None:
    tests = ["assert f(1) == 2", "assert sorted([f(2), 1]) == [1, 4]"]
    right = compute_score("", DOUBLE, tests, {}, sandbox=url)
    assert right["score"] == 1.0 and str(right["sandbox"]).endswith(f" at {url}")
    assert compute_share("", DOUBLE, [*tests, "assert f(1) == 3"], {}, sandbox=url)[
        "share"
    ] == pytest.approx(2 / 3)
    streams = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "3\n"]}
    assert compute_share("", "print(input())", streams, {}, sandbox=url)["share"] == 0.5


def test_no_more_programs_run_at_once_than_there_are_places(local: Sandbox) -> None:
    with served(local, at_once=1) as (url, _):
        ran: list[list[float]] = []

        def wait() -> None:
            with RemoteSandbox(url, LIMITS) as there:
                ran.append([float(line) for line in there.run(TELLS_WHEN).stdout.split()])

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, second, third = sorted(ran)
        assert first[1] < second[0] and second[1] < third[0]


class Place(threading.BoundedSemaphore):
    """The one place of a service, and whether it was asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        self.asked.set()
        return super().acquire(blocking, timeout)


def test_the_wait_for_a_place_is_not_the_programs_time(
    local: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_SLOT_S", 0.05)
    with served(local, at_once=1) as (url, service), RemoteSandbox(url, LIMITS) as there:
        place = Place()
        monkeypatch.setattr(service, "_free", place)
        assert place.acquire()  # as a program that runs does
        asking = threading.Thread(target=lambda: ended.append(there.run("pass")))
        ended: list[RunResult] = []
        place.asked.clear()
        asking.start()
        assert place.asked.wait(60)
        began = time.monotonic()
        time.sleep(0.3)
        held_s = time.monotonic() - began
        place.release()
        asking.join()
        assert [ran.status for ran in ended] == ["ok"] and there.waited_s >= held_s


def test_who_leaves_a_program_behind_leaves_nothing(
    local: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(local) as (url, service), RemoteSandbox(url, LIMITS) as there:
        session = there.open("def f(): return 1")
        assert session.call("f") == 1 and len(service._sessions) == 1
        monkeypatch.setattr("distflow.sandbox.http_server.IDLE_S", 0.2)
        deadline = time.monotonic() + 60
        while service._sessions and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not service._sessions
        with pytest.raises(SandboxFault, match="410: this program has ended"):
            session.call("f")


def test_a_password_where_others_can_ask(local: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=TOKEN):
        Server(SandboxService(local, 1), "0.0.0.0", 0, "")
    with pytest.raises(UserError, match="127.0.0.1:70000 cannot be listened on: .*0-65535"):
        Server(SandboxService(local, 1), "127.0.0.1", 70_000, "")
    with served(local, token="sésame") as (url, _):
        monkeypatch.setenv(TOKEN, "sesame")
        with pytest.raises(SandboxFault, match=f"401: .*token.*{TOKEN}"):
            RemoteSandbox(url)
        monkeypatch.setenv(TOKEN, "sésame")
        with RemoteSandbox(url, LIMITS) as there:
            assert there.run("print(1)").stdout == "1\n"


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("run", b"[]", 400),
        ("run", b"{", 400),
        ("run", b"[" * 10**6, 400),
        ("run", {"code": 1, "stdin": "", "limits": LIMITS._asdict()}, 400),
        ("run", {"code": "", "stdin": "", "limits": {**LIMITS._asdict(), "cpu_s": "1"}}, 400),
        (
            "run",
            {"code": "", "stdin": "", "limits": {**LIMITS._asdict(), "wall_s": float("nan")}},
            400,
        ),
        ("run", {"code": "", "stdin": ""}, 400),
        ("call", {"session": "x", "question": "[1]"}, 400),
        ("call", {"session": "x", "question": '["f", [], {"dict": []}]'}, 410),
        ("level", {}, 200),
        ("close", {"session": "x"}, 200),
        ("../level", {}, 404),
    ],
)
def test_requests_that_mean_nothing_are_refused(
    url: str, action: str, body: object, status: int
) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    sent = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", f"/v1/{action}", sent, headers_to(url))
    assert connection.getresponse().status == status
    connection.close()


def test_no_program_gets_more_than_the_server_gives(url: str) -> None:
    with RemoteSandbox(url, Limits(memory_bytes=2**60, open_files=10**6, cpu_s=1e6)) as there:
        asked = (
            "import resource as r\nprint(*(r.getrlimit(x)[0] for x in (r.RLIMIT_AS, "
            "r.RLIMIT_NOFILE, r.RLIMIT_CPU)))"
        )
        assert list(map(int, there.run(asked).stdout.split())) == [4 * 2**30, 1024, 60]


def test_a_server_that_is_gone_is_a_fault_and_no_score(
    local: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_WAITS_S", (0.01, 0.02))
    with served(local) as (url, _):
        there = RemoteSandbox(url, LIMITS)
        session = there.open("def f(): return 1")
        assert compute_score("", DOUBLE, ["assert f(1) == 2"], {}, sandbox=url)["score"] == 1.0
    there.close()
    for ask in (
        lambda: there.run("print(1)"),
        lambda: session.call("f"),
        lambda: RemoteSandbox(url),
    ):
        with pytest.raises(SandboxFault, match="does not reply"):
            ask()
    session.close()


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped() -> None:
    command = [
        sys.executable,
        "-m",
        "distflow",
        "sandbox",
        "serve",
        "--port",
        "0",
        "--at-once",
        "1",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+\d", said)
        assert found and probe().name in said
        with RemoteSandbox(found[0], LIMITS) as there:
            assert there.run("print(1)").stdout == "1\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
