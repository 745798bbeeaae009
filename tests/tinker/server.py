"""A real server of the Tinker API over a tiny model."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_models import write_tiny_model

ENDS_WITHIN_S = 60


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
