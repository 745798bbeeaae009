"""The protocol of simulators, gridreach, gymnasium's environments, and the pool of worker
processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distflow.acting.gymnasium_simulator import GymnasiumSimulator
from distflow.acting.simulator import Observation, from_json, to_json
from distflow.acting.simulator_host import simulator_maker
from distflow.acting.worker_pool import SimulatorPool
from distflow.environments.user_code_process import CallFailed, ProcessEnded
from distflow.errors import UserError

FILE = f"{Path(__file__).with_name('faulty.py')}:"


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_an_observation_is_written_and_read_unchanged():
    image = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    seen = Observation({"a": image, "b": image[::-1]}, np.array([0.1, -3.0], np.float32), "go")
    again = from_json(to_json(seen))
    assert again.instruction == "go" and again.state.tolist() == seen.state.tolist()
    assert all((again.images[name] == value).all() for name, value in seen.images.items())


class Space:
    shape = (2,)
    dtype = np.dtype(np.float32)

    def contains(self, action: Any) -> bool:
        return action.dtype == np.float32 and bool((abs(action) <= 1).all())


class Reacher:
    """As gymnasium's environments are: Dict observations, Box actions."""

    action_space = Space()

    def close(self) -> None: ...

    def reset(self, *, seed: int, options: Any) -> Any:
        self.steps = 0
        return {
            "b": np.array([seed, 2.0]),
            "a": np.array([[1]]),
            "camera": np.zeros((4, 4, 3), np.uint8),
        }, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        seen = {"b": action, "a": np.array([[self.steps]]), "camera": np.ones((4, 4, 3), np.uint8)}
        return seen, 1.0, self.steps == 3, False, {"is_success": self.steps == 3}


def test_environments_of_gymnasium_are_simulators():
    simulator = GymnasiumSimulator(Reacher, instruction="reach")
    first = run(simulator.reset(7, {}))
    assert (
        first.state.tolist() == [1.0, 7.0, 2.0]
        and first.instruction == "reach"
        and {*first.images} == {"camera"}
    )
    result = run(simulator.step(np.full((5, 2), 0.5)))
    assert result.rewards == [1.0] * 3 and result.success == result.terminated == [
        False,
        False,
        True,
    ]
    assert result.observation.state.tolist() == [3.0, 0.5, 0.5]
    run(simulator.reset(7, {}))
    with pytest.raises(ValueError, match=r"1\.5.* space"):
        run(simulator.step(np.full((1, 2), 1.5)))


def test_an_environment_may_show_a_part_of_its_state_and_be_made_anew():
    seeds = list[int]()

    def make(number: int) -> Reacher:
        seeds.append(number)
        return Reacher()

    simulator = GymnasiumSimulator(make, state=["b"], seed_argument="number")
    for seed in (7, 8):
        assert run(simulator.reset(seed, {})).state.tolist() == [seed, 2.0]
    assert seeds == [7, 8]
    with pytest.raises(ValueError, match="'c'.* b, a, camera"):
        run(GymnasiumSimulator(Reacher, state=["c"]).reset(7, {}))


def test_a_package_that_registers_environments_is_imported_first():
    with pytest.raises(UserError, match="'nowhere'"):
        simulator_maker("nowhere:Env-v1")


def test_cartpole_is_a_simulator():
    pytest.importorskip("gymnasium")
    simulator: Any = simulator_maker("CartPole-v1")()
    seen = [run(simulator.reset(3, {})).state.tolist() for _ in range(2)]
    assert seen[0] == seen[1] and len(seen[0]) == 4
    result = run(simulator.step(np.ones((200, 1))))
    assert result.terminated[-1] and len(result.rewards) < 20


def pool(name: str, timeout_s: float = 30.0, workers: int = 1, **options: Any) -> SimulatorPool:
    return SimulatorPool(name, options, workers, timeout_s)


def playing(made: SimulatorPool, play: Callable[[SimulatorPool], Any]) -> Any:
    try:
        return asyncio.run(play(made))
    finally:
        made.close()


def test_a_pool_plays_several_episodes_at_once_and_uses_simulators_again():
    async def play(made: SimulatorPool) -> Any:
        first = await made.begin(1, {})
        other = await made.begin(5, {})
        one = await first.step([[1.0]])
        assert first.seen.state.tolist() == [2.0] and one["terminated"] == [False]
        assert (await other.step([[1.0]] * 4))["terminated"] == [False, False, True]
        other.close()
        again = await made.begin(5, {})
        assert again.seen.state.tolist() == [5.0]
        assert (await first.step([[2.0]]))["rewards"] == [0.5] and first.seen.state.tolist() == [
            4.0
        ]

    playing(pool(f"{FILE}Line"), play)


@pytest.mark.parametrize(
    ("name", "differs"),
    [("Unseeded", "a used simulator"), ("Remembers", "a used simulator")],
    ids=str,
)
def test_a_simulator_whose_reset_does_not_repeat_is_refused_at_the_start(name, differs):
    with pytest.raises(UserError, match=rf"reset .* \({differs} differs\)"):
        pool(f"{FILE}{name}")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("nan reward", "reward nan"),
        ("goes on", "after the episode's end"),
        ("stops", "executed 1 of 2 actions"),
        ("nan state", "not finite"),
        ("other form", "episode's first one"),
        ("float image", "not uint8"),
    ],
)
def test_what_breaks_the_protocol_fails_its_episode_alone(how, says):
    async def play(made: SimulatorPool) -> None:
        bad = await made.begin(100, {})
        good = await made.begin(1, {})
        with pytest.raises(CallFailed, match=says):
            await bad.step([[1.0]] * 2)
        assert len((await good.step([[1.0]] * 2))["rewards"]) == 2

    playing(pool(f"{FILE}Fails", how=how), play)


@pytest.mark.parametrize(
    ("how", "says"), [("dies", "exited with status 3"), ("hangs", "no answer within 1 s")]
)
def test_a_simulator_that_dies_or_hangs_ends_its_episode_alone(how, says):
    async def play(made: SimulatorPool) -> None:
        bad = await made.begin(100, {})
        beside = await made.begin(2, {})
        with pytest.raises(ProcessEnded, match=says):
            await bad.step([[1.0]])
        bad.close()
        assert (await beside.step([[1.0]]))["rewards"] == [0.5]
        assert beside.seen.state.tolist() == [3.0]
        after = [await made.begin(seed, {}) for seed in (3, 4)]
        assert [each.seen.state.tolist() for each in after] == [[3.0], [4.0]]

    playing(pool(f"{FILE}Fails", timeout_s=1.0, how=how), play)


def test_a_cancelled_step_leaves_its_simulator_to_nobody():
    async def play(made: SimulatorPool) -> None:
        bad = await made.begin(100, {})
        step = asyncio.create_task(bad.step([[1.0]]))
        await asyncio.sleep(0.1)
        step.cancel()
        await asyncio.wait([step])
        bad.close()
        after = await made.begin(3, {})
        assert after.seen.state.tolist() == [3.0]

    playing(pool(f"{FILE}Fails", how="hangs"), play)


def test_a_simulator_that_fails_in_the_check_is_refused():
    with pytest.raises(UserError, match="Line.*TypeError.*nonsense"):
        pool(f"{FILE}Line", ends_at=3, nonsense=1)


def test_a_simulator_that_cannot_render_is_refused_with_what_to_set():
    with pytest.raises(UserError, match=r"OpenGL.*workflow_kwargs\.gl to egl .* osmesa"):
        pool(f"{FILE}NoScreen")
