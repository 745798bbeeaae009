"""Processes of episodes end with the run, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.environments.test_tools import is_running

RUN = """
import asyncio, sys
from distflow.environments.tool_calls import ToolCall
from distflow.environments.tools import Tools

async def episode(tools, file):
    with tools.episode() as own:
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
