"""Counter-based uniforms: the published generator, uniform, and independent along every
coordinate."""

from typing import Any

import numpy as np
import pytest

from distflow.rollout.engine import Stream
from distflow.rollout.random_draws import sample_key, uniforms

MASK = (1 << 64) - 1


def splitmix64(seed: int, count: int) -> list[int]:
    """The sequential generator, in plain integers."""
    outputs = []
    state = seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))

    return outputs


def draw(keys: list[int], positions: list[int]) -> np.ndarray:
    return uniforms(np.array(keys, dtype=np.uint64), np.array(positions, dtype=np.int64))


def test_known_outputs():
    """The first outputs for seed 1234567 are the published check values of SplitMix64."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, 4) == published
    assert (
        draw([1234567] * 4, [0, 1, 2, 3]) == [(value >> 11) / 2**53 for value in published]
    ).all()


@pytest.mark.parametrize("seed", [0, 1, MASK, 0x123456789ABCDEF])
def test_any_position_equals_the_sequential_generator(seed):
    expected = [(value >> 11) / 2**53 for value in splitmix64(seed, 50)]
    assert draw([seed] * 50, list(range(50))).tolist() == expected
    assert draw([seed], [37]).tolist() == [expected[37]]


def keys_along(coordinate: str, count: int) -> list[int]:
    base: dict[str, Any] = {"seed": 1, "name": "train", "epoch": 0, "row": 0}
    if coordinate == "sample":
        return [sample_key(Stream(**base), sample) for sample in range(count)]
    return [sample_key(Stream(**{**base, coordinate: value}), 0) for value in range(count)]


@pytest.mark.parametrize("coordinate", ["seed", "name", "epoch", "row", "sample"])
def test_uniform_and_uncorrelated_between_neighbours(coordinate):
    num_keys = 2000
    num_positions = 50
    keys = np.repeat(np.array(keys_along(coordinate, num_keys), dtype=np.uint64), num_positions)
    table = uniforms(keys, np.tile(np.arange(num_positions), num_keys)).reshape(
        num_keys, num_positions
    )
    assert table.min() >= 0 and table.max() < 1
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    expected = table.size / 100

    # chi-square with 99 degrees: P(> 160) is 1e-4
    assert ((counts - expected) ** 2 / expected).sum() < 160
    centred = (table - 0.5) * np.sqrt(12)
    bound = 5 / np.sqrt(table.size)  # five standard errors
    assert abs((centred[1:] * centred[:-1]).mean()) < bound
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < bound
    assert abs((centred[1:, :-1] * centred[:-1, 1:]).mean()) < bound
