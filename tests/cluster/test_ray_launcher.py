"""A Ray that a process starts for itself."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

TWICE = """
import ray  # before anything says how it is to be started
import sys
from pathlib import Path
from distflow.cluster.ray_launcher import own_ray

for number in range(2):
    with own_ray(Path(sys.argv[1]), 1):
        import ray
        print(ray.get(ray.remote(lambda: number).remote()))
"""
LIKELY = (6379, 6380, 6381, 8076, 8265, 10001, 10002, 29500, 44217, 44227, 52365)
"""What Ray and torch take where nobody says otherwise."""


@pytest.mark.by_hand
@pytest.mark.slow
def test_a_process_starts_one_after_another_whatever_ports_are_taken(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with ExitStack() as stack:
        for port in LIKELY:
            taken = stack.enter_context(socket.socket())
            with suppress(OSError):  # by somebody else
                taken.bind(("", port))
                taken.listen()
        command = [sys.executable, "-c", TWICE, str(tmp_path / "folder")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]
    assert not list((tmp_path / "folder").iterdir()), "the token is gone"
