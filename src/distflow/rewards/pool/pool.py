"""Reward functions in processes that can be killed: a hang, a crash or a full memory costs one
score, never the run."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from distflow.errors import UserError
from distflow.processes.channel import encode
from distflow.rewards.function_calls import PROMPT
from distflow.rewards.function_loading import without_options
from distflow.rewards.pool.process import Crashed, RewardProcess, StartFailed
from distflow.rewards.pool.work import Calls, Work
from distflow.rewards.reward_results import Error, RewardResult, Timeout

MEMORY_BYTES = 4 * 2**30
START_TIMEOUT_S = 60.0
OnResult = Callable[[str, Mapping[str, object], RewardResult], None]
"""(name of the function, arguments, result)."""
OnRepeat = Callable[[int], None]
"""Called with the number of calls that were repeated because their process died."""
_CLOSING = "the run was closing its reward workers"
_QUICK_S = 0.005
"""Faster calls are sent ahead: waking a process takes about as long as most of them."""
_MOST_AHEAD = 8
_AHEAD_BYTES = 2**13


class GivenUp(UserError):
    """A reward function hangs, so the run ends."""


class PoolSettings(NamedTuple):
    """What a pool is made of."""

    functions: Mapping[str, str]
    """Name → "module:function" or "file.py:function"."""
    num_workers: int
    """Processes."""
    timeout_s: float
    """Of one call."""
    memory_bytes: int = MEMORY_BYTES
    """Of each process; 0 for no limit."""
    start_timeout_s: float = START_TIMEOUT_S


class RewardPool:
    """`num_workers` processes, each with the same functions loaded. A process scores one response
    at a time, or several by a function in `takes_groups`.

    The deadline of a call runs from when its process takes it, not while it queues: n hangs cost at
    most (1 + n / num_workers) · timeout_s. A process that crashed or ran out of memory is replaced
    and the call repeated once; one that missed its deadline is replaced and the result is a
    `Timeout`. Responses that are scored in one call share its fate and the sum of their deadlines.
    """

    def __init__(self, settings: PoolSettings) -> None:
        """Waits for the first process. Raises UserError if a function cannot be loaded."""
        assert settings.num_workers > 0 and settings.timeout_s > 0 and settings.functions
        self.timeout_s = settings.timeout_s
        self.functions = settings.functions
        self.takes_groups = frozenset[str]()
        """Functions that score several responses in one call: batched and async ones."""
        self.takes_batches = frozenset[str]()
        """The batched ones."""
        self.takes_conversations = frozenset[str]()
        """Functions that see a whole episode."""
        self.on_result: OnResult | None = None
        """Called with every result, on the caller's event loop."""
        self.closed = False
        """Whether there will be no further results."""
        self._settings = settings

        # One thread for each process. They use what follows together, by atomic calls alone.
        self._threads = ThreadPoolExecutor(
            settings.num_workers, thread_name_prefix="distflow-reward"
        )
        self._idle = list[RewardProcess]()
        self._living = set[RewardProcess]()

        # Of calls that may be given up.
        self._returned = set[str]()
        self._num_hung = Counter[str]()
        self._quick = set[str]()
        """Functions whose last call was quick."""

        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._start_first()
            on_failure.pop_all()

    async def score_group(
        self,
        name: str,
        asked: Calls,
        timeout_s: float | None = None,
        on_repeat: OnRepeat = lambda number: None,
        give_up_after: int = 0,
    ) -> list[RewardResult]:
        """Call function `name` for each of these arguments (by their names in
        `reward_functions.PARAMETERS`; plain JSON values). timeout_s: of each. give_up_after: raises
        GivenUp once that many calls timed out and none with such a limit has returned; 0 means
        never."""
        on_result = None if self.closed else self.on_result
        reward_results = await self._score_group(name, asked, timeout_s, on_repeat, give_up_after)
        if on_result is not None:
            for arguments, reward_result in zip(asked, reward_results, strict=True):
                on_result(name, arguments, reward_result)
        return reward_results

    async def call(
        self, name: str, arguments: Mapping[str, object], timeout_s: float | None = None
    ) -> RewardResult:
        """`score_group` for one response."""
        (reward_result,) = await self.score_group(name, [arguments], timeout_s)
        return reward_result

    async def _score_group(
        self,
        name: str,
        asked: Calls,
        timeout_s: float | None,
        on_repeat: OnRepeat,
        give_up_after: int,
    ) -> list[RewardResult]:
        if name in self.takes_groups:
            parts = [asked]
        else:
            parts = [[arguments] for arguments in asked]

        work = Work(name, parts, timeout_s or self.timeout_s, give_up_after)
        loop = asyncio.get_running_loop()

        num_threads = min(len(parts), self._settings.num_workers)
        try:
            await asyncio.gather(
                *(
                    loop.run_in_executor(self._threads, self._serve, work)
                    for _ in range(num_threads)
                )
            )
        except RuntimeError:  # of threads that have ended
            if not self.closed:
                raise
        finally:  # the caller may have been cancelled, or the function is given up
            work.abandon()

        if work.crashed and not self.closed:
            on_repeat(sum(len(parts[i]) for i in work.crashed))
        return list(work.results(missing=Error(_CLOSING)))

    def close(self) -> None:
        """Kill all processes at once; running and queued calls become errors."""
        self.closed = True
        for process in list(self._living):
            process.kill()
        self._threads.shutdown(wait=True)
        for process in list(self._living):
            self._retire(process)

    def _serve(self, work: Work) -> None:
        """Have processes answer the parts that no other thread takes; runs on a thread of the pool.
        Raises GivenUp."""
        while not self.closed and (frames := self._take(work)):
            unanswered = deque(frames)
            failure: RewardResult | None = None
            try:
                with self._process() as process:
                    process.ask(b"".join(frames.values()), work.timeout_s)
                    while unanswered:
                        self._answer(process, work, unanswered[0])
                        unanswered.popleft()
            except Crashed as error:
                if unanswered[0] in work.crashed:
                    failure = Error(f"{error}, twice")
                else:
                    work.crashed.add(unanswered[0])
            except StartFailed as error:
                failure = Error(f"no reward worker could be started: {error}")
            except TimeoutError:
                failure = Timeout(work.timeout_s * len(work.parts[unanswered[0]]))

            if failure is not None and not self.closed:
                self._end(work, unanswered.popleft(), failure)

            # those that were sent ahead have not caused it
            work.put_back(unanswered)

    def _take(self, work: Work) -> dict[int, bytes]:
        """The requests of the next parts, by their numbers: several if calls are quick and the
        requests small, so that they fit into a socket together."""
        most = _MOST_AHEAD if work.name in self._quick else 1
        frames = dict[int, bytes]()
        while len(frames) < most and (i := work.take()) is not None:
            asked = list(map(dict, work.parts[i]))
            request = {"name": work.name, "asked": asked, "timeout_s": work.timeout_s}
            try:
                frame = encode(request)
            except (TypeError, ValueError) as error:
                failure = Error(f"the sample cannot be sent to a reward worker: {error}")
                work.keep(i, [failure])
                continue

            if frames and len(frame) > _AHEAD_BYTES:
                work.put_back([i])
                break

            frames[i] = frame
            if len(frame) > _AHEAD_BYTES:
                break

        return frames

    def _answer(self, process: RewardProcess, work: Work, i: int) -> None:
        began = time.monotonic()
        results = process.answer(len(work.parts[i]), work.timeout_s)

        if time.monotonic() - began < _QUICK_S:
            self._quick.add(work.name)
        else:
            self._quick.discard(work.name)

        self._end(work, i, *results)

    def _end(self, work: Work, i: int, *results: RewardResult) -> None:
        """Keep a part's results, or one for all its calls. Raises GivenUp."""
        work.keep(i, results)
        if not work.give_up_after:
            return
        if not all(isinstance(each, Timeout) for each in results):
            self._returned.add(work.name)
            return

        self._num_hung[work.name] += 1
        if self._num_hung[work.name] >= work.give_up_after and work.name not in self._returned:
            raise GivenUp(self._why_given_up(work.name, work.parts[i][0], work.timeout_s))

    @contextmanager
    def _process(self) -> Iterator[RewardProcess]:
        """A process that no other thread uses meanwhile; an error ends it. Raises StartFailed."""
        process = self._idle_process() or self._start()
        try:
            yield process
        except BaseException:
            self._retire(process)
            raise

        self._idle.append(process)

    def _idle_process(self) -> RewardProcess | None:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return None

            if process.is_alive():
                return process
            self._retire(process)

    def _why_given_up(self, name: str, first: Mapping[str, object], timeout_s: float) -> str:
        target = without_options(self.functions[name])
        return (
            f"the reward function '{name}' ({target}) hangs, or is slow: none of its first "
            f"{self._num_hung[name]} calls returned within {timeout_s:g} s (reward.timeout_s), "
            f"e.g. for the response {first['solution_str']!r:.200} to the prompt "
            f"{first.get(PROMPT)!r:.200} (ground truth {first['ground_truth']!r:.80}). Correct it, "
            "and test it with `distflow reward check`; if it is slow, raise reward.timeout_s; "
            "reward.max_error_rate=1 never stops"
        )

    def _start_first(self) -> None:
        try:
            self._idle.append(self._start())
        except StartFailed as error:
            functions = self.functions.items()
            loaded = [
                without_options(target) for name, target in functions if not name.startswith("(")
            ]
            raise UserError(
                f"the reward functions ({', '.join(loaded)}; see custom_reward_function.path and "
                f"reward.functions) cannot be loaded: {error}"
            ) from None

    def _start(self) -> RewardProcess:
        try:
            process = RewardProcess(self._settings.memory_bytes)
        except OSError as error:
            raise StartFailed(str(error)) from None

        self._living.add(process)
        try:
            if self.closed:  # checked once `close` knows the process: one of the two kills it
                raise StartFailed(_CLOSING)
            self.takes_groups, self.takes_batches, self.takes_conversations = process.load(
                self.functions, self._settings.start_timeout_s
            )
        except StartFailed:
            self._retire(process)
            raise

        return process

    def _retire(self, process: RewardProcess) -> None:
        process.discard()
        self._living.discard(process)
