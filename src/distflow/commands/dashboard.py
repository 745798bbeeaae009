"""`distflow dashboard`: a folder of runs in a browser, in pages made of the parts of a report. It
answers GET alone, reads files of the folder alone, and asks nothing of a run, so that it works on a
run that crashed."""

import argparse
import socket
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distflow import __version__, http_guard
from distflow.commands.arguments import at_least, listen
from distflow.commands.find_run import RUNS
from distflow.errors import UserError
from distflow.http_guard import Guard, is_loopback, new_token
from distflow.import_target import check_server_packages
from distflow.observe.crash_safe_files import encode
from distflow.observe.report.page import POLICY_OF_SERVED_PAGES, served_files, served_page
from distflow.observe.sanitized_output import escape_control

if TYPE_CHECKING:
    from distflow.commands.dashboard_page_data import Dashboard

_HEADERS = {
    "content-security-policy": f"{POLICY_OF_SERVED_PAGES}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_BY_SCRIPTS = frozenset(("/api/samples",))
"""What takes long: it reads many files."""


class Page(NamedTuple):
    """question: that the page answers. key: after "g". of_run: whether it needs one run, or one or
    several."""

    name: str
    title: str
    question: str
    key: str
    of_run: str = "one"


PAGES = (
    Page("runs", "Runs", "Which run?", "r", ""),
    Page("overview", "Overview", "Is it well?", "o"),
    Page("step", "Step", "What happened in this step?", "s"),
    Page("samples", "Samples", "What does it write?", "a"),
    Page("sample", "Sample", "Why this reward?", "e"),
    Page("compare", "Compare", "What differs?", "c", "several"),
)


def add_dashboard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        default=RUNS,
        type=Path,
        metavar="DIR",
        help="a folder of runs, or one run's folder",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port",
        type=partial(at_least, 0),
        default=6446,
        help="port to listen on; 0 is any free port",
    )


def run_dashboard(arguments: argparse.Namespace) -> int:
    """Serve until interrupted or terminated."""
    say = partial(print, flush=True)
    folder = arguments.folder.expanduser()
    host = arguments.host
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the folder that contains the runs")

    from distflow.commands.dashboard_page_data import Dashboard

    check_server_packages("`distflow dashboard`", "ui")

    token = new_token()
    with (
        listen(host, arguments.port) as listening,
        suppress(KeyboardInterrupt),
    ):
        dashboard = Dashboard(folder)
        port = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        say(f"distflow {__version__} · {escape_control(str(folder), one_line=True)}")
        say(f"http://{shown}:{port}/?token={token}  (Ctrl-C ends)")

        if is_loopback(host):
            say(
                f"from another machine: ssh -L {port}:{shown}:{port} {socket.gethostname()}, then "
                "the same address"
            )

        make_server(dashboard, host, token).run([listening])

    return 0


def make_server(dashboard: "Dashboard", host: str, token: str) -> Any:
    """A server of uvicorn, to be run on a socket that listens on the host."""
    guard = Guard(host, token, cookie="distflow_dashboard", by_scripts=_BY_SCRIPTS)
    return http_guard.make_server(
        make_app(dashboard, token), guard, _HEADERS.items(), stops_within_s=1
    )


def make_app(dashboard: "Dashboard", token: str) -> Any:
    """The Starlette application of the pages, their files, and the answers that their scripts ask
    for. token: for the scripts."""
    starlette = import_module("starlette.applications")
    routing = import_module("starlette.routing")
    answer = import_module("starlette.responses").Response
    served = served_files()

    def respond(body: bytes, kind: str, status: int = 200) -> Any:
        return answer(body, status, _HEADERS, f"{kind}; charset=utf-8")

    def show_page(page: Page, request: Any) -> Any:
        runs = request.query_params.getlist("run")
        data = {
            "api": "/api/",
            "token": token,
            "page": page.name,
            "pages": [known._asdict() for known in PAGES],
            **dashboard.frame(runs, page.of_run),
        }

        return respond(served_page(data, ", ".join(data["runs"]) or "Runs"), "text/html")

    def show_file(request: Any) -> Any:
        name = request.path_params["name"]
        if name not in served:
            return missing(request, None)
        return respond(served[name], "text/css" if name.endswith(".css") else "text/javascript")

    def give(request: Any) -> Any:
        query = request.query_params
        content = dashboard.answer(request.path_params["part"], query.getlist("run"), dict(query))
        return respond(encode(content), "application/json")

    def missing(request: Any, error: Exception | None) -> Any:
        text = (
            f"There is no page {request.url.path}: the pages are "
            f"{', '.join(page.title for page in PAGES)}."
        )
        return refuse(request, UserError(text), 404)

    def no_method(request: Any, error: Exception) -> Any:
        return refuse(request, UserError("This dashboard only shows: it answers GET alone."), 405)

    def refuse(request: Any, error: Exception, status: int = 400) -> Any:
        if request.url.path.startswith("/api/"):
            return respond(encode({"error": str(error)}), "application/json", status)
        return respond(f"{escape_control(str(error))}\n".encode(), "text/plain", status)

    def fail(request: Any, error: Exception) -> Any:
        text = f"{type(error).__name__}: {error}; the terminal has the traceback"
        return refuse(request, UserError(text), 500)

    routes = [routing.Route("/static/{name}", show_file), routing.Route("/api/{part}", give)]
    for page in PAGES:
        path = f"/{page.name}" if page.of_run else "/"
        routes.append(routing.Route(path, partial(show_page, page)))

    handlers = {404: missing, 405: no_method, UserError: refuse, Exception: fail}

    return starlette.Starlette(routes=routes, exception_handlers=handlers)
