"""The prompt of a later turn is found by its prefix: only its new tokens are prefilled, over keys
and values of
its weights."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from distflow.data.sample import Segment
from distflow.models.cached_decoder import DecoderView
from distflow.rollout.embedded import EmbeddedEngine, host_lane
from distflow.rollout.embedded.decode_steps import DeviceOptions
from distflow.rollout.embedded.prefix_cache import PrefixCache
from distflow.rollout.engine import GenerateRequest
from distflow.scheduling.group_states import Version
from tests.rollout.drive import (
    forward_log_probs,
    generate_all,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    tokens_after,
    with_engine,
)

PAGES = DeviceOptions(page_tokens=16, num_pages=200)
ENGINES: dict[str, dict[str, Any]] = {
    "native": {},
    "torch": {"enforce_eager": True},
    "device": {"on_device": PAGES},
}
GIVEN = (7, 8, 9)


def turn(
    prompt: tuple[int, ...], row: int = 0, max_tokens: int = 40, num_drawn: int = 0
) -> GenerateRequest:
    return replace(
        request_of(prompt, row=row, max_tokens=max_tokens), may_continue=True, num_drawn=num_drawn
    )


def after(request: GenerateRequest, made: Segment) -> GenerateRequest:
    drawn = request.num_drawn + len(made.token_ids)
    return replace(
        request, prompt_ids=(*request.prompt_ids, *made.token_ids, *GIVEN), num_drawn=drawn
    )


@contextmanager
def prefilled() -> Iterator[list[int]]:
    """How many tokens each prompt had that was run."""
    lengths: list[int] = []
    whole = DecoderView.prefill
    rest = DecoderView.prefill_after

    def of_whole(self: DecoderView, prompts: list[tuple[int, ...]]) -> Any:
        lengths.extend(len(prompt) for prompt in prompts)
        return whole(self, prompts)

    def of_rest(self: DecoderView, prompts: list[tuple[int, ...]], prefixes: Any) -> Any:
        lengths.extend(len(p) - k.shape[-2] for p, (k, _) in zip(prompts, prefixes, strict=True))
        return rest(self, prompts, prefixes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderView, "prefill", of_whole)
        patch.setattr(DecoderView, "prefill_after", of_rest)
        yield lengths


async def turns(
    engine: EmbeddedEngine, requests: list[GenerateRequest], count: int
) -> list[Segment]:
    """The last turn's generation of each request, after asking `count` times."""
    for number in range(count):
        made = [result[0] for result in await generate_all(engine, requests)]
        if number < count - 1:
            requests = [after(request, each) for request, each in zip(requests, made, strict=True)]
    return made


def story(model: Any, tell: Callable[[EmbeddedEngine], Awaitable[None]], **options: Any) -> None:
    with_engine(make_engine(model, **options), tell)


@pytest.mark.parametrize(
    ("engine", "family"), [("native", "qwen3"), ("torch", "llama"), ("device", "qwen3")]
)
def test_a_later_turn_prefills_its_new_tokens_and_draws_by_the_plain_models_log_probs(
    engine, family
):
    model = make_model(family)

    async def tell(own: EmbeddedEngine) -> None:
        requests = [turn(prompt_of(length), row) for row, length in enumerate((5, 17, 40, 61))]
        for number in range(3):
            with prefilled() as lengths:
                made = [result[0] for result in await generate_all(own, requests)]

            for request, generation in zip(requests, made, strict=True):
                expected = forward_log_probs(model, request.prompt_ids, generation)
                assert generation.rollout_log_probs == pytest.approx(expected, abs=1e-4)
                if number:
                    # the last drawn token was never fed
                    known = len(request.prompt_ids) - len(GIVEN) - 1
                    assert generation.num_cached_tokens == known // 16 * 16

            assert sum(lengths) == sum(len(each.prompt_ids) for each in requests) - sum(
                each.num_cached_tokens or 0 for each in made
            )
            requests = [after(request, each) for request, each in zip(requests, made, strict=True)]

    story(model, tell, **ENGINES[engine])


@pytest.mark.parametrize("engine", ENGINES)
def test_new_weights_a_new_version_and_released_memory_leave_nothing_to_find(engine):
    model = make_model()
    later = make_model(seed=1)

    async def tell(own: EmbeddedEngine) -> None:
        first = turn(prompt_of(40))
        second = after(first, (await turns(own, [first], 1))[0])
        assert (await turns(own, [second], 1))[0].num_cached_tokens
        await own.load_weights(Version(0, 1), None)
        assert (await turns(own, [second], 1))[0].num_cached_tokens == 0
        assert (await turns(own, [second], 1))[0].num_cached_tokens
        await own.load_weights(Version(0, 2), later.named_parameters())
        made = (await turns(own, [second], 1))[0]
        assert made.num_cached_tokens == 0
        assert made.rollout_log_probs == pytest.approx(
            forward_log_probs(later, second.prompt_ids, made), abs=1e-4
        )

    async def tell_released(own: EmbeddedEngine) -> None:
        first = turn(prompt_of(40))
        second = after(first, (await turns(own, [first], 1))[0])
        await own.pause(release=True)
        assert (await turns(own, [second], 1))[0].num_cached_tokens == 0

    story(model, tell, **ENGINES[engine])
    story(model, tell_released, shares_weights=True, **ENGINES[engine])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_ran_over_keys_and_values_of_two_weights_is_not_kept(engine):
    model = make_model()
    later = make_model(seed=1)

    async def tell(own: EmbeddedEngine) -> None:
        first = turn(prompt_of(40), max_tokens=200)
        task = asyncio.create_task(own.generate(first))
        await tokens_after(own, 20)
        await own.load_weights(Version(0, 1), later.named_parameters())
        (made,) = await task
        assert set(made.versions) == {0, 1}
        second = after(first, made)
        again = (await turns(own, [second], 1))[0]
        assert again.num_cached_tokens == 0
        assert again.rollout_log_probs == pytest.approx(
            forward_log_probs(later, second.prompt_ids, again), abs=1e-4
        )

    story(model, tell, **ENGINES[engine])


def test_the_oldest_blocks_go_when_room_is_needed(monkeypatch):
    model = make_model()
    few = DeviceOptions(page_tokens=16, num_pages=24)

    async def tell(own: EmbeddedEngine) -> None:
        requests = [turn(prompt_of(60, seed), seed, max_tokens=20) for seed in range(8)]
        made = [(await turns(own, [request], 1))[0] for request in requests]
        seconds = [after(request, each) for request, each in zip(requests, made, strict=True)]

        found = []
        for second in (seconds[7], seconds[0]):
            (again,) = await turns(own, [second], 1)
            expected = forward_log_probs(model, second.prompt_ids, again)
            assert again.rollout_log_probs == pytest.approx(expected, abs=1e-4)
            found.append(again.num_cached_tokens)

        assert found[0] and found[1] == 0

    config = model.config
    bytes_per_token = (
        2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    )
    monkeypatch.setattr(host_lane, "PREFIX_CACHE_BYTES", 20 * 16 * bytes_per_token)
    story(model, tell)
    story(model, tell, on_device=few)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_turns_give_the_same_bits_in_a_new_engine_and_after_a_new_version(engine):
    requests = [turn(prompt_of(length), row) for row, length in enumerate((5, 17, 40, 61))]
    bits = []

    async def tell(own: EmbeddedEngine) -> None:
        bits.append(await turns(own, requests, 3))
        await own.load_weights(Version(0, 1), None)
        made = await turns(own, requests, 3)
        bits.append([replace(each, versions=(0,) * len(each.versions)) for each in made])

    for _ in range(2):
        story(make_model(), tell, **ENGINES[engine])
    assert all(each == bits[0] for each in bits) and bits[0][0].num_cached_tokens


@pytest.mark.slow
def test_found_is_the_longest_row_of_blocks_that_a_prompt_begins_with():
    """Against brute force over all that was added, while nothing is forgotten."""
    draw = random.Random(0)
    cache = PrefixCache[tuple[int, ...]](3)
    added = list[tuple[str, Any]]()
    for _ in range(300):
        root = draw.choice("ab")
        tokens = tuple(draw.choices((0, 1), k=draw.randrange(16)))
        others = [each for other, each in added if other == root]
        full = max(
            (
                n
                for n in range(0, 16, 3)
                if any(len(tokens[:n]) == n and e[:n] == tokens[:n] for e in others)
            ),
            default=0,
        )
        assert sum(cache.find((root,), tokens), ()) == tokens[:full]
        cache.add((root,), tokens, lambda index, tokens=tokens: tokens[3 * index : 3 * index + 3])
        added.append((root, tokens))

    while len(cache):  # a block never goes before those after it
        cache.pop_oldest()
        for root, tokens in added:
            found = sum(cache.find((root,), tokens), ())
            assert found == tokens[: len(found)]
