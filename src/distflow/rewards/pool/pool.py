"""Verifiers in processes that can be killed: a hang, a crash or a full memory costs one verdict, never the run."""

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from distflow.errors import UserError
from distflow.rewards.pool.framing import PeerGone, encode
from distflow.rewards.pool.process import Request, RewardProcess, StartFailed, take
from distflow.rewards.score import Error, RewardResult, Timeout

MEMORY_BYTES = 4 * 2**30
START_TIMEOUT_S = 60.0
Told = Callable[[str, Mapping[str, object], RewardResult], None]
"""(function's name, arguments, verdict)."""
OnAgain = Callable[[int], None]
"""Called with how many verdicts were asked for once more because the process that was at them died."""
_CLOSING = "the run was closing its verifiers"


class RewardPool:
    """`num_workers` processes, each with the same functions loaded, each judging one answer at a time; by a function in
    `takes_groups` (one that is batched or async) several; `takes_batches` are those of them that are batched.

    The deadline of a verdict runs from the moment its process takes it, not while it queues: n hangs cost at most
    (1 + n / num_workers) · timeout_s. A process that crashed or ran out of memory is replaced and the answer judged
    once more; one that passed its deadline is replaced and its answer is a `Timeout`. What happens to a process happens
    to all that it was asked at once, whose deadline is that of one times their number.
    """

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """functions: name → "module:function" or "file.py:function". memory_bytes: of one process, 0 for no limit.

        `told` is called with every verdict, on the loop that asked for it.
        Waits for the first process and raises UserError where a function cannot be loaded.
        """
        assert num_workers > 0 and timeout_s > 0 and functions
        self.timeout_s = timeout_s
        self._settings = (dict(functions), memory_bytes, start_timeout_s)
        self.told: Told = lambda name, arguments, reward_result: None
        self.takes_groups = frozenset[str]()
        self.takes_batches = frozenset[str]()
        self._closed = False
        self._num_workers = num_workers
        # Processes are started by these threads only: Linux kills a child when the thread that started it ends.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="distflow-verifier")
        self._idle: queue.LifoQueue[RewardProcess | None] = queue.LifoQueue()  # one that is up comes first
        # Changed by those threads, copied by `close`: `add`, `discard` and `list()` of a set are one step each.
        self._living: set[RewardProcess] = set()
        for _ in range(num_workers):
            self._idle.put(None)  # a place whose process is started when it is first needed
        try:
            self._threads.submit(self._start_first).result()
        except BaseException:
            self.close()
            raise

    async def call(
        self,
        name: str,
        arguments: Mapping[str, object],
        timeout_s: float | None = None,
        on_again: OnAgain = lambda number: None,
    ) -> RewardResult:
        """Call function `name` with `arguments` (by their names in `functions.PARAMETERS`; plain JSON values)."""
        (reward_result,) = await self.score_group(name, [arguments], timeout_s, on_again)
        return reward_result

    @property
    def closed(self) -> bool:
        """Whether it was closed: no verdict will come any more."""
        return self._closed

    async def score_group(
        self,
        name: str,
        asked: Sequence[Mapping[str, object]],
        timeout_s: float | None = None,
        on_again: OnAgain = lambda number: None,
    ) -> list[RewardResult]:
        """The same for several at once; timeout_s: of each."""
        if self._closed:
            return [Error(_CLOSING)] * len(asked)
        timeout_s = timeout_s or self.timeout_s
        parts = [asked] if name in self.takes_groups else [[arguments] for arguments in asked]
        requests = [_request(name, part, timeout_s) for part in parts]
        left = deque(request for request in requests if not request.reward_results)
        serving = set[asyncio.Future[None]]()
        try:
            while left or serving:
                self._add_threads(serving, left, timeout_s)
                if serving:
                    done, serving = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
                    for ended in done:
                        ended.result()
        finally:
            left.clear()  # the caller may have been cancelled
        again = sum(request.num_asked for request in requests if request.crashes)
        if again and not self._closed:
            on_again(again)
        reward_results = [reward_result for request in requests for reward_result in request.reward_results]
        for arguments, reward_result in zip(asked, reward_results, strict=True):
            self.told(name, arguments, reward_result)
        return reward_results

    def close(self) -> None:
        """Kill all processes, at once; verdicts under way, and those that queue, become errors."""
        self._closed = True
        for process in list(self._living):
            process.kill()
        self._threads.shutdown(wait=True)
        for process in list(self._living):
            self._retire(process)

    def pids(self) -> list[int]:
        """Of the processes that are up."""
        return sorted(process.pid for process in self._living)

    def _add_threads(self, serving: set[asyncio.Future[None]], left: deque[Request], timeout_s: float) -> None:
        """As many as there are places and requests; none any more once the pool is closed."""
        loop = asyncio.get_running_loop()
        try:
            for _ in range(min(self._num_workers - len(serving), len(left))):
                serving.add(loop.run_in_executor(self._threads, self._serve, left, timeout_s))
        except RuntimeError:
            if not self._closed:
                raise
            at: deque[Request] = deque()
            while take(left, at):
                self._fail(at.popleft(), None, left)

    def _serve(self, left: deque[Request], timeout_s: float) -> None:
        """Have what is left answered, as far as no other thread takes it, in one process as long as that one lives.
        What it did not come to is left to all threads again."""
        at: deque[Request] = deque()
        if not take(left, at):
            return
        process = self._idle.get()
        failure: RewardResult | None = None
        try:
            if process is None or not process.is_alive():
                process = self._start(process)
            process.answer(at, left, timeout_s)
        except StartFailed as error:
            failure = Error(f"no verifier process could be started: {error}")
        except TimeoutError:
            failure = Timeout(timeout_s * at[0].num_asked)
        except PeerGone:
            assert process is not None
            failure = _crashed(at[0], process.cause_of_death())
        except ValueError as error:
            failure = _crashed(at[0], f"the verifier process answered nonsense: {error}")
        finally:
            self._idle.put(process if process is not None and self._keep(process) else None)
        if at:
            self._fail(at.popleft(), failure, left)
            left.extendleft(reversed(at))  # what was sent ahead had no part in it

    def _fail(self, request: Request, failure: RewardResult | None, left: deque[Request]) -> None:
        """None: it is asked once more. What fails while the pool closes fails because of that."""
        if self._closed:
            failure = Error(_CLOSING)
        if failure is None:
            left.appendleft(request)
        else:
            request.reward_results = [failure] * request.num_asked

    def _keep(self, process: "RewardProcess") -> bool:
        """Whether it may serve again: it is in step, having answered what it was asked."""
        if process.in_step and process.is_alive():
            return True
        self._retire(process)
        return False

    def _start_first(self) -> None:
        try:
            process = self._start(self._idle.get())
        except StartFailed as error:
            users = [target for name, target in self._settings[0].items() if not name.startswith("(")]  # no probe
            raise UserError(
                f"the reward functions ({', '.join(users)}; see custom_reward_function.path and "
                f"reward.functions) cannot be loaded: {error}"
            ) from None
        self._idle.put(process)

    def _start(self, dead: "RewardProcess | None") -> "RewardProcess":
        if dead is not None:
            self._retire(dead)
        functions, memory_bytes, start_timeout_s = self._settings
        try:
            process = RewardProcess(memory_bytes)
        except OSError as error:
            raise StartFailed(str(error)) from None
        self._living.add(process)
        try:
            if self._closed:  # asked after the process is known to `close`: one of the two kills it
                raise StartFailed(_CLOSING)
            self.takes_groups, self.takes_batches = process.load(functions, start_timeout_s)
        except StartFailed:
            self._retire(process)
            raise
        return process

    def _retire(self, process: "RewardProcess") -> None:
        process.discard()
        self._living.discard(process)


def _request(name: str, asked: Sequence[Mapping[str, object]], timeout_s: float) -> Request:
    """One that cannot be sent has its answer already."""
    try:
        frame = encode({"name": name, "asked": [dict(arguments) for arguments in asked], "timeout_s": timeout_s})
    except (TypeError, ValueError) as error:
        return Request(b"", len(asked), [Error(f"the sample cannot be sent to a verifier: {error}")] * len(asked))
    return Request(frame, len(asked))


def _crashed(request: Request, reason: str) -> Error | None:
    """Worth one more try in a fresh process."""
    request.crashes += 1
    return Error(f"{reason}, twice") if request.crashes > 1 else None
