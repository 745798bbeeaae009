"""Several servers as one rollout engine: requests go to the server expected to finish first. If a
server dies, hangs or is late, its requests move to others, and it is restarted with the current
weights."""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import httpx
from torch import Tensor

from distflow.data.sample import Segment
from distflow.errors import TrustError
from distflow.rollout.engine import Activity, GenerateRequest, RequestLog, Stream, WeightReceipt
from distflow.rollout.engine_weights import check_version, stripe_hashes
from distflow.rollout.servers import http_engine
from distflow.rollout.servers.http_engine import (
    MOST_SERVERS,
    HttpEngine,
    ServerFailed,
    ServerLost,
    cancel,
)
from distflow.rollout.servers.server_process import WeightFiles
from distflow.scheduling.group_states import Version

T = TypeVar("T")

LEAST_DEADLINE_S: Final = 60.0
DEADLINE_FACTOR: Final = 10.0
"""A request may take this many times as long as expected from its tokens and its server's speed."""
_DECAY: Final = 0.8
"""The factor by which each measurement reduces the weight of earlier ones."""
_FORGET_S: Final = 60.0
"""An idle server's measured speed is forgotten after this time, so that it is tried again."""
_MOST_HOMES: Final = 10_000
_MOST_BACK_OFF_S: Final = 30.0
_FAILURES: Final = (ServerFailed, TrustError, httpx.HTTPError, OSError, *http_engine.MALFORMED)
"""Errors that a server restart may raise."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Server:
    """outstanding: tokens that it may still have to generate. tokens, seconds: of samples and their
    requests, decayed over time. failures: consecutive failed restarts."""

    engine: HttpEngine
    number: int
    outstanding: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    measured: float = 0.0
    restarts: int = 0
    moved: int = 0
    failures: int = 0
    why: str = ""
    is_lost: bool = False
    reads: Path | None = None
    task: "asyncio.Task[None] | None" = None

    def measure(self, tokens: int, seconds: float) -> None:
        self.tokens = _DECAY * self.tokens + tokens
        self.seconds = _DECAY * self.seconds + seconds
        self.measured = time.monotonic()

    @property
    def speed(self) -> float | None:
        """Tokens per second of a response; None before the first."""
        return max(self.tokens, 1.0) / self.seconds if self.seconds else None


class Fleet(AbstractAsyncContextManager["Fleet"]):
    """A `RolloutEngine`. A single server answers a whole request; if that server is lost, the whole
    request is sent to another, and the draws depend only on the request. Only servers with the
    newest weights get new requests, since the staleness bound counts from the version that the
    fleet reports.
    """

    def __init__(self, engines: Sequence[HttpEngine]) -> None:
        self._servers = [_Server(engine, number) for number, engine in enumerate(engines)]
        for engine in engines:
            engine.in_fleet = True
        self.version = engines[0].version
        self._files: WeightFiles | None = None  # for all servers
        self._served: WeightFiles | None = None  # loaded by at least one server
        self._folders = set[Path]()
        self._paused = False
        self._homes = OrderedDict[Stream, _Server]()
        self._clocks = dict[asyncio.Timeout, float]()
        self._activity = RequestLog()

    async def __aenter__(self) -> "Fleet":
        self._updating = asyncio.Lock()
        self._changed = asyncio.Event()
        async with AsyncExitStack() as entered:
            begun = (entered.enter_async_context(each.engine) for each in self._servers)
            found = await asyncio.gather(*begun, return_exceptions=True)
            if errors := [each for each in found if isinstance(each, BaseException)]:
                raise errors[0]
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        async with self._entered as ends:  # all tasks, whatever one raises
            for task in (each.task for each in self._servers if each.task is not None):
                ends.push_async_callback(cancel, task)

    @property
    def num_generated_tokens(self) -> int:
        return sum(each.engine.num_generated_tokens for each in self._servers)

    @property
    def repeats_draws(self) -> bool:
        return all(getattr(each.engine, "repeats_draws", True) for each in self._servers)

    def take_activity(self) -> list[Activity]:
        """The activities of all servers together; see `ActivityLog`."""
        return self._activity.take()

    def server_metrics(self) -> dict[str, float]:
        """The metrics of `observe/metrics.toml`; callable from any thread."""
        found = dict[str, float]()
        for each in self._servers:
            found[f"rollout_server/{each.number}/outstanding_tokens"] = each.outstanding
            found[f"rollout_server/{each.number}/tokens_per_s"] = each.speed or 0.0
            found[f"rollout_server/{each.number}/restarts"] = each.restarts
            found[f"rollout_server/{each.number}/moved_requests"] = each.moved
        return found

    # Requests.

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """See `HttpEngine.generate`. Raises ServerFailed if several servers failed at it, or none
        is available."""
        refused = set[_Server]()
        why = ""
        with self._activity.busy():
            for _ in range(MOST_SERVERS + len(self._servers) - 1):
                server = await self._choose(request, refused)
                try:
                    result = await self._ask(server, request)
                except ServerFailed as err:
                    why = str(err)
                    refused.add(server)
                    self._homes.pop(request.stream, None)
                    server.moved += 1
                    _log.warning("a request leaves server %d of the fleet: %s", server.number, why)
                else:
                    self._activity.responded(request, result)
                    return result
        raise ServerFailed(
            f"{len(refused)} servers of the fleet have failed on one request. The last: {why}"
        )

    async def _choose(self, request: GenerateRequest, refused: set[_Server]) -> _Server:
        """The server that had its group or earlier turns, if healthy, else the one expected to
        finish first."""
        await self._until(lambda: any(map(self._is_current, self._servers)))
        able = [each for each in self._servers if self._is_current(each)]
        able = [each for each in able if each not in refused] or able
        home = self._homes.get(request.stream)
        cost = _cost(request)
        chosen = (
            home
            if home in able
            else min(able, key=lambda each: (each.outstanding + cost) / self._speed(each))
        )
        self._homes[request.stream] = chosen
        self._homes.move_to_end(request.stream)
        if len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)
        return chosen

    async def _ask(self, server: _Server, request: GenerateRequest) -> tuple[Segment, ...]:
        number = server.engine.number_of_server
        began = time.monotonic()
        cost = _cost(request)
        server.outstanding += cost
        try:
            async with self._deadline(server, request):
                result = await server.engine.generate(request)
        except (ServerFailed, TimeoutError) as err:
            server.measure(0, time.monotonic() - began)
            if isinstance(err, ServerLost) and number == server.engine.number_of_server:
                self._lose(server, str(err))
            if isinstance(err, TimeoutError):
                raise ServerFailed(
                    f"{server.engine.who} is far slower than before, or does not answer"
                ) from None
            raise
        finally:
            server.outstanding -= cost
        server.measure(max(len(each.token_ids) for each in result), time.monotonic() - began)
        return result

    @asynccontextmanager
    async def _deadline(self, server: _Server, request: GenerateRequest) -> AsyncIterator[None]:
        """Raises TimeoutError at the deadline; the clock stops during a pause, and restarts with
        new weights."""
        limit = http_engine.CALL_S
        if server.speed is not None:
            limit = max(
                LEAST_DEADLINE_S, DEADLINE_FACTOR * request.params.max_tokens / server.speed
            )
        async with asyncio.timeout(None) as clock:
            self._clocks[clock] = limit
            self._wind_clocks({clock: limit})
            try:
                yield
            finally:
                del self._clocks[clock]

    def _wind_clocks(self, clocks: Mapping[asyncio.Timeout, float]) -> None:
        now = asyncio.get_running_loop().time()
        for clock, limit in clocks.items():
            if not clock.expired():  # else the request is being cancelled
                clock.reschedule(None if self._paused else now + limit)

    def _speed(self, server: _Server) -> float:
        """The measured speed, forgotten after some time, since only servers with requests are
        measured."""
        speeds = [speed for each in self._servers if (speed := each.speed) is not None]
        mean = sum(speeds) / len(speeds) if speeds else 1.0
        forgotten = (
            min((time.monotonic() - server.measured) / _FORGET_S, 1.0)
            if not server.outstanding
            else 0.0
        )
        return mean * forgotten + (server.speed or mean) * (1 - forgotten)

    # Servers.

    def _is_current(self, server: _Server) -> bool:
        """Whether the server may get requests."""
        return not server.is_lost and server.engine.holds(self._served)

    def _is_behind(self, server: _Server) -> bool:
        return not server.engine.holds(self._files)

    async def _until(self, holds: Callable[[], bool], due: float = math.inf) -> None:
        """Wait for a condition. Raises ServerFailed if all servers have failed too often."""
        while not holds() and (left := due - time.monotonic()) > 0:
            if all(each.failures >= MOST_SERVERS for each in self._servers):
                whys = "\n".join(f"  server {each.number}: {each.why}" for each in self._servers)
                raise ServerFailed(
                    f"no server of the fleet is available after {MOST_SERVERS} attempts each:\n"
                    f"{whys}"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(None if left == math.inf else left):
                    await self._changed.wait()

    def _note(self) -> None:
        """Wake whoever waits for a change of the servers."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _lose(self, server: _Server, why: str) -> None:
        """Move the server's requests elsewhere, and restart it."""
        if not server.is_lost:
            server.is_lost = True
            server.why = why
            server.engine.abandon()
            self._note()
        self._bring_back(server)

    def _bring_back(self, server: _Server) -> None:
        if server.task is None or server.task.done():
            server.task = asyncio.create_task(self._until_current(server))

    async def _until_current(self, server: _Server) -> None:
        """Restart the server if it is lost, and load the newest weights. Retries forever: someone
        may repair it."""
        while server.is_lost or self._is_behind(server):
            server.reads = self._files.folder if self._files is not None else None
            try:
                await self._step_towards(server)
                server.failures = 0
            except _FAILURES as err:
                server.failures += 1
                self._lose(server, f"{type(err).__name__}: {err}")
                _log.warning(
                    "server %d of the fleet (%s): %s", server.number, server.engine.who, server.why
                )
                self._note()
                await asyncio.sleep(
                    min(http_engine.BACK_OFF_S * 2**server.failures, _MOST_BACK_OFF_S)
                )
            finally:
                server.reads = None
                self._drop_old()
            self._note()

    async def _step_towards(self, server: _Server) -> None:
        engine = server.engine
        files = self._files
        if server.is_lost:
            await engine.restart(files, server.why)
            server.tokens = server.seconds = 0.0
            server.restarts += 1
            server.is_lost = False
            # the server may have missed it
            await (engine.pause() if self._paused else engine.resume())
            if files is None:
                await engine.load_weights(self.version, None)
        elif files is not None:
            await engine.load_files(files)
        if files is not None and files == self._files:
            self._served = files
            self.version = files.version

    async def _all(self, work: Callable[[HttpEngine], Awaitable[T]]) -> list[T]:
        """Run `work` on all healthy servers; those that fail are lost."""

        async def one(server: _Server) -> list[T]:
            number = server.engine.number_of_server
            try:
                return [await work(server.engine)]
            except ServerFailed as err:
                if number == server.engine.number_of_server:
                    self._lose(server, str(err))
                return []

        found = await asyncio.gather(*(one(each) for each in self._servers if not each.is_lost))
        return [result for results in found for result in results]

    async def pause(self, release: bool = False) -> None:
        """See `RolloutEngine`. A lost server restarts paused."""
        async with self._updating:
            self._paused = True
            self._wind_clocks(self._clocks)
            await self._all(lambda engine: engine.pause(release))
        self._activity.stopped()

    async def resume(self) -> None:
        async with self._updating:
            self._paused = False
            await self._all(lambda engine: engine.resume())
            self._wind_clocks(self._clocks)

    # Weights.

    async def hashes(self) -> dict[str, str]:
        """The hashes of servers with the current version. Raises TrustError if they differ."""
        found = list[dict[str, str]]()
        while not found:
            await self._until(lambda: any(map(self._is_current, self._servers)))
            found = await self._all(self._hashes_of)
            found = [each for each in found if each]
        if any(each != found[0] for each in found):
            raise TrustError("the servers of a fleet have different weights of one version")
        return found[0]

    async def _hashes_of(self, engine: HttpEngine) -> dict[str, str]:
        return await engine.hashes() if engine.holds(self._served) else {}

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """See `RolloutEngine`. One server must have loaded them; other healthy ones get as much
        time again."""
        check_version(self.version, version)
        async with self._updating:
            if weights is not None:
                self._files = await asyncio.to_thread(self._write, version, weights)
                self._folders.add(self._files.folder)
            elif self._files is not None:
                self._files = replace(self._files, version=version)
            else:
                await self._all(lambda engine: engine.load_weights(version, None))
                self.version = version
            began = time.monotonic()
            for server in self._servers:
                self._bring_back(server)
            await self._until(lambda: self._served == self._files)
            due = time.monotonic() + (time.monotonic() - began) + http_engine.SILENT_S
            await self._until(
                lambda: (
                    not any(self._is_behind(each) for each in self._servers if not each.is_lost)
                ),
                due,
            )
            self._wind_clocks(self._clocks)
        if weights is None or self._files is None:
            return WeightReceipt(version, version_only=True)
        return WeightReceipt(version, dict(self._files.hashes))

    def _write(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> WeightFiles:
        hashes = dict[str, str]()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                hashes.update(stripe_hashes([(name, tensor)]))
                yield name, tensor

        engine = self._servers[0].engine
        return WeightFiles(version, engine.write(noted()), hashes)

    def _drop_old(self) -> None:
        """Drop folders of weights that no server reads."""
        used = {each.reads for each in self._servers} | {
            self._files.folder if self._files is not None else None
        }
        for folder in self._folders - used:
            self._servers[0].engine.folder.drop(folder)
            self._folders.discard(folder)


def _cost(request: GenerateRequest) -> int:
    """The most tokens that a server has to process for the request."""
    return len(request.prompt_ids) + len(request.samples) * request.params.max_tokens
