"""A worker's asyncio thread with its reward functions and rollout engine, which are entered and
left together.

If training and generation alternate, the engine computes on the waiting thread: the process then
needs only one OpenMP pool; a second one slows the first down (see
`rollout/embedded/engine_thread.py`).
"""

import concurrent.futures
import math
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import TypeVar

from distflow.data.encoded_prompts import PromptRow
from distflow.data.messages import prompt_of
from distflow.rewards.pool.domain_pools import RewardSettings
from distflow.rewards.reward_check import Row, call_first
from distflow.rewards.router import RewardRouter
from distflow.rewards.startup_checks import startup_check_scores
from distflow.rollout.engine import Hosted, RolloutEngine, Stretch
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.engine_watch import STACKS, Deadline, EngineHangs
from distflow.runtime.rollout_loop.loop_thread import LoopGivenUp, LoopThread, on_a_thread
from distflow.runtime.rollout_loop.rollout_client import RolloutClient
from distflow.runtime.shared_cores import SharedCores
from distflow.runtime.spec import Spec
from distflow.runtime.stop_signals import leave_at_once

NUM_CHECKED_ROWS = 16

T = TypeVar("T")


@dataclass(eq=False)
class _Loan:
    """A computation for the waiting thread."""

    stretch: Stretch
    taken: bool = False
    """That thread has started it; set before `ended`."""
    ended: threading.Event = field(default_factory=threading.Event)


class HostThread:
    """A `Host`: the thread that creates it, which computes for others while it waits.

    It computes only inside `wait`, and at most one decode step longer than what it waits for, so
    nobody waits for a busy thread.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()

        # guards the two below
        self._lock = threading.Lock()
        self.waits = False
        self._asked = set[_Loan]()
        self._loan: _Loan | None = None
        self._loans: SimpleQueue[_Loan | None] = SimpleQueue()  # None: check again

    def wait(self, begin: "Callable[[], concurrent.futures.Future[T]]") -> T:
        """Call `begin`, and return the future's result or raise its error. On another thread it
        only waits."""
        if threading.get_ident() != self._ident:
            return begin().result()

        try:  # an interrupt may come at any moment
            with self._lock:
                self.waits = True
            future = begin()
            future.add_done_callback(lambda _: self._loans.put(None))
            while not future.done():
                self._compute_next(future)
        finally:
            with self._lock:
                self.waits = False
                asked = self._asked
                self._asked = set[_Loan]()

            while not self._loans.empty():
                self._loans.get()
            for loan in asked:  # an interrupt may have lost a loan that had left the queue
                loan.ended.set()

        return future.result()

    def compute(self, stretch: Stretch) -> bool:
        """See `Host`; for other threads."""
        loan = _Loan(stretch)
        with self._lock:
            if not self.waits:
                return False
            self._asked.add(loan)
            self._loans.put(loan)

        loan.ended.wait()
        with self._lock:
            self._asked.discard(loan)
        return loan.taken

    @property
    def is_computing(self) -> bool:
        return self._loan is not None

    def _compute_next(self, future: "concurrent.futures.Future[T]") -> None:
        loan = self._loans.get()
        if loan is None:
            return

        try:
            self._loan = loan
            loan.taken = True
            loan.stretch(future.done)
        finally:
            self._loan = None
            loan.ended.set()


class RolloutServices:
    """A context manager; inside, coroutines run on its thread. For one other thread, which creates
    and enters it.

    The futures and events of engine and reward functions belong to that thread's loop: they are
    entered, awaited and left only there, while the other thread waits in `call`.

    resources: the given ones, with the engine behind a `RolloutClient`.
    """

    def __init__(
        self,
        resources: Resources,
        check_rewards: Callable[[RewardRouter], Coroutine[object, object, None]] | None,
        blocked_after_s: float = math.inf,
        engine_deadline: Deadline | None = None,
        takes_turns: bool = False,
    ) -> None:
        """check_rewards: tests the reward functions before use. blocked_after_s: how long a user's
        function may block the thread. engine_deadline: None waits for the rollout engine without
        limit. takes_turns: the entering thread only waits while the engine generates, so the engine
        computes there if it can.
        """
        self._thread = LoopThread("rollout", blocked_after_s)
        self._shared_cores = SharedCores()
        engine = resources.rollout
        self._host: HostThread | None = None

        if takes_turns and isinstance(engine, Hosted):
            self._host = HostThread()
            engine.host = self._host

        if engine is not None:
            client = RolloutClient(engine, engine_deadline, self._give_up)
            resources = replace(resources, rollout=client)

        self.resources = resources
        self._check_rewards = check_rewards
        self._stack = AsyncExitStack()

    @staticmethod
    def of(spec: Spec, resources: Resources, writes_stacks: bool) -> "RolloutServices":
        """The session of a worker. If `trust.check_rewards` is on, its reward functions are tested
        on its first rows.

        writes_stacks: of all threads, into the run's folder, if the engine hangs.
        """
        check_rewards = None
        if spec.tests_rewards:
            check_rewards = partial(_check_rewards, spec)

        timeout_s = spec.config.actor_rollout_ref.rollout.timeout_s
        stacks = spec.run_dir / STACKS if writes_stacks else None

        deadline = None
        if timeout_s is not None:
            deadline = Deadline(timeout_s, stacks)

        blocked_after_s = spec.config.reward.timeout_s * max(
            each.group_size or spec.data.group_size for each in spec.data.sources
        )

        # From the config: the selftest has the engine of a run with staleness, and a sample queue
        # without.
        takes_turns = spec.config.async_.max_staleness == 0

        # the user's code runs on the thread
        if ":" in (spec.config.actor_rollout_ref.rollout.workflow or ""):
            # if that code started it, SIGINT would be unblocked on the thread
            resource_tracker.ensure_running()

        return RolloutServices(resources, check_rewards, blocked_after_s, deadline, takes_turns)

    def __enter__(self) -> "RolloutServices":
        self._thread.__enter__()

        # Python does not call `__exit__` then, and services may already run
        with ExitStack() as if_it_fails:
            if_it_fails.push(self.__exit__)
            self._shared_cores.__enter__()
            self.call(self._enter())
            if_it_fails.pop_all()

        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        """Cancel what runs, then leave the services. Their errors are raised only if nothing failed
        before."""
        try:
            self._thread.cancel_all()
            self.call(self._stack.aclose())
        # a service that cannot end, or a thread that had ended by itself
        except Exception as failure:
            if isinstance(failure, LoopGivenUp) and self.resources.reward_fn is not None:
                self.resources.reward_fn.close()  # its processes must not outlive the run
            if error is None:
                raise
        finally:
            self._thread.__exit__()
            self._shared_cores.__exit__()

    def call(self, work: Coroutine[object, object, T]) -> T:
        return self._wait(lambda: self._thread.start(work))

    def start(self, work: Coroutine[object, object, T]) -> "concurrent.futures.Future[T]":
        return self._thread.start(work)

    def wait_for(self, blocking: Callable[[], T]) -> T:
        """Call a function that waits for others, on another thread if this one must compute for an
        engine meanwhile."""
        if self._host is None:
            return blocking()
        return self._wait(lambda: on_a_thread(blocking))

    def release_engine(self) -> None:
        """Have the idle rollout engine free its KV and its own weights until it gets new ones."""

        async def release(engine: RolloutEngine) -> None:
            await engine.pause(release=True)
            await engine.resume()

        if self.resources.rollout is not None:
            self.call(release(self.resources.rollout))

    def _wait(self, begin: "Callable[[], concurrent.futures.Future[T]]") -> T:
        if self._host is None:
            return begin().result()
        return self._host.wait(begin)

    def _give_up(self, error: EngineHangs) -> None:
        """Pass the error to everyone who waits. If the engine hangs on the entering thread, only
        ending the process helps."""
        self._thread.end(error)
        if self._host is not None and self._host.is_computing:
            os.write(2, f"distflow: {error}\n".encode())
            leave_at_once(1)

    async def _enter(self) -> None:
        reward_fn = self.resources.reward_fn
        rollout = self.resources.rollout

        if reward_fn is not None:
            self._stack.enter_context(reward_fn)
            if self._check_rewards is not None:
                await self._check_rewards(reward_fn)

        if rollout is not None:
            await self._stack.enter_async_context(rollout)


async def _check_rewards(spec: Spec, reward_fn: RewardRouter) -> None:
    """Test on the ground truths of the first rows."""
    rows = _first_rows(spec, NUM_CHECKED_ROWS)
    await startup_check_scores(
        reward_fn, [(row.domain, row.ground_truth, row.extra_info or {}) for row in rows]
    )


def try_rewards(spec: Spec) -> list[str]:
    """Call the user's reward functions on a right and a wrong response, before anything is loaded.
    Raises UserError if one gives no score; returns notes. Skipped if workers have their own
    environment variables, which the functions may read."""
    trainer = spec.config.trainer
    if not spec.tests_rewards or trainer.worker_env or trainer.worker_roles:
        return []
    return call_first(
        RewardSettings.of(spec.config), map(_checked_row, _first_rows(spec, NUM_CHECKED_ROWS))
    )


def _checked_row(row: PromptRow) -> Row:
    prompt = prompt_of(row.prompt_text, row.extra_info)
    return Row(row.origin, row.domain, row.ground_truth, row.extra_info or {}, None, prompt)


def _first_rows(spec: Spec, number: int) -> list[PromptRow]:
    """The first rows of each source, about `number` in total."""
    rows = list[PromptRow]()
    sources = spec.data.sources
    of_each = max(1, number // len(sources))

    first = 0
    for source in sources:
        rows += spec.rows[first : first + min(of_each, source.num_rows)]
        first += source.num_rows

    return rows
