"""Pages: shared ones are free with their last holder, and prompts lie in them as they were
prefilled. Uniform numbers on the device are those of `rollout/random_draws.py`, bit for bit, for
all keys and positions."""

import random

import numpy as np
import pytest
import torch

from distflow.models.cached_decoder import DecoderView
from distflow.rollout.embedded.decode_state import NEXT, state_of, uniforms
from distflow.rollout.embedded.decode_steps import AsyncSteps, DeviceOptions, padded, rounded
from distflow.rollout.embedded.page_memory import TRASH, PagePool
from distflow.rollout.embedded.scheduler import Sequence, sequences_of
from distflow.rollout.random_draws import uniforms as host_uniforms
from tests.rollout.drive import make_model, prompt_of, request_of

TOP = 1 << 64
EDGES = [
    0,
    1,
    2,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 63) + 1,
    TOP - 2,
    TOP - 1,
]
# Keys that take the first state to its extremes, whatever they are.
WEYL = 0x9E3779B97F4A7C15
KEYS = [*EDGES, *((queue - WEYL) % TOP for queue in EDGES)]
POSITIONS = [0, 1, 2, 511, 4095, (1 << 31) - 1, 1 << 32, (1 << 53) + 1, (1 << 62) - 1]


def test_pages_are_taken_once_and_come_back_with_their_last_holder():
    chance = random.Random(3)
    kept = list[int]()
    pages = PagePool(40, lambda: kept.pop(0))

    held: list[list[int]] = []
    for _ in range(2000):
        if chance.random() < 0.5 and pages.num_free:
            taken = pages.take(chance.randint(1, min(5, pages.num_free)))
            held.append(taken)

            if chance.random() < 0.5:
                shared = taken[: chance.randint(0, len(taken))]
                pages.share(shared)
                held.append(shared)

            kept += [pages.keep(page) for page in taken if chance.random() < 0.3]
        elif held:
            pages.give_back(held.pop(chance.randrange(len(held))))

        owners = {page for each in held for page in each}
        assert TRASH not in owners and pages.num_free == 39 - len(owners)

    with pytest.raises(AssertionError, match="pages wanted"):
        pages.take(pages.num_free + 1)


@pytest.mark.parametrize("num_rows", range(1, 200))
def test_sizes_of_steps_are_few_and_hold_the_rows(num_rows):
    assert num_rows <= padded(num_rows, 512) < max(2 * num_rows, num_rows + 32)
    assert padded(num_rows, num_rows) == num_rows
    assert num_rows <= rounded(num_rows) <= num_rows * 1.25
    assert len({padded(n, 512) for n in range(1, 513)}) == 21


def sequences(
    length: int, samples: tuple[int, ...], max_tokens: int = 5, row: int = 0
) -> list[Sequence]:
    return sequences_of(
        row, request_of(prompt_of(length, seed=row), samples, row=row, max_tokens=max_tokens)
    )


def test_as_many_fit_as_their_whole_lengths_take():
    steps = AsyncSteps(
        DecoderView(model := make_model()), model, 64, DeviceOptions(page_tokens=8, num_pages=11)
    )
    # 3 pages each of 10
    assert steps.num_fitting(sequences(3, tuple(range(40)), max_tokens=21), 99) == 3
    assert steps.num_fitting(sequences(3, (0,), max_tokens=78), 99) == 0  # 81 tokens


def on_device(keys: list[int], positions: list[int]) -> torch.Tensor:
    return uniforms(torch.tensor([state_of(*pair) for pair in zip(keys, positions, strict=True)]))


def on_host(keys: list[int], positions: list[int]) -> torch.Tensor:
    return torch.from_numpy(
        host_uniforms(np.array(keys, dtype=np.uint64), np.array(positions, dtype=np.int64))
    )


def test_extreme_and_random_keys_and_positions():
    generator = np.random.default_rng(7)
    keys = generator.integers(0, TOP, 100_000, dtype=np.uint64, endpoint=False).tolist()
    positions = generator.integers(0, 1 << 40, 100_000).tolist()
    keys += [key for key in KEYS for _ in POSITIONS]
    positions += POSITIONS * len(KEYS)
    found = on_device(keys, positions)
    assert torch.equal(found, on_host(keys, positions))
    assert found.min() >= 0
    assert found.max() < 1


def test_what_is_added_for_the_next_draw():
    states = torch.tensor([state_of(key, 0) for key in KEYS])
    for position in range(200):
        assert torch.equal(uniforms(states), on_host(KEYS, [position] * len(KEYS)))
        states = states + NEXT
