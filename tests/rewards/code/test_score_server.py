"""Programs that are scored behind a URL: the same results as here, and a fault, never a score, if
the connection fails."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distflow.errors import UserError
from distflow.http_guard import token_of
from distflow.rewards.code import score_client
from distflow.rewards.code import score_server as serving
from distflow.rewards.code.reward import compute_score, compute_share
from distflow.rewards.code.score_client import TOKEN
from distflow.rewards.code.score_server import ScoreServer
from distflow.rewards.reward_results import due_within
from distflow.sandbox.interface import SandboxFault
from distflow.sandbox.local_sandbox import Sandbox, probe

TESTS = ["assert f(1) == 2", "assert sorted([f(2), 1]) == [1, 4]"]
DOUBLE = "```python\ndef f(x):\n    return 2 * x\n```"
TELLS_WHEN = """```python
import time
def f(x):
    began = time.monotonic()
    time.sleep(0.2)
    print(began, time.monotonic())
    return 3
```"""


@contextmanager
def served(sandbox: Sandbox, at_once: int = 2, token: str = "") -> Iterator[str]:
    with ScoreServer(sandbox, at_once, "127.0.0.1", 0, token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()

        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def local():
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def url(local):
    with served(local) as url:
        yield url


@pytest.mark.parametrize(
    "response",
    [
        DOUBLE,
        "```python\ndef f(x): return x\n```",
        "```python\ndef f(x) return\n```",
        "```python\nx = '\ud800'\ndef f(x): return 1 / 0\n```",
        "```ruby\nputs 1\n```",
    ],
)
def test_results_are_the_same_and_name_the_server(url, response):
    here = compute_score("", response, TESTS, {})
    there = compute_score("", response, TESTS, {}, sandbox=url)
    assert there.pop("sandbox") == f"{here.pop('sandbox')} at {url}"
    del here["seconds"], there["seconds"]
    assert there == here


def test_all_kinds_of_tests_are_scored_there(url):
    assert compute_share("", DOUBLE, [*TESTS, "assert f(1) == 3"], {}, sandbox=url)[
        "share"
    ] == pytest.approx(2 / 3)
    streams = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "3\n"]}
    assert compute_share("", "print(input())", streams, {}, sandbox=url)["share"] == 0.5
    check = {"test": "def check(g):\n    assert g(1) == 2", "entry_point": "f"}
    assert compute_score("", DOUBLE, None, check, sandbox=url)["score"] == 1.0
    with pytest.raises(ValueError, match="tests are broken"):
        compute_score("", DOUBLE, ["assert f("], {}, sandbox=url)


def test_a_program_has_the_time_that_is_left_for_its_score(url):
    began = time.monotonic()
    with due_within(2.0):
        endless = compute_score("", "while True: pass", TESTS, {}, sandbox=url)
    assert endless["score"] == 0.0 and "ran out of time" in str(endless["failed"])
    assert time.monotonic() - began < 30


def test_no_more_responses_are_scored_at_once_than_there_are_places(local, monkeypatch):
    monkeypatch.setattr(serving, "_SLOT_S", 0.05)  # so that clients ask again
    with served(local, at_once=1) as url:
        ran: list[list[float]] = []

        def score() -> None:
            found = compute_score("", TELLS_WHEN, ["assert f(1) == 2"], {}, sandbox=url)
            failed = found["failed"]
            assert isinstance(failed, list) and isinstance(failed[0], dict)
            ran.append([float(word) for word in str(failed[0]["printed"]).split()])

        threads = [threading.Thread(target=score) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, second, third = sorted(ran)
        assert first[1] < second[0] and second[1] < third[0]


def test_a_password_where_others_can_ask(local, monkeypatch):
    with pytest.raises(UserError, match=TOKEN):
        ScoreServer(local, 1, "0.0.0.0", 0, "")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:70000 .*0-65535"):
        ScoreServer(local, 1, "127.0.0.1", 70_000, "")

    with served(local, token="sésame") as url:
        monkeypatch.setenv(TOKEN, "sesame")
        with pytest.raises(SandboxFault, match=f"401: .*token.*{TOKEN}"):
            compute_score("", DOUBLE, TESTS, {}, sandbox=url)
        monkeypatch.setenv(TOKEN, "sésame")
        assert compute_score("", DOUBLE, TESTS, {}, sandbox=url)["score"] == 1.0


GOOD = {"response": "", "row": {}, "ground_truth": TESTS, "seconds": 9}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("score", b"[]", 400),
        ("score", b"{", 400),
        ("score", b"[" * 10**6, 400),
        ("score", {**GOOD, "response": 1}, 400),
        ("score", {**GOOD, "row": []}, 400),
        ("score", {**GOOD, "seconds": "1"}, 400),
        ("score", {**GOOD, "seconds": True}, 400),
        ("score", {**GOOD, "seconds": 0}, 400),
        ("score", {**GOOD, "seconds": float("nan")}, 400),
        ("score", {}, 400),
        ("score", {**GOOD, "seconds": 0.9}, 200),
        ("run", GOOD, 404),
    ],
)
def test_requests_that_mean_nothing_are_refused(url, path, body, status):
    token = token_of(int(url.rpartition(":")[2]))
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    sent = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", f"/v1/{path}", sent, headers)
    assert connection.getresponse().status == status
    connection.close()


def test_a_server_that_is_gone_is_a_fault_and_no_score(local, monkeypatch):
    monkeypatch.setattr(score_client, "_WAITS_S", (0.01, 0.02))
    with served(local) as url:
        assert compute_score("", DOUBLE, TESTS, {}, sandbox=url)["score"] == 1.0
    with pytest.raises(SandboxFault, match="does not reply"):
        compute_score("", DOUBLE, TESTS, {}, sandbox=url)

    for wrong in ("ftp://host", "http://", "http://host:x", "http://me@host"):
        with pytest.raises(UserError, match="not the URL"):
            compute_score("", DOUBLE, TESTS, {}, sandbox=wrong)


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped():
    command = [sys.executable, "-m", "distflow", "sandbox", "serve"]
    command += ["--port", "0", "--at-once", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+\d", said)
        assert found and probe().name in said
        assert compute_score("", DOUBLE, TESTS, {}, sandbox=found[0])["score"] == 1.0
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
