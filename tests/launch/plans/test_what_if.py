"""A change is predicted as the run with its keys."""

from dataclasses import replace

import pytest

from distflow.errors import UserError
from distflow.launch.plans.run_planner import RunPlanner
from distflow.launch.plans.what_if import keys_of, outcomes
from tests.launch.plans.measured_folder import TINY


@pytest.fixture
def planner() -> RunPlanner:
    return RunPlanner("quickstart_grpo", TINY, "cpu", reward_seconds=0.01)


def test_a_change_takes_what_a_run_with_its_keys_takes(planner: RunPlanner) -> None:
    before, more, shorter = outcomes(planner, ["rewards*2", "data.max_response_length=5"])
    assert more.keys == ("reward.num_workers=4",)
    by_hand = replace(planner, overrides=[*TINY, "reward.num_workers=4"]).run
    assert more.seconds == by_hand.step_seconds and more.peak == by_hand.fullest.peak
    assert max(more.seconds, shorter.seconds) < before.seconds
    assert f"rewards*2: a step of {more.seconds:.3g} s, -" in more.line(before)


def test_the_range_is_that_of_the_measured_steps(planner: RunPlanner) -> None:
    (alone,) = outcomes(planner, [])
    assert alone.low == alone.high and " to " not in alone.line(alone)
    spread = replace(alone, low=0.9, high=1.2)
    assert "(0.9 to 1.2)" in spread.line(spread)


def test_a_change_of_rewards_needs_their_times() -> None:
    for change in ("rewards*2", "reward.timeout_s=1"):
        with pytest.raises(UserError, match="--reward-seconds"):
            outcomes(RunPlanner("quickstart_grpo", TINY, "cpu"), [change])


def test_a_device_is_moved_in_the_allocation() -> None:
    words = [*TINY, "trainer.launcher=ray", "trainer.n_gpus_per_node=4"]
    apart = RunPlanner(
        "grpo", [*words, "trainer.allocation=embedded:d1+fsdp:d3"], "cpu"
    ).loaded.config
    assert keys_of("rollout+1", apart) == (
        "trainer.allocation='embedded[rollout]:d2+fsdp[actor]:d2'",
    )
    assert keys_of("response/2", apart) == (
        f"data.max_response_length={apart.data.max_response_length // 2}",
    )
