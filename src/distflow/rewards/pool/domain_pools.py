"""A pool of reward workers per domain, so that a hang in one does not block another, and their
settings.

Pools can be started early: then their processes load functions while the run imports torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from distflow.builtin_names import REWARDS, is_own
from distflow.config import Config
from distflow.config.derived_settings import reward_functions
from distflow.config.keys.reward import RewardPart, patience_of
from distflow.errors import UserError, hint
from distflow.rewards.function_loading import (
    FAILS,
    FAILS_TARGET,
    target_of,
    with_answer_key,
    with_options,
)
from distflow.rewards.pool.pool import OnResult, PoolSettings, RewardPool
from distflow.rewards.reward_results import RewardResult

DEFAULT_DOMAIN = "default"
LARGE_START_TIMEOUT_S = 1800.0
"""Start limit for large models: many gigabytes may come from a slow disk."""

Functions = Mapping[str, Sequence[RewardPart]]
"""Reward functions by domain."""


class Patience(NamedTuple):
    """Time, workers and retries of a domain's reward functions."""

    timeout_s: float
    """Of one call."""
    num_workers: int
    """Processes."""
    retries: int = 0
    """Of a failed call."""
    backoff_s: float = 1.0
    """The wait before the first retry, doubled before each further one."""
    give_up_after: int = 0
    """See `RewardPool.score_group`."""


def functions_of(functions: Functions, domain: str) -> Sequence[RewardPart]:
    """The reward functions of the domain. Raises UserError if it has none."""
    parts = functions.get(domain) or functions.get(DEFAULT_DOMAIN)
    if parts is None:
        raise UserError(
            f"no reward function for the domain '{domain}': add it to reward.functions, or a "
            f"'{DEFAULT_DOMAIN}' entry, or see data.domain_key{hint(domain, functions)}"
        )

    return parts


class RewardSettings(NamedTuple):
    """Reward functions of a run, and how patiently they are called."""

    functions: Functions
    """Those of the domain "default" are for domains that are not listed."""
    patience: Patience
    """Of domains without another in `domains`."""
    domains: Mapping[str, Patience] = {}
    custom: tuple[str, str] | None = None
    """Path and name of the user's function."""
    answer_keys: Mapping[str, str] = {}
    """Columns of the ground truth, by domain."""

    @staticmethod
    def of(config: Config) -> "RewardSettings":
        """The settings of a config; loads neither functions nor torch."""
        reward = config.reward
        custom = config.custom_reward_function
        functions = reward_functions(config)
        own = {
            name: data.answer_key
            for name, data in config.data.domains.items()
            if data.answer_key is not None
        }

        return RewardSettings(
            functions,
            Patience(**patience_of(reward, "")),
            {name: Patience(**patience_of(reward, name)) for name in reward.domains},
            (custom.path, custom.name) if custom.path else None,
            answer_keys={**dict.fromkeys(functions, config.data.answer_key), **own},
        )

    def patience_by_domain(self) -> dict[str, Patience]:
        return {
            name: self.domains.get(name, self.patience) for name in (*self.functions, *self.domains)
        }

    def targets(self, domain: str) -> dict[str, str]:
        """The targets that the domain's pool loads, by name. Raises UserError for an unknown
        name."""
        parts = functions_of(self.functions, domain)
        targets = {part.name: self._target(part, domain) for part in parts}
        return {**targets, FAILS: FAILS_TARGET}

    def _target(self, part: RewardPart, domain: str) -> str:
        target = target_of(part.name, self.custom)
        if is_own(part.name):
            return with_answer_key(target, part.options, self.answer_keys.get(domain, "answer"))
        return with_options(target, part.options)


def pool_settings(settings: RewardSettings) -> dict[str, PoolSettings]:
    """The pools to start, by domain, or by target for a function that is too large to load twice.
    Raises UserError for an unknown name."""
    pools: dict[str, PoolSettings] = {}
    for domain, patience in settings.patience_by_domain().items():
        targets = settings.targets(domain)
        for name in [name for name in targets if is_large(name)]:
            target = targets.pop(name)
            pools[target] = alone(name, target, settings.patience.timeout_s)
        if set(targets) > {FAILS}:
            pools[domain] = PoolSettings(targets, patience.num_workers, patience.timeout_s)

    return pools


def is_large(name: str) -> bool:
    """Whether only one process may load the function of that name."""
    return name in REWARDS and bool(REWARDS[name].prepare)


def alone(name: str, target: str, timeout_s: float) -> PoolSettings:
    """A pool of one process without limits on memory and start time."""
    return PoolSettings({name: target, FAILS: FAILS_TARGET}, 1, timeout_s, 0, LARGE_START_TIMEOUT_S)


@contextmanager
def borrowed(settings: PoolSettings) -> Iterator[RewardPool]:
    """The pool with these settings that was started early, which stays for the run; else one of a
    single process, inside the context. Raises UserError if a function cannot be loaded."""
    for started, pool in _started:
        if started == settings:
            yield pool.result()
            return

    own = RewardPool(settings._replace(num_workers=1))
    try:
        yield own
    finally:
        own.close()


_started: list[tuple[PoolSettings, "Future[RewardPool]"]] = []


@contextmanager
def started_early(settings: PoolSettings) -> Iterator[None]:
    """Start that pool in the background for the first `take_pool` inside; if not taken, it is
    closed."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="distflow-early")
    _started.append((settings, thread.submit(RewardPool, settings)))

    try:
        yield
    finally:
        pool = _take_started(settings)
        if pool is not None:
            pool.close()
        thread.shutdown()


def take_pool(settings: PoolSettings) -> RewardPool:
    """The pool with these settings that was started early, or a new one; the caller must close it.

    Raises UserError if a function cannot be loaded.
    """
    return _take_started(settings) or RewardPool(settings)


def _take_started(settings: PoolSettings) -> RewardPool | None:
    entry = next((entry for entry in _started if entry[0] == settings), None)
    if entry is None:
        return None

    _started.remove(entry)
    try:
        return entry[1].result()
    # an import may have registered the function since; else the next attempt raises the same
    except UserError:
        return None


class Pools:
    """One `RewardPool` for each entry of `functions`, and for each domain with its own `Patience`;
    other domains share the pool of "default". A function that is too large to load twice has one
    pool for all domains."""

    def __init__(self, settings: RewardSettings) -> None:
        """Waits for the first process of each pool. Raises UserError if a function is unknown or
        cannot be loaded."""
        self._patience = settings.patience_by_domain()
        self._pools = _start_all(pool_settings(settings))
        self._by_function: dict[tuple[str, str], RewardPool] = {}

        for domain in self._patience:
            for name, target in settings.targets(domain).items():
                key = target if is_large(name) else domain
                if key in self._pools:
                    self._by_function[domain, name] = self._pools[key]

    def of(self, domain: str, name: str) -> RewardPool:
        """The pool of the domain's function of that name. Raises KeyError if there is none."""
        return self._by_function[self._place(domain), name]

    def patience(self, domain: str) -> Patience:
        return self._patience[self._place(domain)]

    async def call(self, name: str, arguments: Mapping[str, object]) -> RewardResult:
        """Call function `name` once, in the pool of the domain `data_source`, or, if that has no
        such function, in any other pool that has it."""
        domain = self._place(str(arguments["data_source"]))
        pool = self._by_function.get((domain, name))
        if pool is None:
            pool = next(each for each in self._pools.values() if name in each.functions)
        return await pool.call(name, arguments)

    def set_on_result(self, on_result: OnResult) -> None:
        for pool in self._pools.values():
            pool.on_result = on_result

    @property
    def takes_groups(self) -> frozenset[str]:
        """The functions that get all responses to a prompt at once."""
        return frozenset[str]().union(*(pool.takes_groups for pool in self._pools.values()))

    @property
    def takes_conversations(self) -> frozenset[str]:
        """The functions that see a whole episode."""
        return frozenset[str]().union(*(pool.takes_conversations for pool in self._pools.values()))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _place(self, domain: str) -> str:
        if domain in self._patience:
            return domain
        return DEFAULT_DOMAIN


def _start_all(wanted: Mapping[str, PoolSettings]) -> dict[str, RewardPool]:
    """At once, since each waits for a process that loads its functions. Raises UserError."""
    with ThreadPoolExecutor(len(wanted), thread_name_prefix="distflow-pools") as threads:
        starting = {key: threads.submit(take_pool, each) for key, each in wanted.items()}

    started = dict[str, RewardPool]()
    failure: BaseException | None = None
    for key, pool in starting.items():
        failure = failure or pool.exception()
        if pool.exception() is None:
            started[key] = pool.result()

    if failure is not None:
        for each in started.values():
            each.close()
        raise failure

    return started
