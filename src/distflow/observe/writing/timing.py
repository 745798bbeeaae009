"""Where the time of a step goes: named phases that add up to the step, spans for the run's folder,
and who waits for what, on whom and since when. Also progress lines for slow operations while a run
has no view."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass


class PhaseTimer:
    """Times the phases of one thread: `with phases("rollout"): ...`, then `finish_step()` once per
    step.

    Time in an inner phase does not count for the outer one, so the phases and `timing_s/other` add
    up to `timing_s/step`; time between two steps belongs to the next one. on_phase: called for
    every phase when it ends, with its start and end as `time.time()`, and its name. on_change:
    called with the phase that runs from now on (after an inner one the outer one, or "other"), and
    the seconds that it has run. on_charge: called at each phase boundary with the phase that ran
    until then ("other" if none did).
    """

    def __init__(
        self,
        on_phase: Callable[[float, float, str], None] | None = None,
        on_change: Callable[[str, float], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_charge: Callable[[str], None] | None = None,
    ):
        self._on_phase = on_phase
        self._on_change = on_change
        self._on_charge = on_charge
        self._clock = clock
        self._thread = threading.get_ident()
        self._open: list[tuple[str, float]] = []  # names and start times
        self._seconds: dict[str, float] = {}
        self._since = self._step_start = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`; a phase that ends by an exception is charged too."""
        assert name not in ("step", "other"), f"the phase name {name!r} is taken"
        assert threading.get_ident() == self._thread, (
            "phases of another thread would be counted twice"
        )

        # the span includes the measurement at its beginning
        entered = self._clock()
        wall_start = time.time()
        start = self._charge()
        self._open.append((name, start))
        if self._on_change:
            self._on_change(name, 0.0)

        try:
            yield
        finally:
            end = self._charge()
            self._open.pop()
            if self._on_change:
                self._on_change(self.now, end - self._open[-1][1] if self._open else 0.0)

            if self._on_phase:
                # The wall clock may be set back while a phase runs, but its length is never
                # negative.
                self._on_phase(wall_start, wall_start + end - entered, name)

    @property
    def now(self) -> str:
        """The innermost running phase; callable from any thread."""
        return self._open[-1][0] if self._open else "other"

    def finish_step(self) -> dict[str, float]:
        """The `timing_s/*` metrics in seconds since the last call; starts the next step."""
        assert not self._open, f"the step ends inside the phase {self.now!r}"
        now = self._charge()
        other = self._seconds.pop("other", 0.0)
        seconds = {**self._seconds, "other": other, "step": now - self._step_start}
        self._seconds = {}
        self._step_start = now
        return {f"timing_s/{name}": value for name, value in seconds.items()}

    def _charge(self) -> float:
        """At a phase boundary: charge the time since the last one, including the memory
        measurement, to the phase that ran. Returns the clock."""
        name = self.now
        if self._on_charge:
            self._on_charge(name)
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
        return now


def duration(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    whole = max(int(seconds), 0)
    hours = whole // 3600
    minutes = whole // 60 % 60
    rest = whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


@contextmanager
def lasting(
    say: Callable[[str], None],
    what: str,
    detail: Callable[[], str] = lambda: "",
    first_s: float = 10.0,
) -> Iterator[None]:
    """Inside, `say` is called with `what`, the time so far and `detail()`: after 10 s, then ever
    more rarely, at least once a minute."""
    started, ended = time.monotonic(), threading.Event()

    def report() -> None:
        wait = first_s
        while not ended.wait(wait):
            seconds = time.monotonic() - started
            with suppress(OSError):  # nobody reads any more, which the main thread will notice
                say(f"{what}: {duration(seconds)} so far{detail()}")
            wait = min(max(seconds, first_s), 60.0)

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()

    try:
        yield
    finally:
        ended.set()
        reporter.join()


DATA = "data"
ENGINE = "rollout engine"
OTHER_GROUPS = "other groups"
RANKS = "other ranks"
REWARDS = "reward functions"
"""For whom a wait may be, where readers of the spans distinguish it."""

COLLECTIVE = "a collective"


@dataclass(frozen=True, eq=False)
class Wait:
    """A wait. who: the waiting loop. what: for what. on: for whom. since: `time.time()`. group_id:
    of the prompt group that waits, if one does."""

    who: str
    what: str
    on: str
    since: float
    group_id: int | None = None

    def seconds(self) -> float:
        return time.time() - self.since

    def __str__(self) -> str:
        return f"{self.who} has waited {self.seconds():.0f} s for {self.what} (on: {self.on})"


class Waits:
    """Records every wait of a loop: `with waits("training", "step 3", on="rollout"): ...`.

    on_end: called for each wait, with its end, on the thread that waited. It may be slow: it runs
    outside the lock, and does not delay others.
    """

    def __init__(self, on_end: Callable[[Wait, float], None] = lambda wait, ended: None) -> None:
        self._on_end = on_end
        self._now: set[Wait] = set()
        self._lock = threading.Lock()  # the trainer and the asyncio thread wait at the same time

    @contextmanager
    def __call__(self, who: str, what: str, on: str) -> Iterator[None]:
        group = running_group.get()
        wait = Wait(who, what, on, time.time(), None if group is None else group[1])
        with self._lock:
            self._now.add(wait)

        try:
            yield
        finally:
            with self._lock:
                self._now.discard(wait)
            self._on_end(wait, time.time())

    def now(self) -> list[Wait]:
        """The current waits, the longest first."""
        with self._lock:
            return sorted(self._now, key=lambda wait: wait.since)


running_group: ContextVar[tuple[Waits, int] | None] = ContextVar("running_group", default=None)
"""Where to record the waits of the running task's prompt group, and its id."""


@contextmanager
def group_waits(what: str, on: str) -> Iterator[None]:
    """Record a wait of the running prompt group; nothing if none runs, as in a validation, or `on`
    is empty."""
    group = running_group.get()
    with group[0]("rollout", what, on) if group and on else nullcontext():
        yield
