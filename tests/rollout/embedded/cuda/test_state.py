"""Uniform numbers on the device: those of `rollout/generation_rules.py`, bit for bit, for all keys and positions."""

import numpy as np
import torch

from distflow.rollout.embedded.cuda.state import NEXT, state_of, uniforms
from distflow.rollout.generation_rules import uniforms as host_uniforms

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


def on_device(keys: list[int], positions: list[int]) -> torch.Tensor:
    return uniforms(torch.tensor([state_of(*pair) for pair in zip(keys, positions, strict=True)]))


def on_host(keys: list[int], positions: list[int]) -> torch.Tensor:
    return torch.from_numpy(host_uniforms(np.array(keys, dtype=np.uint64), np.array(positions, dtype=np.int64)))


def test_the_first_number_of_a_published_sequence() -> None:
    """Check values of SplitMix64 for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert on_device([1234567] * 4, [0, 1, 2, 3]).tolist() == [(value >> 11) / 2**53 for value in published]


def test_extreme_keys_and_positions() -> None:
    keys = [key for key in KEYS for _ in POSITIONS]
    positions = POSITIONS * len(KEYS)
    assert torch.equal(on_device(keys, positions), on_host(keys, positions))


def test_a_hundred_thousand_random_keys_and_positions() -> None:
    generator = np.random.default_rng(7)
    keys = generator.integers(0, TOP, 100_000, dtype=np.uint64, endpoint=False).tolist()
    positions = generator.integers(0, 1 << 40, 100_000).tolist()
    found = on_device(keys, positions)
    assert torch.equal(found, on_host(keys, positions))
    assert found.min() >= 0
    assert found.max() < 1


def test_what_is_added_for_the_next_draw() -> None:
    states = torch.tensor([state_of(key, 0) for key in KEYS])
    for position in range(200):
        assert torch.equal(uniforms(states), on_host(KEYS, [position] * len(KEYS)))
        states = states + NEXT
