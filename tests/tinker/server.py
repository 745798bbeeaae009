"""A real server of the Tinker API over a tiny model."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_models import write_tiny_model

ENDS_WITHIN_S = 60
KEY = "tml-of-a-test"


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    key: str
    model: str
    """Its name for clients: the folder."""
    process: subprocess.Popen[str]
    checkpoints: Path


@contextmanager
def tinker_server(
    folder: Path,
    checkpoints: Path | None = None,
    name: str = "model",
    options: Sequence[str] = (),
) -> Iterator[Served]:
    """The model is in the folder under the name, and stays there. checkpoints: a folder that
    outlives the server. options: keys of the config."""
    model = folder / name
    if not model.exists():
        write_tiny_model(model)

    command = [sys.executable, "-m", "distflow", "serve", str(model), "--tinker", "--port", "0"]
    if checkpoints is not None:
        command += ["--folder", str(checkpoints)]
    command += options
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        told: dict[str, str] = {}
        try:
            while "base model" not in told:
                line = process.stdout.readline()
                assert line, f"the server ended with status {process.wait()}"
                name, _, value = line.strip().partition(":" if line.startswith("base") else "=")
                told[name] = value

            yield Served(
                told["TINKER_BASE_URL"],
                told["TINKER_API_KEY"],
                str(model),
                process,
                checkpoints or folder,
            )
        finally:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert status == 0


class LastingServer:
    """One that ends and is started again; always the same one for its clients."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        """options: keys of the config."""
        self._folder = folder
        self._options = options
        if not (folder / "model").exists():
            write_tiny_model(folder / "model")
        self.checkpoints = folder / "checkpoints"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.address = {"base_url": f"http://127.0.0.1:{self._port}", "api_key": KEY}
        self.start()

    def start(self) -> None:
        model = self._folder / "model"
        command = [sys.executable, "-m", "distflow", "serve", str(model), "--tinker"]
        command += ["--port", str(self._port), "--api-key", KEY, "--folder", str(self.checkpoints)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=ENDS_WITHIN_S)
