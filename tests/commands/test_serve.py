"""`distflow serve`: a real server with a real client, until a signal ends it."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from distflow.cli import main
from tests.commands.test_chat import greedy
from tests.tiny_models import write_tiny_model


@pytest.fixture
def openai():
    """Imported by the tests that use it."""
    return pytest.importorskip(
        "openai", reason="the server is tested with the official client (extra dev)"
    )


@pytest.mark.slow
def test_a_model_is_served_until_ctrl_c(tmp_path, openai):
    model = write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "distflow", "serve", str(model), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None

    try:
        told: dict[str, str] = {}
        while "OPENAI_API_KEY" not in told:
            line = server.stdout.readline()
            assert line, "it has ended"
            name, _, value = line.strip().partition("=")
            told[name] = value

        client = openai.OpenAI(
            base_url=told["OPENAI_BASE_URL"], api_key=told["OPENAI_API_KEY"], max_retries=0
        )
        create = client.chat.completions.create
        said = [{"role": "user", "content": "12+3="}]
        reply = create(model=str(model), messages=said, max_tokens=6, temperature=0)
        assert reply.choices[0].message.content == greedy(model, said, 6)
        pieces = create(model=str(model), messages=said, max_tokens=6, temperature=0, stream=True)
        text = [
            piece.choices[0].delta.content for piece in pieces if piece.choices[0].delta.content
        ]
        assert "".join(text) == reply.choices[0].message.content
        drawn = [
            create(model=str(model), messages=said, max_tokens=12, temperature=1, seed=seed)
            .choices[0]
            .message.content
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        with pytest.raises(openai.NotFoundError, match="'gpt-4o'"):
            create(model="gpt-4o", messages=said)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=told["OPENAI_BASE_URL"], api_key="other").models.list()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_key_of_the_environment_is_asked_for_and_not_printed(tmp_path, openai):
    command = [
        sys.executable,
        "-m",
        "distflow",
        "serve",
        str(write_tiny_model(tmp_path / "model")),
        "--port",
        "0",
    ]

    environment = {**os.environ, "DISTFLOW_API_KEY": "of-mine"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            lines = []
            while not lines or not lines[-1].startswith("model: "):
                lines.append(server.stdout.readline())
                assert lines[-1], "it has ended"

            (url,) = [
                line.strip().partition("=")[2]
                for line in lines
                if line.startswith("OPENAI_BASE_URL")
            ]
            assert (
                len(
                    list(
                        openai.OpenAI(base_url=url, api_key="of-mine", max_retries=0).models.list()
                    )
                )
                == 1
            )
            server.send_signal(signal.SIGINT)
            said = "".join([*lines, server.stdout.read()])
            assert "of-mine" not in said and "API_KEY" not in said
        finally:
            server.kill()


def test_a_model_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_an_address_that_cannot_be_listened_on_is_named_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70_000):
            assert main(["serve", "no_such_model", "--port", str(port)]) == 2
            assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err
