"""Steps chained on the device, here on the CPU, against the engine that reads every token before
the next step."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.embedded.decode_steps import DeviceOptions
from distflow.rollout.engine import GenerateRequest, Stream
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
from tests.tiny_models import tiny_tokenizer

LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 1.4, "repetition_penalty": 0.8, "top_k": 30, "top_p": 0.8},
    {"greedy": True},
]
NEXT = Version(0, 1)


def options(lag: int = 1, page_tokens: int = 8, num_pages: int | None = None) -> DeviceOptions:
    return DeviceOptions(lag, page_tokens, num_pages)


def same(found: list[tuple[Segment, ...]], expected: list[tuple[Segment, ...]]) -> None:
    """All but the last bits of log-probs: rows of a step lie beside others than on the host's
    path."""
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert (ours.sample, ours.finish_reason, ours.versions) == (
                theirs.sample,
                theirs.finish_reason,
                theirs.versions,
            )
            assert ours.rollout_log_probs == pytest.approx(theirs.rollout_log_probs, abs=1e-5)
            assert ours.sampling_log_probs == pytest.approx(theirs.sampling_log_probs, abs=1e-5)


def mixed(chance: random.Random, count: int, laws: list[dict[str, Any]]) -> list[GenerateRequest]:
    """Prompts, groups, lengths, stops and laws of all kinds, of both lanes."""
    requests = []
    for row in range(count):
        stops: dict[str, Any] = chance.choice(
            [
                {},
                {"stop_token_ids": tuple(range(5, 5 + chance.randint(1, 20)))},
                {"stop": ("a", "bc", "5")},
            ]
        )
        samples = tuple(chance.sample(range(20), chance.randint(1, 5)))
        request = request_of(
            prompt_of(chance.choice((1, 3, 8, 9, 24, 40)), seed=row % 3),
            samples,
            max_tokens=chance.choice((1, 2, 7, 30)),
            **stops,
            **chance.choice(laws),
        )
        stream = Stream(3, chance.choice(("train", "val")), 0, row)
        requests.append(replace(request, stream=stream, num_drawn=chance.choice((0, 0, 17))))

    return requests


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_give_what_the_host_gives(seed):
    chance = random.Random(seed)
    model = make_model(("llama", "qwen2", "qwen3")[seed % 3], seed=seed)
    requests = mixed(chance, 9, LAWS if seed % 2 else [LAWS[seed // 2]])
    limits = {
        "max_num_seqs": chance.choice((2, 5, 33)),
        "max_prefill_tokens": chance.choice((30, 8192)),
    }
    shape = options(chance.choice((1, 2, 3)), chance.choice((1, 8, 64)), chance.choice((None, 90)))
    expected = run_all(make_engine(model, **limits), requests)
    same(run_all(make_engine(model, on_device=shape, **limits), requests), expected)


def test_steps_are_read_late_and_what_was_computed_in_vain_is_left_out():
    """Of one sequence alone: behind the step that draws its stop token the device has made `lag`
    more."""
    model = make_model()
    prompt = prompt_of(5)
    free = run_all(make_engine(model), [request_of(prompt, max_tokens=40)])[0][0]
    stop = free.token_ids[11]
    end = free.token_ids.index(stop) + 1
    rows: list[int] = []
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: rows.append(inputs[0].dim())
    )

    for lag in (0, 1, 2, 3):
        engine, other = (make_engine(model, on_device=options(lag)) for _ in range(2))
        rows.clear()
        result = run_all(engine, [request_of(prompt, max_tokens=40, stop_token_ids=(stop,))])
        assert (
            tokens_of(result) == [list(free.token_ids[:end])]
            and result[0][0].finish_reason == "stop"
        )
        assert engine.num_generated_tokens == end
        assert rows.count(1) == end - 1 + lag  # a prefill draws the first
        rows.clear()
        assert len(tokens_of(run_all(other, [request_of(prompt, max_tokens=7)]))[0]) == 7
        assert rows.count(1) == 6  # the last that it may have is known ahead


def test_a_stop_text_ends_where_the_host_ends_it():
    model = make_model()
    prompt = prompt_of(7)
    free = run_all(make_engine(model), [request_of(prompt, max_tokens=30)])[0][0]
    stop = tiny_tokenizer().decode(free.token_ids)[7:10]
    request = request_of(prompt, (0, 1), max_tokens=30, stop=("nowhere at all", stop))
    expected = run_all(make_engine(model), [request])
    assert expected[0][0].finish_reason == "stop"
    for lag in (1, 3):
        same(run_all(make_engine(model, on_device=options(lag)), [request]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("kv_on_update", ["keep", "recompute", "abort"])
def test_versions_are_those_of_the_weights_that_drew(lag, kv_on_update):
    """Each token's log-prob under the weights of its version, over its own context, tells who drew
    it."""
    models = [make_model(seed=seed) for seed in (1, 2)]
    served = make_model(seed=1)
    request = request_of(prompt_of(9), (0, 1, 2), max_tokens=60)

    async def story(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(request))
        await tokens_after(engine, 30)
        await engine.load_weights(NEXT, list(models[1].named_parameters()))

        result = await task
        for generation in result:
            count = generation.versions.count(0)
            assert (
                list(generation.versions) == [0] * count + [1] * (len(generation.token_ids) - count)
                and count >= 9
            )
            old = forward_log_probs(models[0], request.prompt_ids, generation)
            assert generation.rollout_log_probs[:count] == pytest.approx(old[:count], abs=1e-4)

            if kv_on_update == "abort":
                assert (
                    generation.finish_reason == "abort" and len(generation.token_ids) == count < 60
                )
                continue

            assert len(generation.token_ids) == 60
            if kv_on_update == "recompute":
                new = forward_log_probs(models[1], request.prompt_ids, generation)
                assert generation.rollout_log_probs[count:] == pytest.approx(new[count:], abs=1e-4)

    with_engine(make_engine(served, on_device=options(lag), kv_on_update=kv_on_update), story)


@pytest.mark.parametrize("release", [False, True])
def test_a_pause_reads_all_and_the_rest_is_as_if_nothing_happened(release):
    model = make_model("qwen2")
    requests = [
        request_of(prompt_of(5 + row), (0, 1, 2), row=row, max_tokens=80) for row in range(3)
    ]

    async def story(engine: EmbeddedEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        for _ in range(4):
            await tokens_after(engine, 40)
            await engine.pause(release=release)
            before = engine.num_generated_tokens
            await asyncio.sleep(0.02)
            assert engine.num_generated_tokens == before
            await engine.resume()

        same(list(await asyncio.gather(*tasks)), expected)
        assert engine.num_generated_tokens == 9 * 80

    expected = run_all(make_engine(model, max_num_seqs=5), requests)
    with_engine(
        make_engine(model, max_num_seqs=5, on_device=options(2), shares_weights=True), story
    )


@pytest.mark.slow
def test_cancelled_requests_leave_their_slots_and_pages_at_once_and_disturb_nobody():
    model = make_model()
    chance = random.Random(5)
    kept = [request_of(prompt_of(9 + row), (0, 1), row=row, max_tokens=50) for row in range(4)]
    doomed = [request_of(prompt_of(6), (0, 1), row=9 + row, max_tokens=400) for row in range(4)]

    async def story(engine: EmbeddedEngine) -> None:
        for _ in range(3):
            lost = [asyncio.create_task(engine.generate(request)) for request in doomed]
            tasks = [asyncio.create_task(engine.generate(request)) for request in kept]

            for task in chance.sample(lost, len(lost)):
                await tokens_after(engine, 12)
                task.cancel()

            same(list(await asyncio.gather(*tasks)), expected)
            await asyncio.gather(*lost, return_exceptions=True)

        assert engine._steps is not None and engine._steps.pages.num_free == 199

    expected = run_all(make_engine(model), kept)
    with_engine(make_engine(model, max_num_seqs=7, on_device=options(2, num_pages=200)), story)


def test_a_sequence_that_all_pages_together_cannot_hold_is_refused():
    engine = make_engine(make_model(), on_device=options(num_pages=6))
    with pytest.raises(UserError, match="9 tokens .* 32 .* 40 tokens"):
        run_all(engine, [request_of(prompt_of(9), max_tokens=32)])
