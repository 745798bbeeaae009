"""Tools of real MCP servers: what they answer, and that whatever they do becomes a bounded text."""

import asyncio
import os
import shlex
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from distflow.environments.mcp_tools import mcp_schemas
from distflow.environments.parse_tool_calls import ToolCall
from distflow.environments.tool_workflow import EpisodeTools, Tools, ToolWorkflow
from distflow.errors import UserError
from tests.environments.test_tool_workflow import answers
from tests.patience import at_some_deadline, is_running, wait_until

pytest.importorskip("mcp", reason="wants mcp: make test-slow")
pytestmark = pytest.mark.slow

COMMAND = [
    "env",
    f"PYTHONPATH={os.pathsep.join(sys.path)}",
    sys.executable,
    f"{Path(__file__).with_name('mcp_server.py')}",
]
SERVER = shlex.join(COMMAND)
PAGED = """
import json, sys

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"error": {"code": -32601, "message": "no such method"}}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "paged", "version": "1"}
        answer = {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
    if asked["method"] == "tools/list":
        page = int((asked.get("params") or {}).get("cursor") or 0)
        tools = [{"name": f"tool{page}", "inputSchema": {"type": "object"}}]
        answer = {"result": {"tools": tools, **({"nextCursor": str(page + 1)} if page < 2 else {})}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""  # noqa: E501
NAMES = ["add", "hangs", "dies", "shouts", "fails"]


def test_a_server_runs_for_the_episode_and_its_failures_are_told():
    with closing(Tools([], 60.0, 300, [SERVER])) as tools:
        assert [schema["function"]["name"] for schema in tools.schemas] == NAMES
        assert tools.schemas[0]["function"]["description"] == "Adds to a total, which it returns."
        assert tools.parameters["add"]["amount"]["type"] == "integer"
        adds = ToolCall("add", {"amount": 2})
        texts, counts = answers(tools, adds, adds, ToolCall("shouts"), ToolCall("fails"), adds)
        assert texts[:2] == ["2", "4"] and texts[4] == "6"
        assert (
            texts[2].endswith("[cut: the answer has 1,000,000 characters]") and len(texts[2]) < 400
        )
        assert texts[3] == "error: fails raised RuntimeError: Error executing tool fails"
        errors = [counts[f"tool/{name}/errors"] for name in ("add", "shouts", "fails")]
        assert errors == [0, 1, 1]
        (text,), _ = answers(tools, adds)
        assert text == "2", "another episode has a server of its own"


def test_a_server_that_hangs_or_dies_ends_and_the_episode_goes_on(tmp_path):
    async def run(tools: Tools) -> list[str]:
        with EpisodeTools(tools, ("a seed",)) as episode:
            first = await episode.run("dies", {})
            hung = await episode.run("hangs", {"file": str(tmp_path / "pid")})
            last = await episode.run("add", {"amount": 3})
            return [first.text, hung.text, last.text]

    def check(deadline_s: float) -> None:
        with closing(Tools([], deadline_s, 300, [SERVER])) as tools:
            died, hung, added = asyncio.run(run(tools))
            assert died.startswith("error: dies raised MCPError: Connection closed")
            assert f"no answer within {deadline_s:g} s" in hung and added == "3"
            pids = [int(pid) for pid in (tmp_path / "pid").read_text().split()]
            wait_until(
                lambda: not any(map(is_running, pids)),
                "the server has ended, with what it has started",
            )

    at_some_deadline(check, 8.0, 60.0)


def test_a_server_that_did_not_start_is_started_by_the_next_call(tmp_path):
    starts = tmp_path / "starts"

    # the first one names the tools
    script = f'echo >> {starts}; test $(wc -l < {starts}) -ne 2 && exec "$@"'
    with closing(Tools([], 60.0, 300, [shlex.join(["sh", "-c", script, "sh", *COMMAND])])) as tools:
        adds = ToolCall("add", {"amount": 2})
        (failed, added), _ = answers(tools, adds, adds)

    assert failed.startswith("error: add raised ") and added == "2"


def test_tools_on_all_pages_are_found(tmp_path):
    (tmp_path / "paged.py").write_text(PAGED)
    schemas = mcp_schemas(shlex.join([sys.executable, str(tmp_path / "paged.py")]))
    assert [schema["function"]["name"] for schema in schemas] == ["tool0", "tool1", "tool2"]


def test_a_url_is_a_server_that_episodes_share():
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]

    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(
                lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "the server listens"
            )

            with closing(
                Tools(["calculator"], 60.0, 300, [f"http://127.0.0.1:{port}/mcp"])
            ) as tools:
                adds = ToolCall("add", {"amount": 2})
                assert [*answers(tools, adds)[0], *answers(tools, adds)[0]] == ["2", "4"]
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("mcp", "said"),
    [
        (["no-such-command"], "'no-such-command' .* tools"),
        ([f"{sys.executable} -c pass"], "does not name its tools"),
        ([7], "7 is .* command .* URL"),
        ("server", "name at least one tool in a list"),
        ([SERVER, SERVER], "two tools have the same name"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(mcp, said):
    with pytest.raises(UserError, match=said):
        ToolWorkflow(mcp=mcp)  # type: ignore[arg-type]
