"""`distflow dashboard`: a folder of runs in a browser, in pages made of the parts of a report. It
answers GET alone, reads files of the folder alone, and asks nothing of a run, so that it works on a
run that crashed. `distflow watch`: a run as its terminal shows it."""

import argparse
import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distflow import __version__, http_guard
from distflow.commands.arguments_and_run_folders import (
    RUNS,
    add_run_argument,
    at_least,
    find_run,
    listen,
)
from distflow.errors import UserError
from distflow.http_guard import Guard, is_loopback, new_token
from distflow.import_target import check_server_packages
from distflow.observe.crash_safe_files import encode, read_object, to_number
from distflow.observe.report.build import POLICY_OF_SERVED_PAGES, served_files, served_page
from distflow.observe.report.summary_sentences import PROBLEM_KINDS, status
from distflow.observe.run_reader import (
    Event,
    GrowingMetrics,
    MetricsRecord,
    read_events,
    read_timeline,
)
from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.run_folder import writer_of

if TYPE_CHECKING:
    from distflow.commands.dashboard_page_data import Dashboard

_HEADERS = {
    "content-security-policy": f"{POLICY_OF_SERVED_PAGES}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_BY_SCRIPTS = frozenset(f"/api/{part}" for part in ("sql", "what_if", "groups"))
"""What takes more than reading files."""


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
    Page("time", "Time", "Where does the time of the devices go?", "t"),
    Page("trust", "Trust", "Can I believe it?", "u"),
    Page("compare", "Compare", "What differs?", "c", "several"),
    Page("sql", "SQL", "Anything else?", "q", "several"),
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
        Dashboard(folder) as dashboard,
        suppress(KeyboardInterrupt),
    ):
        port = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        say(f"distflow {__version__} · {escape_control(str(folder), one_line=True)}")
        say(f"http://{shown}:{port}/?token={token}  (Ctrl-C ends)")
        if is_loopback(host):
            say(
                f"from another machine: ssh -L {port}:{shown}:{port} {socket.gethostname()}, then "
                "the same address"
            )
        threading.Thread(target=dashboard.read_ahead, daemon=True).start()
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
        pages = [each._asdict() for each in PAGES]
        data = {
            "api": "/api/",
            "token": token,
            "page": page.name,
            "pages": pages,
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
        return refuse(
            request,
            UserError(f"{type(error).__name__}: {error}; the terminal has the traceback"),
            500,
        )

    routes = [
        routing.Route(f"/{page.name if page.of_run else ''}", partial(show_page, page))
        for page in PAGES
    ]
    routes += [routing.Route("/static/{name}", show_file), routing.Route("/api/{part}", give)]
    handlers = {404: missing, 405: no_method, UserError: refuse, Exception: fail}
    return starlette.Starlette(routes=routes, exception_handlers=handlers)


_WATCH_EVERY_S = 2.0


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--once", action="store_true", help="show the run as it is now, and end")


def run_watch(arguments: argparse.Namespace) -> int:
    """Show a run that another process writes, until its end."""
    watched = _Watched(find_run(arguments.run_dir))
    try:
        while not watched.look() and not arguments.once:
            watched.wait()
    finally:
        watched.view.close()
    return 0


class _Watched:
    """A run that another process writes. Its restarts are followed, in place or by another
    command."""

    def __init__(self, run_dir: Path) -> None:
        from distflow.observe.writing.terminal_view import TerminalView

        run, plan = (read_object(run_dir / name, run_dir) for name in ("run.json", "plan.json"))
        total = run.get("total_steps")
        ranks = plan.get("ranks")
        generates = not isinstance(ranks, list) or '"rollout"' in json.dumps(ranks)
        title = str(run.get("experiment") or run_dir)
        num_steps = total if isinstance(total, int) else 0
        self._run_dir = run_dir
        self._metrics = GrowingMetrics(run_dir)
        self._shown = set[tuple[int, int, str]]()
        self._num_events = 0
        self._was_written = True
        self._restart = 0
        records = self._metrics.read(read_timeline(run_dir))
        self._time = records[0].t if records else 0.0  # of what is shown; 0: now
        self.view = TerminalView(
            title, num_steps, clock=lambda: self._time or time.time(), generates=generates
        )
        self.view.phase("")

    def look(self) -> bool:
        """Show what is new. Returns whether the run is over."""
        # before its files are read, so that none is missed
        is_written = writer_of(self._run_dir) is not None
        events = read_events(self._run_dir)
        records = self._metrics.read(read_timeline(self._run_dir))
        new = [each for each in records if (each.restart, each.step, each.kind) not in self._shown]
        self._shown.update((each.restart, each.step, each.kind) for each in new)
        parts: tuple[Sequence[Event | MetricsRecord], ...] = (events[self._num_events :], new)
        ordered = [
            pair
            for part in parts
            for pair in zip(accumulate((e.t for e in part), max), part, strict=True)
        ]
        # a clock may step back within a part
        for self._time, each in sorted(ordered, key=lambda pair: pair[0]):
            if isinstance(each, Event):
                self._tell(each)
            else:
                self._log(each)
        self._num_events = len(events)
        has_ended = status(events)["word"] != "no end yet"
        if self._was_written and not is_written and not has_ended:
            said = "no process on this machine writes to the run: it was killed, or runs elsewhere"
            self.view.note("warning", f"{said}; it is shown further if it goes on (Ctrl-C ends)")
        self._was_written = is_written
        return has_ended and not is_written

    def wait(self) -> None:
        self._time = 0.0
        time.sleep(_WATCH_EVERY_S)

    def _log(self, record: MetricsRecord) -> None:
        if record.restart > self._restart:
            self._restart = record.restart
            self.view.rewind(record.step - 1)
        self.view.log(record.step, record.values)

    def _tell(self, event: Event) -> None:
        if event.kind == "start" and event.restart:
            resumed_at = event.fields.get("resumed_at")
            self.view.note(
                "info",
                f"restart {event.restart}, from step {max(to_number(resumed_at) or 0, 0):.0f}",
            )
        elif event.kind in PROBLEM_KINDS and not event.rolled_back:
            self.view.note(event.kind, event.message)
