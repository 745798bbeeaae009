"""Engines of several policies behind one: whose requests and weights go where, and how old they
are."""

import asyncio
from dataclasses import replace

import pytest

from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.multi_policy_engine import MultiPolicyRollout
from distflow.scheduling.group_states import Version
from tests.rollout.drive import DEADLINE_S, make_engine, make_model, prompt_of, request_of

NAMES = ("solver", "checker", "judge")


def test_requests_and_weights_go_to_their_policy_and_staleness_counts_from_the_oldest():
    models = {name: make_model(seed=seed) for seed, name in enumerate(NAMES)}
    later = {name: list(make_model(seed=9).named_parameters()) for name in NAMES[:2]}
    own = {name: make_engine(model) for name, model in models.items()}
    request = request_of(prompt_of(5), greedy=True)

    async def story(engines: MultiPolicyRollout) -> None:
        with pytest.raises(
            ValueError,
            match="'critic': .* solver, checker, judge",
        ):
            await engines.generate(replace(request, policy="critic"))

        with pytest.raises(ValueError, match=r"judge\..*: .*'judge'"):
            await engines.load_weights(Version(0, 1), [("judge.x", later["solver"][0][1])])
        said = {name: (await engines.generate(replace(request, policy=name)))[0] for name in NAMES}
        assert len({tuple(each.token_ids) for each in said.values()}) == 3
        await own["solver"].load_weights(Version(0, 1), later["solver"])
        assert engines.version == Version(0, 0), "the staleness is that of the older policy"
        both = [
            (f"{name}.{key}", tensor) for name, weights in later.items() for key, tensor in weights
        ]
        await engines.load_weights(Version(0, 2), both)
        assert engines.version == Version(0, 2)
        hashes = await engines.hashes()
        frozen = stripe_hashes(list(models["judge"].named_parameters()))
        assert {name: hashes[f"judge.{name}"] for name in frozen} == frozen
        again = (await engines.generate(replace(request, policy="judge")))[0]
        assert again.token_ids == said["judge"].token_ids
        two = [(await engines.generate(replace(request, policy=name)))[0] for name in NAMES[:2]]
        assert two[0].token_ids == two[1].token_ids != said["solver"].token_ids, (
            "both have the same weights now"
        )

    async def run() -> None:
        async with MultiPolicyRollout(own, NAMES[:2]) as engines:
            await asyncio.wait_for(story(engines), DEADLINE_S)

    asyncio.run(run())
