"""Batch-invariant steps: the bits of an answer are those of the same request alone, whatever ran
beside it."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distflow.data.sample import Segment
from distflow.models.cached_decoder import DecoderView
from distflow.models.packed_attention import BLOCK, attend_in_blocks
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.embedded.tiled_lane import LARGEST, tile_size
from distflow.rollout.engine import GenerateRequest
from tests.rollout.drive import (
    generate_all,
    make_engine,
    make_model,
    prompt_of,
    request_of,
    run_all,
    tokens_after,
    with_engine,
)
from tests.sparse_params import one_fast_in

ODD: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 77,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
"""Nothing is a multiple of a register's numbers."""


def bits(results: Sequence[tuple[Segment, ...]]) -> list[Any]:
    return [
        (made.token_ids, made.rollout_log_probs, made.sampling_log_probs)
        for result in results
        for made in result
    ]


def requests() -> list[GenerateRequest]:
    """Of all laws, some with prompts and answers of several blocks."""
    laws: list[dict[str, Any]] = [
        {"max_tokens": 20},
        {"max_tokens": 70},
        {"max_tokens": 15, "temperature": 0.7, "top_p": 0.9},
        {"max_tokens": 9, "top_k": 5},
        {"max_tokens": 25, "min_p": 0.05, "repetition_penalty": 1.2},
    ]
    lengths = (3, 60, 1, 9, 33, 130, 4)
    return [
        request_of(prompt_of(length, seed=row), (0, 1, 2), row=row, **laws[row % len(laws)])
        for row, length in enumerate(lengths)
    ]


async def at_any_time(
    engine: EmbeddedEngine, wanted: Sequence[GenerateRequest]
) -> list[tuple[Segment, ...]]:
    """Each request when some tokens of others are there."""
    generator = random.Random(0)

    async def one(request: GenerateRequest) -> tuple[Segment, ...]:
        await asyncio.sleep(generator.random() * 0.1)
        return await engine.generate(request)

    return list(await asyncio.gather(*map(one, wanted)))


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    one_fast_in(
        3,
        [
            ("llama", ODD, torch.float32),
            ("qwen3", {}, torch.float32),
            ("qwen2", {}, torch.bfloat16),
        ],
        unpack=True,
    ),
    ids=["odd sizes", "qwen3", "bfloat16"],
)
def test_an_answer_has_the_bits_of_its_request_alone(
    family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = make_model(family, **changes).to(dtype)
    wanted = requests()

    async def story(engine: EmbeddedEngine) -> None:
        alone = [await engine.generate(request) for request in wanted]
        assert bits(await generate_all(engine, wanted)) == bits(alone)
        assert bits(await at_any_time(engine, wanted)) == bits(alone)

    with_engine(make_engine(model, batch_invariant=True, max_num_seqs=18), story)


def test_an_answer_that_lost_its_keys_and_values_goes_on_with_the_same_bits() -> None:
    model = make_model("llama", **ODD)
    wanted = requests()
    undisturbed = bits(run_all(make_engine(model, batch_invariant=True), wanted))

    async def story(engine: EmbeddedEngine) -> None:
        answers = asyncio.gather(*map(engine.generate, wanted))
        for _ in range(3):
            await tokens_after(engine, 60)
            await engine.pause(release=True)
            await engine.resume()
        assert bits(await answers) == undisturbed

    with_engine(
        make_engine(model, batch_invariant=True, max_num_seqs=8, shares_weights=True), story
    )


def test_what_a_row_does_not_look_at_adds_no_bit() -> None:
    """Against a softmax in float64, too."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=generator)
        for shape in ((5, 6, 16), (5, 2, 256, 16), (5, 2, 256, 16))
    )
    unseen = torch.arange(256) > torch.tensor([0, 5, 63, 40, 21])[:, None]
    bias = torch.zeros(5, 1, 256).masked_fill(unseen[:, None], float("-inf"))
    by_group = bias.repeat_interleave(2, 0).expand(-1, 3, -1)

    def attended(extent: int) -> torch.Tensor:
        return attend_in_blocks(
            query, keys[:, :, :extent], values[:, :, :extent], by_group[..., :extent], 0.5
        )

    short = attended(BLOCK)
    for extent in (2 * BLOCK, 4 * BLOCK):
        longer = attended(extent)
        assert torch.equal(longer.view(torch.int32), short.view(torch.int32))
    by_head = query.view(5, 2, 3, 16).double()
    weights = torch.softmax(0.5 * by_head @ keys.double().mT + bias.double()[:, :, None], dim=-1)
    torch.testing.assert_close(
        short.view(5, 2, 3, 16).double(), weights @ values.double(), atol=1e-5, rtol=0
    )


def test_tiles_are_as_small_as_the_places_of_a_row_demand() -> None:
    """A layer that adds a rounding error to the last rows of more than four."""
    model = make_model()
    assert tile_size(DecoderView(model, in_blocks=True)) == LARGEST
    view = DecoderView(model, in_blocks=True)

    def uneven(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        place = torch.arange(output.shape[0])[:, None] >= 4
        return output * (1 + place * 1e-6) if output.dim() == 2 else output

    model.model.layers[1].mlp.register_forward_hook(uneven)
    assert tile_size(view) == 4
