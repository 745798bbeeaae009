"""Tools of MCP servers, through the official client: a server is a command, started for each
episode that calls it, or a URL, to which each such episode connects."""

import asyncio
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distflow.environments.user_code_process import START_TIMEOUT_S
from distflow.errors import UserError
from distflow.import_target import users_code

_EXEC = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Executes a command that is killed with the thread that started it, since the client starts it in
its own session."""


class McpTool:
    """A tool of a server; the tools of one server share a connection, which their process keeps
    while it lives."""

    _connections: dict[str, "tuple[asyncio.Future[Any], asyncio.Task[None]]"] = {}

    def __init__(self, server: str, tool: str) -> None:
        import mcp  # noqa: F401  which takes seconds: before the processes of episodes are forked

        self._server = server
        self._tool = tool

    async def __call__(self, **arguments: Any) -> str:
        """Call the tool. Raises RuntimeError for the tool's errors, and what the client raises."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._server not in self._connections:
            connected = asyncio.get_running_loop().create_future()
            holding = asyncio.create_task(_hold(self._server, connected))
            self._connections[self._server] = (connected, holding)

        connected, holding = self._connections[self._server]
        await asyncio.wait((connected, holding), return_when=asyncio.FIRST_COMPLETED)

        if holding.done():
            del self._connections[self._server]  # the next call starts the server again
            holding.result()  # raises the connection error

        try:
            result = await connected.result().call_tool(self._tool, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._connections.pop(self._server, None)
            raise

        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text


async def _hold(server: str, connected: "asyncio.Future[Any]") -> None:
    """The task that owns a connection, which outlives the call that started it."""
    async with _client(server) as client:
        connected.set_result(client)
        await asyncio.Event().wait()


def mcp_schemas(server: str) -> list[dict[str, Any]]:
    """The schemas of a server's tools, in the form of chat templates. Raises UserError."""

    async def ask() -> list[Any]:
        async with _client(server) as client:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            return tools

    what = f"workflow_kwargs.mcp: '{server}' does not name its tools:"

    # the caller may have an event loop
    with users_code(what, passes=UserError), ThreadPoolExecutor(1) as thread:
        asking = thread.submit(lambda: asyncio.run(asyncio.wait_for(ask(), START_TIMEOUT_S)))
        tools = asking.result()

    schemas = list[dict[str, Any]]()
    for tool in tools:
        parameters = {"type": "object", "properties": {}, **tool.input_schema}
        function = {"name": tool.name, "description": tool.description or ""}
        schemas.append({"type": "function", "function": {**function, "parameters": parameters}})

    return schemas


def _client(server: str) -> Any:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise UserError(
            f"the package mcp is not installed here ({error}): pip install 'distflow[mcp]'"
        ) from None

    if server.startswith(("http://", "https://")):
        return Client(server)

    return Client(
        StdioServerParameters(command=sys.executable, args=["-ISc", _EXEC, *shlex.split(server)])
    )
