"""Worker processes that hold the simulators of a run's episodes. A worker executes one chunk of one
episode at a time; one that dies or is overdue is replaced, the episode that caused it fails, and
its others are played again."""

import asyncio
import itertools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from distflow.acting import simulator_host
from distflow.acting.simulator import Observation, from_json
from distflow.environments.user_code_process import (
    CallFailed,
    ProcessEnded,
    ProcessServer,
    ServerLost,
    UserProcess,
)
from distflow.errors import UserError

_OF_GL = re.compile("EGL|OpenGL|OSMesa|GLFW|glGet|MUJOCO_GL|DISPLAY", re.IGNORECASE)
_RENDERING = (
    ". It cannot render: set actor_rollout_ref.rollout.workflow_kwargs.gl to egl (a GPU's driver, "
    "or apt's libegl1) "
    "or to osmesa (apt's libosmesa6), or leave env_kwargs.render=false"
)
_MOST_REPLAYS = 3
"""Of an episode whose workers are lost to others."""


@dataclass(eq=False)
class _Worker:
    """A process, once it has started, and the number of its episodes. is_gone: it was killed."""

    process: UserProcess | None = None
    num_episodes: int = 0
    is_gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def leave(self) -> None:
        """Kill the process; its episodes begin in another worker."""
        self.is_gone = True
        self.num_episodes = 0
        if self.process is not None:
            self.process.close()


class SimulatorPool:
    """Workers with an env each, see `SimulatorHost`. timeout_s: of each `reset`, and of each
    chunk."""

    def __init__(
        self,
        env: str,
        options: Mapping[str, Any],
        num_workers: int,
        timeout_s: float,
        gl: str | None = None,
    ) -> None:
        """gl: see `SimulatorHost`. Raises UserError if the env cannot be made or rendered, or
        `reset` does not repeat a state."""
        host = {"env": env, "options": dict(options), "gl": gl}
        try:
            self._server = ProcessServer(f"{simulator_host.__name__}:SimulatorHost", host)
        except UserError as error:  # MuJoCo loads what renders when it is imported
            raise UserError(f"{error}{_RENDERING}" if gl else str(error)) from None
        self.close = self._server.close
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._workers = list[_Worker]()
        self._keys = itertools.count()
        self.new_key = lambda: str(next(self._keys))
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_replaced = 0
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may run a loop
            failed = thread.submit(asyncio.run, self._check()).result()
        if failed:
            self.close()
            raise UserError(
                f"the simulator '{env}' {failed}{_RENDERING if _OF_GL.search(failed) else ''}"
            )

    async def begin(self, seed: int, options: Mapping[str, Any]) -> "Episode":
        """Begin an episode in the worker that has the fewest. Raises CallFailed."""
        episode = Episode(self, self.free_worker(), {"seed": seed, "options": dict(options)})
        try:
            await episode.begin()
        except CallFailed:
            episode.leave()
            raise
        except asyncio.CancelledError:  # the worker begins it all the same
            await episode.close()
            raise
        return episode

    def free_worker(self) -> _Worker:
        """The worker that has the fewest episodes; a lost one is replaced."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop
            self._workers = [_Worker() for _ in range(self._num_workers)]
        number = min(
            range(self._num_workers), key=lambda number: self._workers[number].num_episodes
        )
        if self._workers[number].is_gone:
            self._workers[number] = _Worker()
            self.num_replaced += 1
        return self._workers[number]

    async def call(self, worker: _Worker, method: str, **arguments: Any) -> Any:
        """The result of the host's method. Raises CallFailed, ProcessEnded, WorkerLost. A call that
        is cancelled is executed all the same."""
        if worker.process is None and not worker.is_gone:
            async with worker.lock:
                try:
                    worker.process = worker.process or await self._server.fork("simulator")
                except ServerLost as error:
                    worker.leave()
                    raise WorkerLost(str(error)) from error
        if not worker.is_gone and worker.process is not None:
            worker.process.send(method, arguments)  # it need not wait for it after the calls before
        answer = asyncio.ensure_future(self._answer(worker, method, arguments))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(answer)

    async def _answer(self, worker: _Worker, method: str, arguments: Mapping[str, Any]) -> Any:
        async with worker.lock:
            if worker.is_gone or worker.process is None:
                raise WorkerLost(
                    "its worker was replaced, because the simulator of another episode died or hung"
                )
            try:
                return await worker.process.answer(method, arguments, self._timeout_s)
            except ServerLost as error:
                worker.leave()
                raise WorkerLost(str(error)) from error
            # the answer to a cancelled call would be taken for the next
            except (ProcessEnded, asyncio.CancelledError):
                worker.leave()
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
        why = (
            "has another state after reset with the same seed and options: derive all that is "
            "random from the seed"
        )
        return f"{why} ({differing} differs)" if differing else ""


class WorkerLost(ProcessEnded):
    """Another episode has ended the worker."""


class Episode:
    """An episode in a worker. If another one ends the worker, this one is played again in a new
    worker, up to where it was. seen: its last observation."""

    def __init__(self, pool: SimulatorPool, worker: _Worker, start: Mapping[str, Any]) -> None:
        self._pool = pool
        self._start = start
        self._chunks = list[list[list[float]]]()
        self.seen = Observation()
        self._last: Any = None
        self._has_left = False
        self._join(worker)

    async def begin(self) -> None:
        """Raises CallFailed."""
        self._last = await self._call("begin", **self._start)
        self.seen = from_json(self._last)

    async def step(self, actions: Sequence[Sequence[float]]) -> dict[str, Any]:
        """`ChunkResult` by name. Raises CallFailed."""
        chunk = [[*map(float, action)] for action in actions]
        result: dict[str, Any] = await self._call("act", actions=chunk)
        self._chunks.append(chunk)
        self._last = result["observation"]
        self.seen = from_json(self._last)
        return result

    async def close(self) -> None:
        """Return the simulator."""
        self.leave()
        with suppress(CallFailed):
            await self._pool.call(self._worker, "end", key=self._key)

    def leave(self) -> None:
        if not self._has_left and not self._worker.is_gone:
            self._worker.num_episodes -= 1
        self._has_left = True

    def _join(self, worker: _Worker) -> None:
        self._worker = worker
        self._key = self._pool.new_key()
        self._has_left = False
        worker.num_episodes += 1

    async def _call(self, method: str, **arguments: Any) -> Any:
        for _ in range(_MOST_REPLAYS):
            try:
                return await self._pool.call(self._worker, method, key=self._key, **arguments)
            except WorkerLost:
                await self._replay()
        return await self._pool.call(self._worker, method, key=self._key, **arguments)

    async def _replay(self) -> None:
        """Raises CallFailed if it does not end in the same state."""
        self._join(self._pool.free_worker())
        if self._last is None:  # it has not begun
            return
        try:
            seen = await self._pool.call(self._worker, "begin", key=self._key, **self._start)
            for chunk in self._chunks:
                seen = (await self._pool.call(self._worker, "act", key=self._key, actions=chunk))[
                    "observation"
                ]
        except WorkerLost:  # the next attempt begins anew
            return
        if seen != self._last:
            raise CallFailed(
                "its worker was lost, and the same actions lead to another state in a new one"
            )
