"""Progress of what takes long while a run has no view: lines, in a terminal and elsewhere."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from distflow.observe.writing.live_view import duration

FIRST_S, MOST_S = 10.0, 60.0  # until the first line, and between two


@contextmanager
def lasting(
    say: Callable[[str], None], what: str, detail: Callable[[], str] = lambda: "", first_s: float = FIRST_S
) -> Iterator[None]:
    """While it is entered, `say` is called with `what`, the time so far and `detail()`: after 10 s, then ever more
    rarely."""
    started, ended = time.monotonic(), threading.Event()

    def report() -> None:
        wait = first_s
        while not ended.wait(wait):
            seconds = time.monotonic() - started
            with suppress(OSError):  # nobody reads any more, which the main thread finds out
                say(f"{what}: {duration(seconds)} so far{detail()}")
            wait = min(max(seconds, first_s), MOST_S)

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
