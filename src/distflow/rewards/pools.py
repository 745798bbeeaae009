"""A pool of verifiers for each domain: what hangs in one takes no place from another."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from distflow.config.errors import UserError, hint
from distflow.rewards.ahead import PoolSettings, take_pool
from distflow.rewards.functions import Functions, find_targets
from distflow.rewards.pool import MEMORY_BYTES, Told, VerifierPool
from distflow.rewards.verdict import Verdict

_Part = TypeVar("_Part")
DEFAULT_DOMAIN = "default"


class Patience(NamedTuple):
    """What the verdicts of a domain may cost.

    timeout_s: one verdict. num_workers: processes. retries: how often one that failed is asked for again; backoff_s:
    the wait before the first of these, doubled before each further one.
    """

    timeout_s: float
    num_workers: int
    retries: int = 0
    backoff_s: float = 1.0


def functions_of(functions: Mapping[str, Sequence[_Part]], domain: str) -> Sequence[_Part]:
    """The parts that judge the domain. Raises UserError where none do."""
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
    """What `Pools` starts, by domain. Raises UserError for a name that means no function."""
    return {
        name: PoolSettings(
            find_targets(functions_of(functions, name), custom), each.num_workers, each.timeout_s, memory_bytes
        )
        for name, each in _patience_by_domain(functions, patience, domains).items()
    }


def _patience_by_domain(
    functions: Functions, patience: Patience, domains: Mapping[str, Patience]
) -> dict[str, Patience]:
    return {name: domains.get(name, patience) for name in (*functions, *domains)}


class Pools:
    """One `VerifierPool` for each entry of `functions`, and for each domain with a patience of its own; domains that
    neither names share that of "default"."""

    def __init__(
        self,
        functions: Functions,
        patience: Patience,
        domains: Mapping[str, Patience] | None = None,
        custom: tuple[str, str] | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Waits for the first process of each. Raises UserError where a function is unknown or cannot be loaded."""
        self._patience = _patience_by_domain(functions, patience, domains or {})
        settings = pool_settings(functions, patience, domains or {}, custom, memory_bytes)
        self._functions = {name: frozenset(each.functions) for name, each in settings.items()}
        self._pools = _start(settings)

    def of(self, domain: str) -> VerifierPool:
        """The pool that judges the domain. Raises KeyError where none does."""
        return self._pools[self._place(domain)]

    def patience(self, domain: str) -> Patience:
        return self._patience[self._place(domain)]

    async def judge(self, name: str, arguments: Mapping[str, object]) -> Verdict:
        """What function `name` says once, in the pool of the domain `data_source`; where that domain has no such
        function, in any that has."""
        domain = self._place(str(arguments["data_source"]))
        if name not in self._functions.get(domain, ()):
            domain = next(other for other, names in self._functions.items() if name in names)
        return await self._pools[domain].judge(name, arguments)

    def tell(self, told: Told) -> None:
        """Have `told` called with every verdict, see `VerifierPool`."""
        for pool in self._pools.values():
            pool.told = told

    @property
    def takes_groups(self) -> frozenset[str]:
        """Functions that are handed all answers to a prompt at a time."""
        return frozenset[str]().union(*(pool.takes_groups for pool in self._pools.values()))

    def pids(self) -> list[int]:
        """Of the processes that are up."""
        return sorted(pid for pool in self._pools.values() for pid in pool.pids())

    def close(self) -> None:
        """Kill all processes; see `VerifierPool.close`."""
        _close(self._pools.values())

    def _place(self, domain: str) -> str:
        return domain if domain in self._patience else DEFAULT_DOMAIN


def _start(settings: Mapping[str, PoolSettings]) -> dict[str, VerifierPool]:
    """All at once: each waits for a process that loads its functions."""
    with ThreadPoolExecutor(len(settings), thread_name_prefix="distflow-pools") as threads:
        starting = {name: threads.submit(take_pool, each) for name, each in settings.items()}
    failure = next((error for each in starting.values() if (error := each.exception())), None)
    if failure is not None:
        _close([each.result() for each in starting.values() if each.exception() is None])
        raise failure
    return {name: each.result() for name, each in starting.items()}


def _close(pools: Iterable[VerifierPool]) -> None:
    known: Sequence[VerifierPool] = list(pools)
    with ThreadPoolExecutor(max(len(known), 1), thread_name_prefix="distflow-pools") as threads:
        list(threads.map(VerifierPool.close, known))
