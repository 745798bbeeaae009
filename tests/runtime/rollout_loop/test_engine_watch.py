"""The engine's deadline: a hang is raised to all that wait, with stacks; slow, paused and stopped
engines live on."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

from distflow.data.sample import Segment
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream, WeightReceipt
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.engine_watch import Deadline, EngineHangs
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.scheduling.group_states import Version

REQUEST = GenerateRequest((1, 2, 3), (0, 1), SamplingParams(5), Stream(0, "train", 2, 7))
FIRST = Version(0, 0)


async def nothing() -> None:
    pass


async def for_ever() -> None:
    await asyncio.Event().wait()


@dataclass
class Engine:
    """A user's engine; what it does when asked is the test's."""

    who = "the server at http://here"
    does: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    version: Version = FIRST
    num_generated_tokens: int = 0

    async def _do(self, what: str) -> None:
        await self.does.get(what, nothing)()

    async def __aenter__(self) -> "Engine":
        await self._do("start")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._do("end")

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        await self._do("generate")
        return ()

    async def pause(self, release: bool = False) -> None:
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")

    async def hashes(self) -> dict[str, str]:
        await self._do("hashes")
        return {}

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]]
    ) -> WeightReceipt:
        await self._do("load_weights")
        return WeightReceipt(version)


def session_of(engine: Engine, timeout_s: float, stacks: Path | None = None) -> RolloutServices:
    # nobody asks for a tokenizer
    parts = Resources(None, (), {}, 0, rollout=engine)  # type: ignore[arg-type]
    return RolloutServices(parts, None, engine_deadline=Deadline(timeout_s, stacks))


def use(session: RolloutServices, what: str) -> None:
    """Ask the session's engine, through what everybody asks it by."""
    engine = session.resources.rollout
    assert engine is not None
    asked = {
        "generate": lambda: engine.generate(REQUEST),
        "pause": engine.pause,
        "resume": engine.resume,
        "hashes": engine.hashes,
        "load_weights": lambda: engine.load_weights(Version(0, 4), []),
    }
    session.call(asked[what]())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "generate",
            r"for 2 samples of row 7 \(train, epoch 2; a prompt of 3 tokens, up to 5 new ones\)",
        ),
        ("load_weights", "to load the weights of step 4"),
        ("pause", "to pause"),
        ("resume", "to resume"),
        ("hashes", "for hashes of its weights"),
        ("start", "to start"),
        ("end", "to end"),
    ],
)
def test_whoever_waits_is_told_what_hangs_since_when_and_where(tmp_path, what, told):
    stacks = tmp_path / "stacks.txt"
    said = (
        rf"Engine \(the server at http://here\) hangs: it was asked {told} at \d\d:\d\d:\d\d, and "
        r"for 0.2 s"
    )
    with (
        pytest.raises(EngineHangs, match=said) as raised,
        session_of(Engine({what: for_ever}), 0.2, stacks) as session,
    ):
        if what not in ("start", "end"):
            use(session, what)

    assert str(stacks) in str(raised.value) and "rollout.timeout_s" in str(raised.value)
    written = stacks.read_text()
    assert (
        ": rollout\n" in written and "MainThread" in written and "test_engine_watch.py" in written
    )
    assert stacks.stat().st_mode & 0o777 == 0o600


def test_a_thread_that_hangs_shows_its_own_line(tmp_path):
    release = threading.Event()

    async def in_a_thread() -> None:
        await asyncio.get_running_loop().run_in_executor(None, release.wait)

    with (
        pytest.raises(EngineHangs),
        session_of(Engine({"generate": in_a_thread}), 0.2, tmp_path / "s") as session,
    ):
        use(session, "generate")

    release.set()
    assert (
        "threading.py" in (tmp_path / "s").read_text() and "in wait" in (tmp_path / "s").read_text()
    )


def test_an_engine_that_is_slow_and_draws_tokens_lives():
    engine = Engine()

    async def slowly() -> None:
        for _ in range(20):
            await asyncio.sleep(0.05)
            engine.num_generated_tokens += 1

    engine.does["generate"] = slowly
    with session_of(engine, 0.3) as session:
        use(session, "generate")


def test_an_engine_that_answers_others_lives():
    durations = iter([1.0, *[0.1] * 10])

    async def sleeps() -> None:
        await asyncio.sleep(next(durations))

    async def asks(session: RolloutServices) -> None:
        engine = session.resources.rollout
        assert engine is not None
        long = asyncio.ensure_future(engine.generate(REQUEST))
        await asyncio.sleep(0)
        for _ in range(10):
            await engine.generate(REQUEST)
        await long

    with session_of(Engine({"generate": sleeps}), 0.3) as session:
        session.call(asks(session))


def test_a_paused_engine_owes_no_tokens_and_one_that_was_asked_nothing_no_answer():
    resumed = threading.Event()

    async def until_resumed() -> None:
        while not resumed.is_set():
            await asyncio.sleep(0.01)

    with session_of(Engine({"generate": until_resumed}), 0.2) as session:
        use(session, "pause")
        held = session.start(session.resources.rollout.generate(REQUEST))  # type: ignore[union-attr]
        time.sleep(0.6)
        resumed.set()
        use(session, "resume")
        held.result(20)
        time.sleep(0.6)
        use(session, "hashes")
