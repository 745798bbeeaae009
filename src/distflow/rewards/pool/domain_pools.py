"""A pool of reward workers for each domain, so that a hang in one does not block another, and their settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from distflow.builtin_names import REWARDS
from distflow.config import Config
from distflow.config.keys.reward import patience_of
from distflow.config.per_domain import reward_functions
from distflow.errors import UserError, hint
from distflow.rewards.functions import FAILS, FAILS_TARGET, Functions, find_targets
from distflow.rewards.pool.pool import MEMORY_BYTES, OnAgain, Told
from distflow.rewards.pool.prestart import PoolSettings, take_pool
from distflow.rewards.score import RewardResult

_Part = TypeVar("_Part")
DEFAULT_DOMAIN = "default"
LARGE_START_TIMEOUT_S = 1800.0
"""A model of many gigabytes may come from a slow disk."""


class Pool(Protocol):
    """A domain's reward workers, here as a `RewardPool` or elsewhere; see there."""

    told: Told
    takes_groups: frozenset[str]
    takes_batches: frozenset[str]

    @property
    def closed(self) -> bool: ...

    async def score_group(
        self,
        name: str,
        asked: Sequence[Mapping[str, object]],
        timeout_s: float | None = None,
        on_again: OnAgain = ...,
    ) -> list[RewardResult]: ...

    async def call(
        self,
        name: str,
        arguments: Mapping[str, object],
        timeout_s: float | None = None,
        on_again: OnAgain = ...,
    ) -> RewardResult: ...

    def pids(self) -> list[int]: ...

    def close(self) -> None: ...


StartPool = Callable[[PoolSettings], Pool]
"""Raises UserError if a function cannot be loaded."""


class Patience(NamedTuple):
    """Time, workers and retries of a domain's reward functions.

    timeout_s: of one call. num_workers: processes. retries: of a failed call; backoff_s: the wait before the first
    retry, doubled before each further one.
    """

    timeout_s: float
    num_workers: int
    retries: int = 0
    backoff_s: float = 1.0


def functions_of(functions: Mapping[str, Sequence[_Part]], domain: str) -> Sequence[_Part]:
    """The reward functions of the domain. Raises UserError if it has none."""
    parts = functions.get(domain) or functions.get(DEFAULT_DOMAIN)
    if parts is None:
        raise UserError(
            f"no reward function for the domain '{domain}': add it to reward.functions, or a '{DEFAULT_DOMAIN}' "
            f"entry, or see data.domain_key{hint(domain, functions)}"
        )
    return parts


def pool_settings(
    functions: Functions,
    patience: Patience,
    domains: Mapping[str, Patience],
    custom: tuple[str, str] | None,
    memory_bytes: int = MEMORY_BYTES,
) -> dict[str, PoolSettings]:
    """The pools to start, by domain, or by target for what is too large to load twice. Raises UserError for an unknown
    name."""
    settings: dict[str, PoolSettings] = {}
    for domain, each in _patience_by_domain(functions, patience, domains).items():
        targets = find_targets(functions_of(functions, domain), custom)
        for name in [name for name in targets if is_large(name)]:
            target = targets.pop(name)
            settings[target] = alone(name, target, patience.timeout_s)
        if set(targets) > {FAILS}:
            settings[domain] = PoolSettings(targets, each.num_workers, each.timeout_s, memory_bytes)
    return settings


def is_large(name: str) -> bool:
    """Whether only one process may load the function of that name."""
    return name in REWARDS and bool(REWARDS[name].prepare)


def alone(name: str, target: str, timeout_s: float) -> PoolSettings:
    """A pool of one process without limits of memory and start time."""
    return PoolSettings({name: target, FAILS: FAILS_TARGET}, 1, timeout_s, 0, LARGE_START_TIMEOUT_S)


def _patience_by_domain(
    functions: Functions, patience: Patience, domains: Mapping[str, Patience]
) -> dict[str, Patience]:
    return {name: domains.get(name, patience) for name in (*functions, *domains)}


class Pools:
    """One `RewardPool` for each entry of `functions`, and for each domain with its own `Patience`; other domains share
    that of "default". What is too large to load twice has one pool for all domains."""

    def __init__(
        self,
        functions: Functions,
        patience: Patience,
        domains: Mapping[str, Patience] | None = None,
        custom: tuple[str, str] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        start: StartPool = take_pool,
    ) -> None:
        """start: starts pools of functions that may be loaded twice. Waits for the first process of each. Raises
        UserError if a function is unknown or cannot be loaded."""
        self._patience = _patience_by_domain(functions, patience, domains or {})
        settings = pool_settings(functions, patience, domains or {}, custom, memory_bytes)
        self._targets = {
            (domain, name): target
            for domain in self._patience
            for name, target in find_targets(functions_of(functions, domain), custom).items()
            if is_large(name)
        }
        self._functions = {name: frozenset(each.functions) for name, each in settings.items()}
        large = set(self._targets.values())
        self._pools = _start(settings, {name: take_pool if name in large else start for name in settings})

    def of(self, domain: str, name: str = "") -> Pool:
        """The pool of the domain's function of that name. Raises KeyError if there is none."""
        place = self._place(domain)
        return self._pools[self._targets.get((place, name), place)]

    def patience(self, domain: str) -> Patience:
        return self._patience[self._place(domain)]

    async def call(self, name: str, arguments: Mapping[str, object]) -> RewardResult:
        """Call function `name` once, in the pool of the domain `data_source`, or, if that has no such function, in any
        pool that has."""
        domain = self._place(str(arguments["data_source"]))
        place = self._targets.get((domain, name), domain)
        if name not in self._functions.get(place, ()):
            place = next(other for other, names in self._functions.items() if name in names)
        return await self._pools[place].call(name, arguments)

    def tell(self, told: Told) -> None:
        """Have `told` called with every result, see `RewardPool`."""
        for pool in self._pools.values():
            pool.told = told

    @property
    def takes_groups(self) -> frozenset[str]:
        """Functions that get all responses to a prompt at once."""
        return frozenset[str]().union(*(pool.takes_groups for pool in self._pools.values()))

    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return sorted(pid for pool in self._pools.values() for pid in pool.pids())

    def close(self) -> None:
        """Kill all processes; see `RewardPool.close`."""
        _close(self._pools.values())

    def _place(self, domain: str) -> str:
        return domain if domain in self._patience else DEFAULT_DOMAIN


def _start(settings: Mapping[str, PoolSettings], start: Mapping[str, StartPool]) -> dict[str, Pool]:
    """Start all at once: each waits for a process that loads its functions."""
    with ThreadPoolExecutor(len(settings), thread_name_prefix="distflow-pools") as threads:
        starting = {name: threads.submit(start[name], each) for name, each in settings.items()}
    failure = next((error for each in starting.values() if (error := each.exception())), None)
    if failure is not None:
        _close([each.result() for each in starting.values() if each.exception() is None])
        raise failure
    return {name: each.result() for name, each in starting.items()}


def _close(pools: Iterable[Pool]) -> None:
    known = list(pools)
    with ThreadPoolExecutor(max(len(known), 1), thread_name_prefix="distflow-pools") as threads:
        list(threads.map(lambda pool: pool.close(), known))


class Verifiers(NamedTuple):
    """The first arguments of `pool_settings`. domains: those with their own `Patience`. custom: (path, name) of the
    user's function."""

    functions: Functions
    patience: Patience
    domains: dict[str, Patience]
    custom: tuple[str, str] | None


def verifiers_of(config: Config) -> Verifiers:
    """The reward functions of a config; loads neither them nor torch."""
    settings, custom = config.reward, config.custom_reward_function
    return Verifiers(
        reward_functions(config),
        Patience(**patience_of(settings, "")),
        {name: Patience(**patience_of(settings, name)) for name in settings.domains},
        (custom.path, custom.name) if custom.path else None,
    )
