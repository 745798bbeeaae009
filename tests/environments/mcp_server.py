"""A server of the package mcp, over stdio or, with a port, over HTTP. Some of its tools are
hostile."""

import os
import subprocess
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")
total = 0


@server.tool()
def add(amount: int) -> int:
    """Adds to a total, which it returns."""
    global total
    total += amount
    return total


@server.tool()
def hangs(file: str) -> str:
    """Writes its process id and that of a process in a session of its own, and hangs."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(file).write_text(f"{os.getpid()} {other.pid}")
    time.sleep(600)
    return "never"


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def shouts() -> str:
    """Returns a megabyte."""
    return "A" * 10**6


@server.tool()
def fails() -> str:
    """Raises an error."""
    raise ValueError("no such thing")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
