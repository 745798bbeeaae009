"""Worker processes that hold the simulators of a run's episodes. A worker executes one chunk of one episode at a time;
one that dies or is overdue is replaced, and its episodes fail."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from distflow.environments.simulators import protocol
from distflow.environments.simulators.protocol import Observation, from_json
from distflow.environments.user_process import CallFailed, ProcessEnded, ProcessServer, UserProcess
from distflow.errors import UserError


@dataclass(eq=False)
class _Worker:
    """A process, once it has started, and the number of its episodes. is_gone: it was killed."""

    process: UserProcess | None = None
    num_episodes: int = 0
    is_gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SimulatorPool:
    """Workers with an env each, see `SimulatorHost`. timeout_s: of each `reset`, and of each chunk."""

    def __init__(self, env: str, options: Mapping[str, Any], num_workers: int, timeout_s: float) -> None:
        """Raises UserError if the env cannot be made, or `reset` does not repeat a state."""
        self._server = ProcessServer(f"{protocol.__name__}:SimulatorHost", {"env": env, "options": dict(options)})
        self.close = self._server.close
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._workers, self._keys = list[_Worker](), itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_replaced = 0
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may run a loop
            failed = thread.submit(asyncio.run, self._check()).result()
        if failed:
            self.close()
            raise UserError(f"the simulator '{env}' {failed}")

    async def begin(self, seed: int, options: Mapping[str, Any]) -> "Episode":
        """Begin an episode in the worker that has the fewest. Raises CallFailed."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._workers = loop, [_Worker() for _ in range(self._num_workers)]
        number = min(range(self._num_workers), key=lambda number: self._workers[number].num_episodes)
        if self._workers[number].is_gone:
            self._workers[number] = _Worker()
            self.num_replaced += 1
        episode = Episode(self, self._workers[number], str(next(self._keys)))
        try:
            episode.seen = from_json(await episode.call("begin", seed=seed, options=dict(options)))
        except (CallFailed, asyncio.CancelledError):
            episode.leave()
            raise
        return episode

    async def call(self, worker: _Worker, method: str, **arguments: Any) -> Any:
        """The result of the host's method. Raises CallFailed, ProcessEnded."""
        async with worker.lock:
            if worker.is_gone:
                raise ProcessEnded("its worker was replaced, because the simulator of another episode died or hung")
            if worker.process is None:
                worker.process = await self._server.fork("simulator", next(self._keys))
            try:
                return await worker.process.call(method, self._timeout_s, **arguments)
            except ProcessEnded:
                worker.is_gone, worker.num_episodes = True, 0
                raise
            except asyncio.CancelledError:  # its answer would be taken for the next call's
                worker.is_gone, worker.num_episodes = True, 0
                worker.process.close()
                raise

    async def _check(self) -> str:
        """Why the env cannot be used; empty if it can."""
        process = await self._server.fork("check")
        try:
            differing = await process.call("repeats", 4 * self._timeout_s)
        except CallFailed as error:
            return f"cannot be used: {error}"
        finally:
            process.close()
        why = "has another state after reset with the same seed and options: derive all that is random from the seed"
        return f"{why} ({differing} differs)" if differing else ""


class Episode:
    """An episode in a worker. seen: its last observation."""

    def __init__(self, pool: SimulatorPool, worker: _Worker, key: str) -> None:
        self._pool, self._worker, self._key = pool, worker, key
        self.seen = Observation()
        worker.num_episodes += 1
        self._has_left = False

    async def call(self, method: str, **arguments: Any) -> Any:
        return await self._pool.call(self._worker, method, key=self._key, **arguments)

    async def step(self, actions: Sequence[Sequence[float]]) -> dict[str, Any]:
        """`ChunkResult` by name. Raises CallFailed."""
        result: dict[str, Any] = await self.call("act", actions=[[*map(float, action)] for action in actions])
        self.seen = from_json(result["observation"])
        return result

    async def close(self) -> None:
        """Return the simulator."""
        self.leave()
        with suppress(CallFailed):
            await self.call("end")

    def leave(self) -> None:
        if not self._has_left and not self._worker.is_gone:
            self._worker.num_episodes -= 1
        self._has_left = True
