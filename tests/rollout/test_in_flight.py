"""Weights that change under running sequences: which weights made which token, over which keys and
values."""

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from distflow.data.sample import Segment
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest, Stream
from distflow.rollout.engine_weights import stripe_hashes
from distflow.scheduling.group_states import Version
from tests.rollout.drive import (
    forward_log_probs,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    tokens_after,
    tokens_of,
    with_engine,
)

PROMPT = prompt_of(12)


def make_models(count: int, family: str = "llama") -> list[Any]:
    """Of the same shapes and different weights, in float64."""
    models = [make_model(family, seed=seed).double() for seed in range(count)]
    for number, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.03 * number)
    return models


@torch.no_grad()
def mixed_cache_log_probs(
    models: Mapping[int, Any], prompt: tuple[int, ...], generation: Segment
) -> list[float]:
    """By transformers' own cache, token by token: each forward under the weights that drew its
    token, over what the forwards before it left."""
    fed = list(prompt)
    cache = None
    log_probs = []
    for token, version in zip(generation.token_ids, generation.versions, strict=True):
        out = models[version](input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
        fed = [token]
        cache = out.past_key_values
        log_probs.append(out.logits[0, -1].log_softmax(-1)[token].item())

    return log_probs


def own_context_log_probs(
    models: Mapping[int, Any], prompt: tuple[int, ...], generation: Segment
) -> list[float]:
    """Each token under the weights that drew it, its whole context too."""
    under = {v: forward_log_probs(models[v], prompt, generation) for v in set(generation.versions)}
    return [under[version][index] for index, version in enumerate(generation.versions)]


REFERENCES = {"keep": mixed_cache_log_probs, "recompute": own_context_log_probs}


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_token_of_three_versions_has_the_log_prob_of_its_weights(kv_on_update, family):
    served, *models = make_models(1, family) + make_models(3, family)
    request = request_of(PROMPT, (0, 1), max_tokens=150)
    by_version = dict(enumerate(models))

    async def story(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(request))
        for step in (1, 2):
            await tokens_after(engine, 40)
            await engine.load_weights(Version(0, step), models[step].named_parameters())

        for generation in await task:
            versions = list(generation.versions)
            assert set(versions) == {0, 1, 2} and versions == sorted(versions)
            assert min(generation.versions.count(version) for version in (0, 1, 2)) >= 10
            got = generation.rollout_log_probs
            other = {"keep": "recompute", "recompute": "keep"}[kv_on_update]
            expected = REFERENCES[kv_on_update](by_version, PROMPT, generation)
            assert got == pytest.approx(expected, abs=1e-5)
            mistaken = REFERENCES[other](by_version, PROMPT, generation)
            assert max(abs(a - b) for a, b in zip(got, mistaken, strict=True)) > 0.01

    with_engine(make_engine(served, kv_on_update=kv_on_update), story)


def test_an_alias_keeps_weights_cached_prompts_and_what_runs():
    model = make_model("qwen2")
    long, short = (
        request_of(PROMPT, (0, 1), max_tokens=120),
        request_of(PROMPT, (2,), max_tokens=30),
    )
    prefilled: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: prefilled.append(tuple(inputs[0].shape))
    )

    async def story(engine: EmbeddedEngine) -> None:
        prefilled.clear()
        before = stripe_hashes(model.named_parameters())
        first = asyncio.create_task(engine.generate(long))
        await tokens_after(engine, 20)
        receipt = await engine.load_weights(Version(0, 3), None)
        assert (
            receipt.version_only
            and receipt.version == engine.version == Version(0, 3)
            and receipt.hashes == {}
        )
        second = asyncio.create_task(engine.generate(short))
        results = list(await asyncio.gather(first, second))
        assert [shape for shape in prefilled if len(shape) == 2] == [(1, len(PROMPT))]

        for generation in results[0]:
            count = generation.versions.index(3)
            assert list(generation.versions) == [0] * count + [3] * (120 - count) and count >= 10
            expected = forward_log_probs(model, PROMPT, generation)
            assert generation.rollout_log_probs == pytest.approx(expected, abs=1e-4)

        assert set(results[1][0].versions) == {3}
        assert (
            tokens_of(results) == undisturbed and stripe_hashes(model.named_parameters()) == before
        )

    undisturbed = tokens_of(run_all(make_engine(model), [long, short]))
    for kv_on_update in ("keep", "recompute", "abort"):
        with_engine(make_engine(model, kv_on_update=kv_on_update), story)


def test_abort_ends_what_has_begun_and_leaves_the_rest():
    """Sample 0 has ended by a stop token when the weights come, 1 and 2 are being decoded, 3 waits
    for a slot."""
    model = make_model()
    other = make_models(2)[1].float()
    free = run_all(make_engine(model), [request_of(PROMPT, (0, 1), max_tokens=120)])[0]
    stop = next(token for token in free[0].token_ids[3:] if token not in free[1].token_ids)
    end = free[0].token_ids.index(stop) + 1
    mixed = request_of(PROMPT, (0, 1, 2, 3), max_tokens=120, stop_token_ids=(stop,))
    begun = request_of(prompt_of(7), (0, 1), max_tokens=500, row=1)

    async def story(engine: EmbeddedEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request)) for request in (begun, mixed)]
        await tokens_after(engine, 4 * end + 12)
        await engine.pause()
        await engine.load_weights(Version(0, 1), other.named_parameters())
        aborted = await asyncio.wait_for(tasks[0], 10)  # answered though the engine is paused
        assert not tasks[1].done()
        await engine.resume()

        first, second, third, last = await tasks[1]
        for generation in (*aborted, second, third):
            assert generation.finish_reason == "abort" and set(generation.versions) == {0}
            assert (
                len(generation.token_ids)
                == len(generation.rollout_log_probs)
                == len(generation.versions)
                >= 1
            )

        assert second.token_ids == free[1].token_ids[: len(second.token_ids)]
        assert (first.finish_reason, first.token_ids, set(first.versions)) == (
            "stop",
            free[0].token_ids[:end],
            {0},
        )
        assert last.finish_reason != "abort" and set(last.versions) == {1}
        assert last.rollout_log_probs == pytest.approx(
            forward_log_probs(other, PROMPT, last), abs=1e-4
        )

    with_engine(make_engine(model, max_num_seqs=4, kv_on_update="abort"), story)


def test_an_aborted_answer_asked_for_again_is_that_of_the_new_weights():
    model = make_model()
    other = make_models(2)[1].float()
    request = request_of(PROMPT, (0, 1), max_tokens=60)

    async def story(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(request))
        await tokens_after(engine, 20)
        await engine.load_weights(Version(0, 1), other.named_parameters())
        assert {generation.finish_reason for generation in (await task)} == {"abort"}
        assert tokens_of([await engine.generate(request)]) == expected

    expected = tokens_of(run_all(make_engine(other), [request]))
    with_engine(make_engine(model, kv_on_update="abort"), story)


def test_bad_weights_in_flight_disturb_nothing():
    model = make_model()
    other = make_models(2)[1].float()
    request = request_of(PROMPT, (0, 1), max_tokens=150)

    async def story(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(request))
        await tokens_after(engine, 20)
        half = list(other.named_parameters())[:3]
        with pytest.raises(ValueError, match="model.layers.*: missing"):
            await engine.load_weights(Version(0, 1), half)
        with pytest.raises(ValueError, match="versions never decrease"):
            await engine.load_weights(Version(-1, 9), None)
        result = await task
        assert tokens_of([result]) == undisturbed and engine.version == Version(0, 0)
        assert {version for generation in result for version in generation.versions} == {0}

    undisturbed = tokens_of(run_all(make_engine(model), [request]))
    for kv_on_update in ("keep", "recompute", "abort"):
        with_engine(make_engine(model, kv_on_update=kv_on_update), story)


@pytest.mark.slow
def test_a_storm_of_updates_never_takes_a_version_back_nor_runs_ahead_of_its_weights():
    """Another thread sends weights, aliases and versions that are too old, while a third looks at
    the version."""
    served, *models = [model.float() for model in make_models(1) + make_models(4)]
    made_by: dict[int, Any] = {0: models[0]}
    requests = [request_of(prompt_of(4 + row), (0, 1), row=row, max_tokens=80) for row in range(3)]
    over, seen = threading.Event(), list[Version]()
    served.model.norm.register_forward_hook(lambda *_: time.sleep(0.003))  # who sends comes in time

    def look(engine: EmbeddedEngine) -> None:
        while not over.is_set():
            seen.append(engine.version)
            # a thread that never waits holds the interpreter for 5 ms each time another wants it
            time.sleep(0.0005)

    def storm(engine: EmbeddedEngine, loop: asyncio.AbstractEventLoop) -> None:
        step = 0
        while not over.is_set():
            step += 1
            weights = None if step % 3 == 0 else models[step % 4]
            made_by[step] = made_by[step - 1] if weights is None else weights
            sent = weights.named_parameters() if weights is not None else None
            asyncio.run_coroutine_threadsafe(
                engine.load_weights(Version(0, step), sent), loop
            ).result(60)

            with pytest.raises(ValueError, match="never decrease"):
                asyncio.run_coroutine_threadsafe(
                    engine.load_weights(Version(0, step - 1), None), loop
                ).result(60)

    async def story(engine: EmbeddedEngine) -> None:
        threads = [threading.Thread(target=look, args=(engine,))]
        threads.append(threading.Thread(target=storm, args=(engine, asyncio.get_running_loop())))
        for thread in threads:
            thread.start()

        try:
            results = await asyncio.gather(*(engine.generate(request) for request in requests))
        finally:
            over.set()
            await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))

        num_versions = 0
        for request, result in zip(requests, results, strict=True):
            for generation in result:
                assert list(generation.versions) == sorted(generation.versions)
                num_versions = max(num_versions, len(set(generation.versions)))
                expected = own_context_log_probs(made_by, request.prompt_ids, generation)
                assert generation.rollout_log_probs == pytest.approx(expected, abs=1e-4)

        assert num_versions >= 5 and seen == sorted(seen)

    with_engine(make_engine(served, kv_on_update="recompute"), story)


# Lanes.


def training(row: int, **params: Any) -> GenerateRequest:
    request = request_of(prompt_of(4 + row), (0, 1, 2), row=row, **params)
    return replace(request, stream=Stream(1, "train", 0, row))


def test_an_evaluation_goes_first_and_leaves_no_trace_in_the_batches_of_training():
    model = make_model("qwen3")
    wave = [training(row, max_tokens=120 + 20 * row) for row in range(4)]
    held_out = [request_of(prompt_of(4 + row), (0,), row=row, max_tokens=40) for row in range(5)]

    async def story(engine: EmbeddedEngine) -> None:
        finished: list[str] = []

        def send(
            lane: str, requests: list[GenerateRequest]
        ) -> list[asyncio.Task[tuple[Segment, ...]]]:
            tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
            for task in tasks:
                task.add_done_callback(lambda _: finished.append(lane))
            return tasks

        await engine.pause()
        tasks = send("train", wave)
        await asyncio.sleep(0)
        await engine.resume()
        await tokens_after(engine, 30)

        # an evaluation that came later than the wave's end would prove nothing
        await engine.pause()
        evaluations = send("eval", held_out)
        await asyncio.sleep(0)
        await engine.resume()
        assert list(await asyncio.gather(*tasks)) == alone  # also the last bit of each log-prob
        assert tokens_of(await asyncio.gather(*evaluations)) == tokens_of(evaluated_alone)
        assert finished == ["eval"] * 5 + ["train"] * 4
        spans = engine.take_activity()
        assert [span.lane for span in spans] == ["train", "eval", "train"]
        assert spans[1].tokens == 5 * 40
        assert spans[1].t1 == spans[2].t0

    alone = run_all(make_engine(model, max_num_seqs=5), wave)
    evaluated_alone = run_all(make_engine(model, max_num_seqs=5), held_out)
    with_engine(make_engine(model, max_num_seqs=5), story)


# Account of what was decoded.
