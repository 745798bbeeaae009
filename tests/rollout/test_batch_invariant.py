"""With `batch_invariant` the bits of an answer are those of the same request alone, whatever ran
beside it."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distflow.data.sample import Segment
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest
from tests.rollout.drive import (
    generate_all,
    make_engine,
    make_model,
    prompt_of,
    request_of,
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
def test_an_answer_has_the_bits_of_its_request_alone(family, changes, dtype):
    model = make_model(family, **changes).to(dtype)
    wanted = requests()

    async def story(engine: EmbeddedEngine) -> None:
        alone = [await engine.generate(request) for request in wanted]
        assert bits(await generate_all(engine, wanted)) == bits(alone)
        assert bits(await at_any_time(engine, wanted)) == bits(alone)

    with_engine(make_engine(model, batch_invariant=True, max_num_seqs=18), story)
