"""Reward functions in separate Ray actors, anywhere in the cluster, shared by all workers of a
run."""

import asyncio
import os
import secrets
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from distflow.cluster.ray_cluster import PLACED_WITHIN_S
from distflow.cluster.remote_calls import reply
from distflow.errors import UserError
from distflow.rewards.pool.pool import Calls, OnRepeat, Pool, PoolSettings, RewardPool
from distflow.rewards.reward_results import Error, RewardResult
from distflow.runtime.spec import Spec
from distflow.runtime.worker_place import Home

_AT_ONCE = 10_000  # requests that may wait in an actor: its pools queue them by domain
_PULSE = "heartbeat"


# Ray's types do not know it
@ray.remote(concurrency_groups={_PULSE: 1})  # type: ignore[call-overload]
class RewardActor:
    """Starts pools on request, and calls reward functions in their processes, which may hang or
    crash."""

    def __init__(self, home: Home) -> None:
        os.umask(0o077)
        home.enter()
        self._pools: dict[str, asyncio.Future[RewardPool]] = {}
        self._born = secrets.token_hex(8)

    async def start(
        self, settings: PoolSettings
    ) -> tuple[str, frozenset[str], frozenset[str], frozenset[str]]:
        """A unique id of this start of the actor, and which functions take groups, batches and
        conversations.

        Raises UserError."""
        pool = await self._pool(settings)
        return self._born, pool.takes_groups, pool.takes_batches, pool.takes_conversations

    async def call(
        self,
        settings: PoolSettings,
        name: str,
        asked: Calls,
        timeout_s: float | None,
        give_up_after: int,
    ) -> tuple[str, list[RewardResult], int]:
        """The id, the results of the pool with these settings, and the number of calls retried
        because a process died. An actor that Ray has restarted has no pool yet."""
        pool = await self._pool(settings)
        again: list[int] = []
        reward_results = await pool.score_group(name, asked, timeout_s, again.append, give_up_after)
        return self._born, reward_results, sum(again)

    @ray.method(concurrency_group=_PULSE)
    async def alive(self) -> None:
        """A heartbeat."""

    async def _pool(self, settings: PoolSettings) -> RewardPool:
        key = repr(settings)
        if key not in self._pools:
            self._pools[key] = asyncio.ensure_future(asyncio.to_thread(RewardPool, settings))
        try:
            return await asyncio.shield(self._pools[key])
        except UserError:
            self._pools.pop(key, None)  # the next request tries again
            raise


class RewardActorPool(Pool):
    """A pool in the actors: each request goes to the one with the fewest open requests of this
    worker."""

    def __init__(self, reward_actors: Sequence[Any], settings: PoolSettings) -> None:
        """Waits until each actor has started the pool. Raises UserError."""
        self._reward_actors = reward_actors
        self._settings = settings
        self._under_way = [0] * len(reward_actors)
        started = [
            reply(each)
            for each in [reward_actor.start.remote(settings) for reward_actor in reward_actors]
        ]
        self._born = [born for born, *_ in started]
        _, self.takes_groups, self.takes_batches, self.takes_conversations = started[0]

    async def _score_group(
        self,
        name: str,
        asked: Calls,
        timeout_s: float | None,
        on_repeat: OnRepeat,
        give_up_after: int,
    ) -> list[RewardResult]:
        if len(asked) > 1 and name not in self.takes_groups:
            one_by_one = (
                self._score_group(name, [each], timeout_s, on_repeat, give_up_after)
                for each in asked
            )
            return [reward_result for (reward_result,) in await asyncio.gather(*one_by_one)]
        number = min(range(len(self._reward_actors)), key=self._under_way.__getitem__)
        self._under_way[number] += 1
        known = self._born[number]
        reward_results: list[RewardResult]
        try:
            born, reward_results, again = await self._reward_actors[number].call.remote(
                self._settings,
                name,
                [dict(arguments) for arguments in asked],
                timeout_s,
                give_up_after,
            )
            if again := again + len(asked) * (born != known):
                on_repeat(again)
            self._born[number] = born
        except RayActorError:
            # see `start_reward_actors`
            reward_results = [Error("the reward actor has died, twice")] * len(asked)
        except RayTaskError as err:
            if isinstance(err.cause, UserError):
                raise err.cause from None
            reward_results = [
                Error(f"the reward actor failed: {type(err.cause).__name__}: {err.cause}")
            ] * len(asked)
        finally:
            self._under_way[number] -= 1
        return reward_results

    def close(self) -> None:
        """Nothing to close: the actors belong to the run."""
        self.closed = True


def start_reward_actors(spec: Spec) -> list[Any]:
    """The actors that the config requires. One that dies is restarted, and its calls are retried.
    Raises UserError if the cluster has no room for them."""
    needs = spec.needs
    reward_actors = [  # Ray's handles have no types
        cast(Any, RewardActor)
        .options(
            num_cpus=needs.reward_cpus,
            max_concurrency=_AT_ONCE,
            max_restarts=-1,
            max_task_retries=1,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": dict(needs.env)} if needs.env else None,
        )
        .remote(Home.of_driver())
        for _ in range(needs.num_reward_actors)
    ]
    try:
        ray.get(
            [reward_actor.alive.remote() for reward_actor in reward_actors], timeout=PLACED_WITHIN_S
        )
    except GetTimeoutError:
        for reward_actor in reward_actors:
            ray.kill(reward_actor)
        raise UserError(
            f"the cluster has no room for {needs.num_reward_actors} reward actors of "
            f"{needs.reward_cpus} CPUs in "
            "addition to the workers: lower reward.num_actors or reward.actor_cpus, or add machines"
        ) from None
    return reward_actors
