"""Processes of episodes: they end with the run, however that ends; and what comes in time
counts."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distflow.environments.user_code_process import (
    ProcessEnded,
    ProcessServer,
    ServerGivenUp,
    ServerLost,
    UserProcess,
)
from distflow.processes.channel import encode
from distflow.processes.descendants import stat_fields
from distflow.runtime.rollout_loop.user_calls import deadline_paused, run_async
from tests.patience import is_running, wait_until

RUN = """
import asyncio, sys
from distflow.environments.tool_workflow import EpisodeTools
from distflow.environments.tools import Tools

async def episode(tools, file):
    with EpisodeTools(tools, ()) as own:
        await own.run("starts", {"file": file})
        print(tools.server.pid, flush=True)
        await own.run("hangs", {})

asyncio.run(episode(Tools([sys.argv[1] + name for name in ("starts", "hangs")], 600.0, 100), sys.argv[2]))
"""  # noqa: E501


def test_a_killed_run_leaves_no_process(tmp_path):
    tools = f"{Path(__file__).with_name('hostile_tools.py')}:"
    file = tmp_path / "pid"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, tools, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    server = int(run.stdout.readline())
    started = int(file.read_text())
    assert is_running(server) and is_running(started)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    while is_running(server) or is_running(started):  # else this test runs into its timeout
        time.sleep(0.05)


def test_an_answer_that_came_in_time_counts_although_the_workflow_waits_for_its_turn():
    """Another function of the user's has the turn until long after the deadline."""

    async def run() -> object:
        turn, asked = asyncio.Lock(), asyncio.Event()
        ours, theirs = socket.socketpair()
        server: Any = SimpleNamespace(answered=lambda: None)
        process = UserProcess(*await asyncio.open_connection(sock=ours), server)

        async def workflow() -> object:
            theirs.send(encode({"value": 42}))
            asked.set()
            with deadline_paused():
                return await process.call("call", timeout_s=0.05)

        async def other() -> None:
            await asked.wait()
            async with turn:
                await asyncio.sleep(0.2)

        with theirs:
            try:
                return (await asyncio.gather(run_async(workflow, 60.0, turn), other()))[0]
            finally:
                process.close()

    assert asyncio.run(run()) == 42


HELPED = """
import subprocess, sys
helper = subprocess.Popen(["sleep", "600"])

class Helped:
    def __init__(self, word):
        self.length = len(word)

    def report(self):
        return [helper.pid, self.length, sys.stdin.read()]
"""


def test_long_options_stay_private_and_what_a_module_starts_lasts_for_all_episodes(tmp_path):
    (tmp_path / "helped.py").write_text(HELPED)
    server = ProcessServer(f"{tmp_path}/helped.py:Helped", {"word": "secret" * 50_000})
    assert b"secret" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()

    async def episode() -> list[object]:
        process = await server.fork("a seed")
        try:
            return list(await process.call("report", None))
        finally:
            process.close()

    for _ in range(2):  # the server has ended the first when it forks the second
        pid, *others = asyncio.run(episode())
        assert others == [300_000, ""]
        assert is_running(int(str(pid)))

    server.close()
    wait_until(lambda: not is_running(int(str(pid))), "it ends with the server")


STRIKING = """
import os, signal, subprocess, time

class Striking:
    def ancestors(self):
        return [os.getpid(), os.getppid()]

    def leave(self):
        # a grandchild in a session of its own, without our environment and without its parent
        command = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
        said = subprocess.run(["env", "-i", "/bin/sh", "-c", command], capture_output=True, text=True).stdout
        return int(said)

    def wait(self):
        time.sleep(600)

    def signal(self, pid, number):
        os.kill(pid, number)
        time.sleep(0.2)
        return "alive"

    def fork_and_end_parent(self):
        parent = os.getppid()
        if (child := os.fork()) == 0:
            os.setsid()
            os.kill(parent, signal.SIGKILL)
            time.sleep(600)
        time.sleep(600)
"""  # noqa: E501


@pytest.fixture
def server(tmp_path):
    (tmp_path / "striking.py").write_text(STRIKING)
    server = ProcessServer(f"{tmp_path}/striking.py:Striking", {})
    yield server
    server.close()


@pytest.mark.parametrize("victims", ["server", "keeper", "server and keeper"])
def test_a_killed_server_is_started_anew_and_nothing_of_it_lives_on(server, victims):
    async def run() -> list[int]:
        process = await server.fork(1)
        idle = await server.fork(2)
        left = await process.call("leave", None)
        pids = [left, *await process.call("ancestors", None), *await idle.call("ancestors", None)]
        waiting = asyncio.ensure_future(process.call("wait", None))
        await asyncio.sleep(0.1)
        assert all(map(is_running, pids))
        keeper = int(stat_fields(server.pid)[1])
        struck = {"keeper": keeper, "server": server.pid}
        for name in victims.split(" and "):
            os.kill(struck[name], signal.SIGKILL)
        with pytest.raises(ServerLost, match=r"SIGKILL.*dmesg"):
            await waiting
        with pytest.raises(ServerLost):
            await idle.call("wait", None)
        again = await server.fork(3)
        own, _ = await again.call("ancestors", None)
        assert is_running(own) and server.pid != struck["server"]
        again.close()

        return pids

    for pid in asyncio.run(run()):
        wait_until(lambda pid=pid: not is_running(pid), ("it ended with the server"))  # type: ignore[misc]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1]
)
def test_who_signals_its_parent_or_its_group_harms_only_itself(server, number):
    async def run() -> None:
        first = server.pid
        other = await server.fork("other")

        for pid in (None, 0):
            process = await server.fork("striking")
            own, parent = await process.call("ancestors", None)
            left = await process.call("leave", None)

            try:
                said = await process.call(
                    "signal", 20, pid=parent if pid is None else pid, number=number
                )
                assert said == "alive" and number != signal.SIGKILL
            except ProcessEnded as ended:
                assert pid == 0 or number == signal.SIGKILL, ended

            process.close()
            for each in (own, parent, left):
                await asyncio.to_thread(
                    wait_until, lambda each=each: not is_running(each), "it is ended"
                )

        assert await other.call("ancestors", 20) and server.pid == first
        other.close()

    asyncio.run(run())


def test_deaths_in_a_row_end_with_advice(server):
    async def run() -> None:
        for _ in range(20):
            process = await server.fork(1)
            with pytest.raises(ServerLost):
                await process.call("signal", None, pid=server.pid, number=signal.SIGKILL)

    with pytest.raises(
        ServerGivenUp, match=r"SIGKILL.*dmesg.*async\.max_concurrent_rollouts"
    ) as given_up:
        asyncio.run(run())

    assert re.search(r"time \d+ in a row", str(given_up.value))
