"""The canary: when it sings, what it sings, and which differences hold the run."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distflow.algorithms.mismatch_check import Tolerance
from distflow.checks import canary
from distflow.checks.canary import Canary
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.models.loading import load_model, load_tokenizer
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.embedded.host_lane import RequestLane
from distflow.rollout.engine import SamplingParams
from distflow.scheduling.group_states import Version
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.tiny_models import write_tiny_model

PROMPTS = [(5, 6, 7), (8,), (9, 10), (11, 12, 13, 14)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def make_canary(
    folder: Path, *, shares: bool = False, frequency: int = 1, exact: bool = True
) -> Canary:
    model = load_model(folder)
    trainer = TorchTrainEngine(
        model,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-3),
        schedule=make_schedule("constant", total_steps=1),
        temperature=0.7,
    )
    engine = EmbeddedEngine(load_model(folder), load_tokenizer(str(folder)), version=Version(0, 0))
    sampling = SamplingParams(12, temperature=0.7)

    return Canary(
        engine,
        trainer,
        PROMPTS,
        sampling,
        Tolerance.of(exact),
        frequency,
        shares,
        lambda agent: sampling.temperature,
    )


def song_of(canary: Canary) -> Batch:
    async def sing() -> Batch:
        async with canary.rollout:  # type: ignore[attr-defined]
            return await canary.generate_responses()

    return asyncio.run(sing())


def off_key(song: Batch, by: float) -> Batch:
    copy = song.only(song.names)
    copy["rollout_log_probs"] = song.flat("rollout_log_probs") - by
    return copy


def test_it_sings_greedily_at_the_runs_temperature_and_is_judged_by_the_trainer(folder):
    canary = make_canary(folder)
    song = song_of(canary)
    assert len(song) == 4 and int(song.lengths("response").max()) <= 12
    found = canary.compare(song, at_start=True)
    assert found["canary/max_abs"] < 1e-5

    for i, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = canary.actor.model(input_ids=torch.tensor([prompt])).logits[0, -1]  # type: ignore[attr-defined]
        assert int(song["response_ids"][i, 0]) == int(logits.argmax())

    again = song_of(make_canary(folder))
    assert torch.equal(again.flat("response_ids"), song.flat("response_ids"))


def test_when_it_sings(folder):
    own = make_canary(folder, frequency=2)
    assert own.is_due(at_start=True)
    assert [own.is_due(at_start=False) for _ in range(4)] == [False, True, False, True]
    shared = make_canary(folder, shares=True)
    assert shared.is_due(at_start=True) and not any(shared.is_due(at_start=False) for _ in range(4))
    never = make_canary(folder, frequency=0)
    assert not never.is_due(at_start=True) and not never.is_due(at_start=False)


@pytest.mark.parametrize(("exact", "fine", "wrong"), [(True, 5e-4, 2e-3), (False, 0.3, 0.6)])
def test_at_the_start_the_engine_must_be_the_trainer(folder, exact, fine, wrong):
    canary = make_canary(folder, exact=exact)
    song = song_of(canary)
    canary.compare(off_key(song, fine), at_start=True)
    with pytest.raises(TrustError, match=f"canary: .* {wrong:g}"):
        canary.compare(off_key(song, wrong), at_start=True)


def test_later_it_may_be_five_times_as_far_off_as_at_the_start(folder):
    canary = make_canary(folder, exact=False)
    song = song_of(canary)
    canary.compare(off_key(song, 0.05), at_start=True)
    canary.compare(off_key(song, 0.24), at_start=False)
    with pytest.raises(TrustError, match=r"canary: .* 0\.26 .*limits 0\.25 and 0\.25"):
        canary.compare(off_key(song, 0.26), at_start=False)


def test_a_start_that_was_exact_leaves_the_tolerance(folder):
    canary = make_canary(folder)
    song = song_of(canary)
    canary.compare(song, at_start=True)
    canary.compare(off_key(song, 9e-5), at_start=False)
    with pytest.raises(TrustError, match="limits 0.0001 and 0.001"):
        canary.compare(off_key(song, 2e-4), at_start=False)
    one = song.flat("rollout_log_probs").clone()
    one[3] -= 2e-3
    song["rollout_log_probs"] = one
    with pytest.raises(TrustError, match="0.002 at most"):
        canary.compare(song, at_start=False)


@pytest.mark.parametrize("at_start", [True, False])
def test_a_song_that_is_no_number_is_no_pass(folder, at_start):
    canary = make_canary(folder)
    song = song_of(canary)
    if not at_start:
        canary.compare(song, at_start=True)
    with pytest.raises(TrustError, match="canary: .* nan "):
        canary.compare(off_key(song, math.nan), at_start=at_start)


@pytest.mark.parametrize("stale", [True, False])
def test_keys_and_values_that_outlive_their_weights_are_found_behind_short_prompts(
    folder, monkeypatch, stale
):
    if stale:
        step = RequestLane.step
        monkeypatch.setattr(RequestLane, "forget_prefixes", lambda lane: None)
        monkeypatch.setattr(RequestLane, "step", lambda lane, weights: step(lane, "all weights"))

    own = make_canary(folder)
    spec: Any = SimpleNamespace(
        config=SimpleNamespace(
            data=SimpleNamespace(max_prompt_length=24), trust=SimpleNamespace(canary_freq=1)
        ),
        rows=[SimpleNamespace(prompt_ids=prompt, images=()) for prompt in PROMPTS],
        sampling=own.sampling,
        tolerance=own.tolerance,
        shares_weights=False,
        temperature_of_agent=own.temperature_of,
    )
    resources: Any = SimpleNamespace(rollout=own.rollout, actor=own.actor, stop_token_ids=())
    own = canary.make_canary(spec, resources)
    assert all(len(prompt) == 24 for prompt in own.prompts)

    async def over_a_sync() -> None:
        async with own.rollout:  # type: ignore[attr-defined]
            own.compare(await own.generate_responses(), at_start=True)
            with torch.no_grad():
                for weight in own.actor.model.parameters():  # type: ignore[attr-defined]
                    weight.mul_(1.01)
            await own.rollout.load_weights(Version(0, 1), list(own.actor.weights()))
            own.compare(await own.generate_responses(), at_start=False)

    if not stale:
        asyncio.run(over_a_sync())
        return

    with pytest.raises(TrustError, match="canary: .*KV"):
        asyncio.run(over_a_sync())
