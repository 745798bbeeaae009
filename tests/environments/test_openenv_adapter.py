"""Environments of OpenEnv: a real server, and the package's own client."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from distflow.environments.environment_adapters import OpenEnv
from distflow.environments.environment_workflow import EnvironmentWorkflow
from distflow.environments.user_code_process import CallFailed
from distflow.errors import UserError
from tests.environments.test_environment_workflow import given, play
from tests.environments.test_training import WORKFLOW, Games

SERVER = Path(__file__).with_name("openenv_server.py")


@contextmanager
def served(kind: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    with subprocess.Popen([sys.executable, str(SERVER), str(port), kind]) as server:
        try:
            deadline = time.monotonic() + 120
            while True:
                assert server.poll() is None and time.monotonic() < deadline
                try:
                    urlopen(f"{url}/health", timeout=5).close()
                    break
                except URLError:
                    time.sleep(0.2)

            yield url
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url():
    pytest.importorskip("openenv", reason="wants openenv-core (make test-agents)")
    with served("text") as url:
        yield url


@pytest.mark.slow
@pytest.mark.by_hand
def test_a_game_is_played_to_its_end(url):
    score, chat = play(
        EnvironmentWorkflow(env=f"{url}/"), ["9", "0", "7", "8"], seed=7, hint="a digit", other=[1]
    )
    assert score == 1.0 and chat.turns == 3 and chat.finish_reason == "stop"
    assert [segment.reward for segment in chat.segments if segment.owner == "policy"] == [
        0.0,
        0.0,
        1.0,
    ]
    told = given(chat)
    assert told[0].startswith("user: play\n\nguess a digit") and "user: lower" in told[1]
    score, chat = play(EnvironmentWorkflow(env=url, env_kwargs={"hint": "now"}), ["1", "2"], seed=7)
    assert score == 0.0 and chat.turns == 3, "the server ends it"
    assert given(chat)[0].startswith("user: play\n\nguess now")


@pytest.mark.slow
@pytest.mark.by_hand
def test_what_an_environment_raises_is_an_error_of_its_episode(url):
    with pytest.raises(CallFailed, match="on fire"):
        play(EnvironmentWorkflow(env=url), ["66"], seed=7)


@pytest.mark.slow
@pytest.mark.by_hand
def test_an_action_with_several_fields_is_written_as_json(url):
    with served("fields") as own:
        replies = [
            "seven",
            'I bet {"number": "many"}',
            'Now {"number": 9, "stake": 2}!',
            '{"number": 7, "stake": 0.5}',
        ]
        score, chat = play(EnvironmentWorkflow(env=own), replies, seed=7, response=2_000)

    told = given(chat)
    no_action = (
        "That is no action. Write a JSON object with the fields number (integer), stake (number)."
    )
    assert all(no_action in text for text in told[1:3])
    assert '"said": "lower", "left": 2' in told[3] and score == 0.5 and chat.turns == 4


@pytest.mark.slow
@pytest.mark.by_hand
def test_a_run_trains_and_its_checks_pass(url, tmp_path):
    games = Games(tmp_path)
    games.write_rows([{"prompt": f"{i}", "answer": "7", "seed": i} for i in range(4)])
    run = games.run(
        *("grpo", f"{WORKFLOW}=environment", f"{WORKFLOW}_kwargs={{env: '{url}', max_turns: 2}}"),
        *("data.max_prompt_length=60", "data.max_response_length=200"),
        *("trainer.total_training_steps=2", "trust.check_freq=1", "reward.max_error_rate=1"),
    )
    assert len(run.metrics()) == 2
    assert all("turns" in step["passed"] for step in run.checks())


@pytest.mark.parametrize("said", [b"", b"hello\r\n"])
def test_a_server_that_speaks_no_http_is_named_at_the_start(said):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as peer:
                peer.recv(2**16)
                peer.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        env = object.__new__(OpenEnv)
        env._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=f"OpenEnv .* {env._url}"):
            env._schema()
        thread.join()


def test_an_address_where_nothing_answers_is_named_at_the_start():
    pytest.importorskip("openenv", reason="wants openenv-core (make test-agents)")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9"):
        EnvironmentWorkflow(env="http://127.0.0.1:9")


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
    from distflow.environments.environment_adapters import OpenEnv

    with pytest.raises(UserError, match=r"pip install 'distflow\[openenv\]'"):
        OpenEnv("http://127.0.0.1:9", {})
