"""A rollout engine for several policies, those of the agents of episodes: each policy has its own
engine."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from itertools import chain

from torch import Tensor

from distflow.data.sample import Segment
from distflow.rollout.engine import (
    Activity,
    GenerateRequest,
    RolloutEngine,
    WeightReceipt,
    take_activity,
)
from distflow.scheduling.group_states import Version


class MultiPolicyRollout:
    """A `RolloutEngine` that passes each request to the engine of its policy. engines: by policy.
    trained: the policies that get weights, whose names begin with the policy's and a dot; the
    weights of the others never change."""

    def __init__(self, engines: Mapping[str, RolloutEngine], trained: Collection[str]) -> None:
        self._engines = engines
        self._trained = trained

    async def __aenter__(self) -> "MultiPolicyRollout":
        async with AsyncExitStack() as entered:
            for engine in self._engines.values():
                await entered.enter_async_context(engine)
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._entered.aclose()

    @property
    def version(self) -> Version:
        """The oldest of the engines' versions, from which the staleness bound counts."""
        return min(engine.version for engine in self._engines.values())

    @property
    def num_generated_tokens(self) -> int:
        return sum(getattr(engine, "num_generated_tokens", 0) for engine in self._engines.values())

    @property
    def repeats_draws(self) -> bool:
        return all(getattr(engine, "repeats_draws", True) for engine in self._engines.values())

    def take_activity(self) -> list[Activity]:
        found = chain.from_iterable(map(take_activity, self._engines.values()))
        return sorted(found, key=lambda activity: activity.t0)

    async def generate(self, request: GenerateRequest) -> tuple[Segment, ...]:
        """Raises ValueError for a policy that no engine serves."""
        engine = self._engines.get(request.policy)
        if engine is None:
            raise ValueError(
                f"no engine serves the policy '{request.policy}': there are "
                f"{', '.join(self._engines)}"
            )

        return await engine.generate(request)

    async def pause(self, release: bool = False) -> None:
        for policy, engine in self._engines.items():
            # frozen weights would not be sent again
            await engine.pause(release and policy in self._trained)

    async def resume(self) -> None:
        for engine in self._engines.values():
            await engine.resume()

    async def hashes(self) -> dict[str, str]:
        found = dict[str, str]()
        for policy, engine in self._engines.items():
            found |= _with_policy(policy, await engine.hashes())
        return found

    async def load_weights(
        self, version: Version, weights: Iterable[tuple[str, Tensor]] | None
    ) -> WeightReceipt:
        parts: dict[str, list[tuple[str, Tensor]]] = {policy: [] for policy in self._trained}
        for full_name, tensor in weights or ():
            policy, _, name = full_name.partition(".")
            if policy not in parts:
                raise ValueError(f"{full_name}: no trained policy has the name '{policy}'")
            parts[policy].append((name, tensor))

        receipts = dict[str, WeightReceipt]()
        for policy, engine in self._engines.items():
            own = None
            if weights is not None and policy in parts:
                own = parts[policy]
            receipts[policy] = await engine.load_weights(version, own)

        hashes = dict[str, str]()
        for policy, receipt in receipts.items():
            hashes |= _with_policy(policy, receipt.hashes)

        return WeightReceipt(
            version,
            hashes,
            shared=all(receipts[policy].shared for policy in self._trained),
            version_only=weights is None,
        )


def _with_policy(policy: str, hashes: Mapping[str, str]) -> dict[str, str]:
    """By names that begin with the policy's."""
    return {f"{policy}.{name}": own for name, own in hashes.items()}
