"""One or more servers as a rollout engine: a request goes to the server with the fewest outstanding
tokens. If a server dies or hangs, its requests move to others, and it is restarted with the current
weights."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, TypeVar

import httpx
from torch import Tensor

from distflow.data.sample import Segment
from distflow.errors import TrustError
from distflow.rollout.engine import Activity, GenerateRequest, RequestLog, Stream, WeightReceipt
from distflow.rollout.engine_weights import check_version
from distflow.rollout.servers import http_engine
from distflow.rollout.servers.http_engine import HttpEngine, ServerFailed, ServerLost, cancel
from distflow.rollout.servers.server_process import WeightFiles
from distflow.scheduling.group_states import Version

T = TypeVar("T")

MOST_TRIES: Final = 3
"""Servers tried for one request, and failed restarts of each server before the run ends."""
_MOST_HOMES: Final = 10_000
_MOST_BACK_OFF_S: Final = 30.0
_FAILURES: Final = (ServerFailed, TrustError, httpx.HTTPError, OSError, *http_engine.MALFORMED)
"""Errors that a server restart may raise."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Server:
    engine: HttpEngine
    number: int
    outstanding: int = 0
    """Tokens that it may still have to generate."""
    restarts: int = 0
    tokens_per_s: float = 0.0
    """Of one response; the mean of the latest requests."""
    moved: int = 0
    """Requests that went to other servers."""
    failures: int = 0
    """Consecutive failed restarts."""
    why: str = ""
    """It was lost, the last time."""
    task: "asyncio.Task[None] | None" = None
    """Restarts it; None while the server is well and has the newest weights."""
    watch: "asyncio.Task[None] | None" = None
    """Finds that it hangs."""


class Fleet(AbstractAsyncContextManager["Fleet"]):
    """A `RolloutEngine`. A single server answers a whole request; if that server is lost, the whole
    request is sent to another or to the restarted one, and the draws depend only on the request.
    Only servers with the newest weights get requests, since the staleness bound counts from the
    version that the fleet reports.
    """

    def __init__(self, engines: Sequence[HttpEngine]) -> None:
        self._servers = [_Server(engine, number) for number, engine in enumerate(engines)]
        self.version = engines[0].version
        self._files: WeightFiles | None = None  # for all servers
        self._paused = False
        self._homes = dict[Stream, _Server]()
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

        for server in self._servers:
            server.watch = asyncio.create_task(self._watch(server))
        return self

    async def __aexit__(self, *exception: object) -> None:
        async with self._entered as ends:  # all tasks, whatever one raises
            for server in self._servers:
                for task in (server.task, server.watch):
                    if task is not None:
                        ends.push_async_callback(cancel, task)

    @property
    def who(self) -> str:
        """The servers, for messages."""
        return ", ".join(dict.fromkeys(each.engine.who for each in self._servers))

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
            found[f"rollout_server/{each.number}/tokens_per_s"] = each.tokens_per_s
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
            for _ in range(MOST_TRIES + len(self._servers) - 1):
                server = await self._choose(request, refused)
                try:
                    result = await self._ask(server, request)
                except ServerFailed as err:
                    refused.add(server)
                    if len(refused) == len(self._servers) and not isinstance(err, ServerLost):
                        raise
                    why = str(err)
                    continue

                self._activity.responded(request, result)
                return result

        raise ServerFailed(
            f"{len(refused)} servers of the fleet have failed on one request. The last: {why}"
        )

    async def _ask(self, server: _Server, request: GenerateRequest) -> tuple[Segment, ...]:
        """The server's responses. A server that is lost meanwhile is restarted. Raises
        ServerFailed."""
        cost = len(request.prompt_ids) + len(request.samples) * request.params.max_tokens
        number = server.engine.number_of_server
        began = time.monotonic()
        server.outstanding += cost

        try:
            result = await server.engine.generate(request)
        except ServerFailed as err:
            self._homes.pop(request.stream, None)
            server.moved += 1
            _log.warning("a request leaves server %d of the fleet: %s", server.number, err)
            if isinstance(err, ServerLost) and number == server.engine.number_of_server:
                self._lose(server, str(err))  # unless it has been restarted since
            raise
        finally:
            server.outstanding -= cost

        longest = max(len(each.token_ids) for each in result)
        speed = longest / (time.monotonic() - began)
        server.tokens_per_s += 0.2 * (speed - server.tokens_per_s)
        return result

    async def _choose(self, request: GenerateRequest, refused: set[_Server]) -> _Server:
        """The server that had its group or earlier turns, if healthy, else the one with the fewest
        outstanding tokens."""
        able = await self._able()
        able = [each for each in able if each not in refused] or able
        chosen = self._homes.get(request.stream)
        if chosen is None or chosen not in able:
            chosen = min(able, key=lambda each: each.outstanding)
        if len(self._homes) > _MOST_HOMES:
            self._homes.clear()  # of groups that have mostly ended
        self._homes[request.stream] = chosen

        return chosen

    # Servers.

    async def _able(self) -> list[_Server]:
        """The healthy servers, once there is one. Raises ServerFailed if all have failed too
        often."""
        while not (able := [each for each in self._servers if each.task is None]):
            if all(each.failures >= MOST_TRIES for each in self._servers):
                whys = "\n".join(f"  server {each.number}: {each.why}" for each in self._servers)
                raise ServerFailed(
                    f"no server of the fleet is available after {MOST_TRIES} attempts each:\n{whys}"
                )
            await self._changed.wait()

        return able

    def _wake(self) -> None:
        """Wake whoever waits for a change of the servers."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _lose(self, server: _Server, why: str) -> None:
        """Move the server's requests elsewhere, and restart it."""
        if server.task is None:
            _log.warning("server %d of the fleet is restarted: %s", server.number, why)
            server.why = why
            server.engine.abandon()
            server.task = asyncio.create_task(self._bring_back(server))
            self._wake()

    async def _watch(self, server: _Server) -> None:
        """Look at a server every second until the end, and restart it if it hangs. A server that is
        being restarted is left alone."""
        while True:
            await asyncio.sleep(http_engine.LOOKS_EVERY_S)
            number = server.engine.number_of_server
            if server.task is not None or not await server.engine.is_hanging():
                continue
            if number == server.engine.number_of_server:
                self._lose(server, f"{server.engine.who} did not respond")

    async def _bring_back(self, server: _Server) -> None:
        """Restart the server, with the newest weights. Retries forever: someone may repair it."""
        while True:
            try:
                await server.engine.restart()
                if self._files is not None:  # the others are not held up meanwhile
                    await server.engine.load(self._files)

                async with self._updating:
                    await self._catch_up(server.engine)
                    server.restarts += 1
                    server.failures = 0
                    server.task = None
                    self._wake()

                return
            except _FAILURES as err:
                server.failures += 1
                server.why = f"{type(err).__name__}: {err}"
                _log.warning(
                    "server %d of the fleet (%s): %s", server.number, server.engine.who, server.why
                )
                self._wake()
                await asyncio.sleep(
                    min(http_engine.BACK_OFF_S * 2**server.failures, _MOST_BACK_OFF_S)
                )

    async def _catch_up(self, engine: HttpEngine) -> None:
        """Have a restarted server do what the others did meanwhile."""
        await self._load(engine, self.version)
        if self._paused:
            await engine.pause()
        else:
            await engine.resume()

    async def _load(self, engine: HttpEngine, version: Version) -> None:
        if self._files is not None:
            await engine.load(self._files)
        else:
            await engine.rename(version)

    async def _all(self, work: Callable[[HttpEngine], Awaitable[T]]) -> list[T]:
        """Run `work` on all healthy servers; those that fail are lost."""

        async def one(server: _Server) -> list[T]:
            try:
                return [await work(server.engine)]
            except _FAILURES as err:
                self._lose(server, f"{type(err).__name__}: {err}")
                return []

        found = await asyncio.gather(*(one(each) for each in self._servers if each.task is None))
        return list(chain.from_iterable(found))

    async def pause(self, release: bool = False) -> None:
        """See `RolloutEngine`. A lost server restarts paused."""
        async with self._updating:
            self._paused = True
            await self._all(lambda engine: engine.pause(release))
        self._activity.stopped()

    async def resume(self) -> None:
        async with self._updating:
            self._paused = False
            await self._all(lambda engine: engine.resume())

    # Weights.

    async def hashes(self) -> dict[str, str]:
        """The hashes of the healthy servers. Raises TrustError if they differ, ServerFailed if none
        has any."""
        for _ in range(MOST_TRIES):
            await self._able()
            found = await self._all(lambda engine: engine.hashes())
            if found:
                break
        else:
            whys = "; ".join(each.why for each in self._servers)
            raise ServerFailed(f"no server of the fleet reports the hashes of its weights: {whys}")

        if any(each != found[0] for each in found):
            raise TrustError("the servers of a fleet have different weights of one version")
        return found[0]

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        """See `RolloutEngine`. One server must have loaded them; others that fail are restarted."""
        check_version(self.version, version)
        async with self._updating:
            before = self._files
            keeper = self._servers[0].engine

            if weights is not None:
                self._files = await asyncio.to_thread(keeper.write, version, weights)
            elif before is not None:
                self._files = replace(before, version=version)

            await self._all(lambda engine: self._load(engine, version))
            self.version = version  # not before: groups are admitted by it

            if weights is not None and before is not None:
                # a server that restarts from it meanwhile fails, and does so again
                keeper.drop(before)

        await self._able()
        if weights is None or self._files is None:
            return WeightReceipt(version, version_only=True)
        return WeightReceipt(version, dict(self._files.hashes))
