"""Which ports of which processes: asked of real ones."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from distflow.commands.doctor_and_selftest import Listener, family, listeners

# A process with a socket on each kind of address and one that only connects, whose child listens as
# well.
PARENT = """
import socket, subprocess, sys
open_to_all = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
loopback = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.2", 0))]
mapped = socket.socket(socket.AF_INET6)
mapped.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
mapped.bind(("::ffff:127.0.0.1", 0))
mapped.listen()
connected = socket.create_connection(loopback[0].getsockname())
child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
ports = [s.getsockname()[1] for s in (open_to_all, *loopback, mapped)]
print(child.pid, child.stdout.readline().strip(), *ports, flush=True)
sys.stdin.read()
"""  # noqa: E501
CHILD = """
import socket, sys
mine = socket.create_server(("0.0.0.0", 0))
print(mine.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[tuple[int, list[int]]]:
    """(pid, what it said: the child's pid and port, then its own ports)"""
    code = f"CHILD = {CHILD!r}\n{PARENT}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdin
    try:
        yield process.pid, [int(word) for word in process.stdout.readline().split()]
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def test_ports_of_a_process_and_of_what_it_started(parent: tuple[int, list[int]]) -> None:
    pid, (child, child_port, open_to_all, first, second, mapped) = parent
    assert family(pid) == [pid, child]
    found = {(one.pid, one.address, one.port): one.where for one in listeners([pid, child])}
    everywhere = "EVERY ADDRESS of this machine"
    assert found == {
        (pid, "::", open_to_all): everywhere,
        (pid, "127.0.0.1", first): "loopback",
        (pid, "127.0.0.2", second): "loopback",
        (pid, "127.0.0.1", mapped): "loopback",
        (child, "0.0.0.0", child_port): everywhere,
    }


def test_the_family_goes_down_from_a_process_not_up(parent: tuple[int, list[int]]) -> None:
    pid, (child, *_) = parent
    assert family(child) == [child]
    assert {pid, child} <= set(family(os.getpid()))


def test_a_process_that_ended_has_no_ports() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    with socket.create_server(("127.0.0.1", 0)) as mine:
        found = listeners([gone.pid, os.getpid()])
        assert mine.getsockname()[1] in {listener.port for listener in found}
        assert {listener.pid for listener in found} == {os.getpid()}


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("192.0.2.7", "the address 192.0.2.7 of this machine"),
        ("::1", "loopback"),
        ("0.0.0.0", "EVERY ADDRESS of this machine"),
    ],
)
def test_where_in_words(address: str, where: str) -> None:
    assert Listener(1, "gcs_server", address, 6379).where == where
