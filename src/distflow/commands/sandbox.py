"""`distflow sandbox run`: runs one program as code under test, and reports how it ended and its
isolation; `distflow sandbox serve`: scores programs for other machines."""

import argparse
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from distflow.commands.arguments import at_least
from distflow.errors import UserError, missing_path

_RUN = "run a Python file with the limits of a reward call"
_SERVE = "score programs for reward functions on other machines until stopped"


def add_sandbox_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser("run", help=_RUN, description=_RUN)
    action.add_argument("file", metavar="FILE", help="the Python file")
    action.add_argument(
        "--stdin", metavar="FILE", help="file for its standard input; default: empty"
    )
    action = actions.add_parser("serve", help=_SERVE, description=_SERVE)
    action.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others need a password"
    )
    action.add_argument(
        "--port",
        type=partial(at_least, 0),
        default=8750,
        help="port to listen on; 0 is any free port",
    )
    one = partial(at_least, 1)
    cores = os.cpu_count() or 1
    action.add_argument(
        "--at-once", type=one, default=cores, metavar="N", help="number of responses at a time"
    )


def run_sandbox(arguments: argparse.Namespace) -> int:
    if arguments.action == "serve":
        return _serve(arguments)
    return _run(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    """Serve until interrupted or terminated."""
    from distflow.rewards.code.score_client import TOKEN
    from distflow.rewards.code.score_server import ScoreServer
    from distflow.sandbox.local_sandbox import Sandbox

    address = (arguments.host, arguments.port)
    token = os.environ.get(TOKEN, "")
    with Sandbox() as sandbox, ScoreServer(sandbox, arguments.at_once, *address, token) as server:
        port = server.server_address[1]
        print(
            (
                f"sandbox at http://{arguments.host}:{port}, {arguments.at_once} responses at "
                f"once; {sandbox.level}"
            ),
            flush=True,
        )

        if server.token_file is not None:
            print(
                f"its password is in {server.token_file}; clients of this user find it there",
                flush=True,
            )

        with suppress(KeyboardInterrupt):
            server.serve_forever()

    return 0


def _run(arguments: argparse.Namespace) -> int:
    """Returns 0 if the program's exit status is 0. Its output goes to the same streams; the last
    line, on standard error, is ours."""
    from distflow.sandbox.local_sandbox import Sandbox

    code = _read(arguments.file)
    stdin = _read(arguments.stdin) if arguments.stdin else ""

    with Sandbox() as sandbox:
        ran = sandbox.run(code, stdin)
        level = sandbox.level

    sys.stdout.write(ran.stdout)
    sys.stdout.flush()
    sys.stderr.write(ran.stderr)

    cut = ""
    if ran.cut:
        cut = f"; only the first {sandbox.limits.output_bytes:,} bytes of each stream are shown"

    print(
        (
            f"{ran.status}: exit status {ran.exit_code} after {ran.seconds:.2f} s{cut}; sandbox: "
            f"{level}"
        ),
        file=sys.stderr,
    )
    return 0 if ran.status == "ok" else 1


def _read(name: str) -> str:
    """Read a program; bytes that are not UTF-8 reach it unchanged. Raises UserError."""
    path = Path(name)
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        raise UserError(": ".join([name, "; ".join(missing_path(path))])) from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
