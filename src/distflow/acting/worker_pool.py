"""Processes that hold the simulators of a run's episodes: each has one simulator, which plays one
episode at a time. What a simulator does to its process (dies, hangs) ends its own episode."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distflow.acting import simulator_host
from distflow.acting.simulator import Observation, from_json
from distflow.environments.user_code_process import (
    CallFailed,
    ProcessServer,
    ServerLost,
    UserProcess,
)
from distflow.errors import UserError

_OF_GL = re.compile("EGL|OpenGL|OSMesa|GLFW|glGet|MUJOCO_GL|DISPLAY", re.IGNORECASE)
_RENDERING = (
    ". It cannot render: set actor_rollout_ref.rollout.workflow_kwargs.gl to egl (a GPU's driver, "
    "or apt's libegl1) or to osmesa (apt's libosmesa6), or leave env_kwargs.render=false"
)


class SimulatorPool:
    """A process for each episode that is under way; one whose episode ended serves a later one."""

    def __init__(
        self,
        env: str,
        options: Mapping[str, Any],
        num_workers: int,
        timeout_s: float,
        gl: str | None = None,
    ) -> None:
        """num_workers: simulators that compute at the same time, while as many have a call or an
        answer on its way. timeout_s: of each `reset`, and of each chunk. env, gl: see
        `SimulatorHost`. Raises UserError if the env cannot be made or rendered, or `reset` does not
        repeat a state."""
        host = {"env": env, "options": dict(options), "gl": gl}
        try:
            self._server = ProcessServer(f"{simulator_host.__name__}:SimulatorHost", host)
        except UserError as error:  # MuJoCo loads what renders when it is imported
            raise UserError(f"{error}{_RENDERING}" if gl else str(error)) from None

        self.close = self._server.close

        # An answer is read, and the next call sent, while as many others compute.
        self._num_calls = 2 * num_workers
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._computing = asyncio.Semaphore(self._num_calls)
        self._idle = list[UserProcess]()
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may run a loop
            failed = thread.submit(asyncio.run, self._check()).result()

        if failed:
            self.close()
            rendering = _RENDERING if _OF_GL.search(failed) else ""
            raise UserError(f"the simulator '{env}' {failed}{rendering}")

    async def begin(self, seed: int, options: Mapping[str, Any]) -> "Episode":
        """Begin an episode. Raises CallFailed, ServerLost."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # processes are read by the loop that forked them
            self._loop = loop
            self._computing = asyncio.Semaphore(self._num_calls)
            self._idle = []

        if self._idle:
            process = self._idle.pop()
        else:
            process = await self._server.fork("simulator")

        episode = Episode(self, process)
        try:
            await episode.begin(seed, options)
        except BaseException:
            episode.close()
            raise

        return episode

    async def call(self, process: UserProcess, method: str, **arguments: Any) -> Any:
        """The result of the host's method. Raises CallFailed, ServerLost."""
        async with self._computing:
            try:
                return await process.call(method, self._timeout_s, **arguments)
            except ServerLost:  # all its processes ended with it
                for idle in self._idle:
                    idle.close()
                self._idle = []
                raise

    def take_back(self, process: UserProcess) -> None:
        self._idle.append(process)

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


class Episode:
    """An episode in a process of its own."""

    def __init__(self, pool: SimulatorPool, process: UserProcess) -> None:
        self._pool = pool
        self._process = process
        self._is_sound = True  # no call failed, and none was cancelled before its answer
        self.seen = Observation()
        """The last observation."""

    async def begin(self, seed: int, options: Mapping[str, Any]) -> None:
        """Raises CallFailed, ServerLost."""
        self.seen = from_json(await self._call("begin", seed=seed, options=dict(options)))

    async def step(self, actions: Sequence[Sequence[float]]) -> dict[str, Any]:
        """`ChunkResult` by name. Raises CallFailed, ServerLost."""
        chunk = [[*map(float, action)] for action in actions]
        result: dict[str, Any] = await self._call("act", actions=chunk)
        self.seen = from_json(result["observation"])
        return result

    def close(self) -> None:
        """Leave the process to a later episode, or end it if a call failed."""
        if self._is_sound:
            self._pool.take_back(self._process)
        else:
            self._process.close()

    async def _call(self, method: str, **arguments: Any) -> Any:
        self._is_sound = False
        result = await self._pool.call(self._process, method, **arguments)
        self._is_sound = True
        return result
