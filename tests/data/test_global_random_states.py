"""States of the global generators, lent to user functions in turns: each draws as if it were
alone."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from distflow.data import global_random_states

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    # every second one is drawn with the one before
    "numpy normal": lambda: float(np.random.randn()),
    "torch": lambda: float(torch.rand(())),
    "none": lambda: 0.0,
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0]), np.random.set_state(before[1]), torch.set_rng_state(before[2])


def alone(number: int) -> list[float]:
    global_random_states.seed("strand", number)
    return [DRAWS[name]() for name in order(number)]


def order(number: int) -> list[str]:
    draw = random.Random(number)
    return [draw.choice([*DRAWS, "numpy normal"]) for _ in range(200)]


def test_several_draw_in_turns_as_each_does_alone_and_leave_the_global_generators_as_they_were() -> (  # noqa: E501
    None
):
    wanted = [alone(number) for number in range(4)]
    global_random_states.seed("outside")
    np.random.randn()  # leaves the second of two
    outside = [draw() for draw in DRAWS.values() for _ in range(3)]
    global_random_states.seed("outside")
    np.random.randn()
    begins = [partial(global_random_states.seed, "strand", number) for number in range(4)]
    orders = [iter(order(number)) for number in range(4)]
    found = [list[float]() for _ in range(4)]
    turns = [number for number in range(4) for _ in range(200)]
    random.Random(7).shuffle(turns)

    for number in turns:
        with global_random_states.lent(begins[number]):
            found[number].append(DRAWS[next(orders[number])]())
            begins[number] = partial(global_random_states.put_back, global_random_states.states())

    assert found == wanted
    assert [draw() for draw in DRAWS.values() for _ in range(3)] == outside


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_generator_of_numpy_is_lent_too() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))

    try:
        first = global_random_states.states()
        drawn = np.random.rand()
        global_random_states.put_back(first)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)


def test_states_survive_a_user_who_seeds_and_sets_them() -> None:
    np.random.seed(5)
    first = global_random_states.states()
    state = np.random.get_state()
    np.random.seed(6)
    np.random.set_state(state)
    with global_random_states.lent(partial(global_random_states.seed, "x")):
        np.random.randn(3)
    drawn = np.random.rand()
    global_random_states.put_back(first)
    assert np.random.rand() == drawn
