"""Processes of episodes: they end with the run, however that ends; and what comes in time counts."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from distflow.environments.user_code_process import ProcessServer, UserProcess
from distflow.runtime.rollout_loop.user_calls import deadline_paused, run_async
from tests.patience import is_running, wait_until

RUN = """
import asyncio, sys
from distflow.environments.parse_tool_calls import ToolCall
from distflow.environments.tool_workflow import EpisodeTools, Tools

async def episode(tools, file):
    with EpisodeTools(tools, ()) as own:
        await own.run(ToolCall("starts", {"file": file}))
        print(tools.server.pid, flush=True)
        await own.run(ToolCall("hangs"))

asyncio.run(episode(Tools([sys.argv[1] + name for name in ("starts", "hangs")], 600.0, 100), sys.argv[2]))
"""


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    tools, file = f"{Path(__file__).with_name('hostile_tools.py')}:", tmp_path / "pid"
    run = subprocess.Popen([sys.executable, "-c", RUN, tools, str(file)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    server, started = int(run.stdout.readline()), int(file.read_text())
    assert is_running(server) and is_running(started)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    while is_running(server) or is_running(started):  # else this test runs into its timeout
        time.sleep(0.05)


def test_an_answer_that_came_in_time_counts_although_the_workflow_waits_for_its_turn() -> None:
    """Another function of the user's has the turn until long after the deadline."""

    async def run() -> object:
        turn, asked = asyncio.Lock(), asyncio.Event()
        ours, theirs = socket.socketpair()
        process = UserProcess(*await asyncio.open_connection(sock=ours))

        async def workflow() -> object:
            theirs.send(b'{"value": 42}\n')
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


def test_long_options_stay_private_and_what_a_module_starts_lasts_for_all_episodes(tmp_path: Path) -> None:
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
