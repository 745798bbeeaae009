"""Reward functions in processes that can be killed: a hang, a crash or a full memory costs one
score, never the run."""

import asyncio
import queue
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from distflow.errors import UserError
from distflow.processes.channel import PeerGone, encode
from distflow.rewards.function_calls import PROMPT
from distflow.rewards.function_loading import without_options
from distflow.rewards.pool.process import Request, RewardProcess, StartFailed
from distflow.rewards.reward_results import Error, RewardResult, Timeout

MEMORY_BYTES = 4 * 2**30
START_TIMEOUT_S = 60.0
Calls = Sequence[Mapping[str, object]]
"""The arguments of each call, by name."""
OnResult = Callable[[str, Mapping[str, object], RewardResult], None]
"""(name of the function, arguments, result)."""
OnRepeat = Callable[[int], None]
"""Called with the number of calls that were repeated because their process died."""
_CLOSING = "the run was closing its reward workers"


class GivenUp(UserError):
    """A reward function hangs, so the run ends."""


class PoolSettings(NamedTuple):
    """functions: name → "module:function" or "file.py:function". num_workers: processes.
    memory_bytes: of each process, 0 for no limit."""

    functions: Mapping[str, str]
    num_workers: int
    timeout_s: float
    memory_bytes: int = MEMORY_BYTES
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
        self._threads = ThreadPoolExecutor(
            settings.num_workers, thread_name_prefix="distflow-reward"
        )
        # running processes come first
        self._idle: queue.LifoQueue[RewardProcess | None] = queue.LifoQueue()
        # Changed by those threads, copied by `close`: `add`, `discard` and `list()` of a set are
        # atomic.
        self._living: set[RewardProcess] = set()
        # Functions that may be given up: those of which a call has returned, and the numbers of
        # calls that timed out.
        self._returned = set[str]()
        self._num_hung = Counter[str]()
        # the arguments of the first timed-out call
        self._hung: dict[str, Mapping[str, object]] = {}
        for _ in range(settings.num_workers - 1):
            self._idle.put(None)  # a slot; its process is started when it is first needed
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
        if self.closed:
            return [Error(_CLOSING)] * len(asked)
        timeout_s = timeout_s or self.timeout_s
        parts = [asked] if name in self.takes_groups else [[arguments] for arguments in asked]
        requests = [_request(name, part, timeout_s) for part in parts]
        if give_up_after:
            for request, part in zip(requests, parts, strict=True):
                request.on_results = partial(self._count_hangs, name, part[0])
        pending = deque(request for request in requests if not request.reward_results)
        serving = set[asyncio.Future[None]]()
        try:
            while pending or serving:
                self._add_threads(serving, pending, timeout_s)
                if serving:
                    done, serving = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
                    for ended in done:
                        ended.result()
                if (
                    give_up_after
                    and self._num_hung[name] >= give_up_after
                    and name not in self._returned
                ):
                    raise GivenUp(self._why_given_up(name, timeout_s))
        finally:
            pending.clear()  # the caller may have been cancelled
        repeated = sum(request.num_asked for request in requests if request.crashes)
        if repeated and not self.closed:
            on_repeat(repeated)
        return [reward_result for request in requests for reward_result in request.reward_results]

    def close(self) -> None:
        """Kill all processes at once; running and queued calls become errors."""
        self.closed = True
        for process in list(self._living):
            process.kill()
        self._threads.shutdown(wait=True)
        for process in list(self._living):
            self._retire(process)

    def _add_threads(
        self, serving: set[asyncio.Future[None]], pending: deque[Request], timeout_s: float
    ) -> None:
        """Add as many threads as there are free slots and requests; none once the pool is
        closed."""
        loop = asyncio.get_running_loop()
        try:
            for _ in range(min(self._settings.num_workers - len(serving), len(pending))):
                serving.add(loop.run_in_executor(self._threads, self._serve, pending, timeout_s))
        except RuntimeError:
            if not self.closed:
                raise
            while (request := _next(pending)) is not None:
                self._fail(request, None, pending)

    def _serve(self, pending: deque[Request], timeout_s: float) -> None:
        """Send requests that no other thread takes to one process, while it lives. The rest stay
        for all threads."""
        request = _next(pending)
        if request is None:
            return
        process = self._idle.get()
        failure: RewardResult | None = None
        try:
            if process is None or not process.is_alive():
                process = self._start(process)
            while request is not None:
                request.end(process.answer(request, timeout_s))
                request = _next(pending)
        except StartFailed as error:
            failure = Error(f"no reward worker could be started: {error}")
        except TimeoutError:
            assert request is not None
            failure = Timeout(timeout_s * request.num_asked)
        except (PeerGone, ValueError) as error:
            assert process is not None and request is not None
            nonsense = f"the reward worker returned invalid data: {error}"
            reason = process.cause_of_death() if isinstance(error, PeerGone) else nonsense
            request.crashes += 1
            failure = Error(f"{reason}, twice") if request.crashes > 1 else None
        finally:
            if process is not None and not (process.in_step and process.is_alive()):
                self._retire(process)
                process = None
            self._idle.put(process)
        if request is not None:
            self._fail(request, failure, pending)

    def _fail(
        self, request: Request, failure: RewardResult | None, pending: deque[Request]
    ) -> None:
        """failure: None repeats the request in a new process. A failure while the pool closes is
        due to the closing."""
        if self.closed:
            failure = Error(_CLOSING)
        if failure is None:
            pending.appendleft(request)
        else:
            request.end([failure] * request.num_asked)

    def _count_hangs(
        self, name: str, arguments: Mapping[str, object], reward_results: Sequence[RewardResult]
    ) -> None:
        num_hung = sum(isinstance(each, Timeout) for each in reward_results)
        if num_hung < len(reward_results):
            self._returned.add(name)
        else:
            self._hung.setdefault(name, arguments)
            self._num_hung[name] += 1

    def _why_given_up(self, name: str, timeout_s: float) -> str:
        first = self._hung[name]
        target = without_options(self._settings.functions[name])
        return (
            f"the reward function '{name}' ({target}) hangs, or is slow: none of its first "
            f"{self._num_hung[name]} "
            f"calls returned within {timeout_s:g} s (reward.timeout_s), e.g. for the response "
            f"{first['solution_str']!r:.200} to the prompt {first.get(PROMPT)!r:.200} (ground "
            "truth "
            f"{first['ground_truth']!r:.80}). Correct it, and test it with `distflow reward "
            "check`; if it is slow, "
            "raise reward.timeout_s; reward.max_error_rate=1 never stops"
        )

    def _start_first(self) -> None:
        try:
            process = self._start(None)
        except StartFailed as error:
            functions = self._settings.functions.items()
            loaded = [
                without_options(target) for name, target in functions if not name.startswith("(")
            ]
            raise UserError(
                f"the reward functions ({', '.join(loaded)}; see custom_reward_function.path and "
                f"reward.functions) cannot be loaded: {error}"
            ) from None
        self._idle.put(process)

    def _start(self, dead: RewardProcess | None) -> RewardProcess:
        if dead is not None:
            self._retire(dead)
        try:
            process = RewardProcess(self._settings.memory_bytes)
        except OSError as error:
            raise StartFailed(str(error)) from None
        self._living.add(process)
        try:
            if self.closed:  # checked once `close` knows the process: one of the two kills it
                raise StartFailed(_CLOSING)
            self.takes_groups, self.takes_batches, self.takes_conversations = process.load(
                self._settings.functions, self._settings.start_timeout_s
            )
        except StartFailed:
            self._retire(process)
            raise
        return process

    def _retire(self, process: RewardProcess) -> None:
        process.discard()
        self._living.discard(process)


def _next(pending: deque[Request]) -> Request | None:
    """The next request, unless other threads took them all."""
    try:
        return pending.popleft()
    except IndexError:
        return None


def _request(name: str, asked: Calls, timeout_s: float) -> Request:
    """A request; if it cannot be sent, it already has its result."""
    try:
        frame = encode(
            {
                "name": name,
                "asked": [dict(arguments) for arguments in asked],
                "timeout_s": timeout_s,
            }
        )
    except (TypeError, ValueError) as error:
        return Request(
            b"",
            len(asked),
            [Error(f"the sample cannot be sent to a reward worker: {error}")] * len(asked),
        )
    return Request(frame, len(asked))
