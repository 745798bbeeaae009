"""Incidents of other systems in scores and in the rows that a run trains on, planted into real runs
from the middle on."""

from collections.abc import Callable
from typing import Any

import pytest

from distflow.errors import TrustError
from distflow.rewards import router
from distflow.rewards.pool import process
from distflow.rewards.reward_results import Error, Score
from distflow.runtime.checkpoint.files import CheckpointError
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.scheduling import coordinator
from distflow.scheduling.group_states import CountsError
from tests.e2e.planting import plant_from
from tests.e2e.runs import Playground
from tests.patience import wait_until

Patch = pytest.MonkeyPatch
BEGIN = 6
STEPS = ("trainer.total_training_steps=16",)
FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    value = sum(map(ord, solution_str))
    if value % 8 == 0:
        raise RuntimeError("connection refused")
    return value % 7 / 6
"""


@pytest.fixture
def playground(tmp_path_factory):
    return Playground(tmp_path_factory.mktemp("incidents"), num_rows=128)


def failed_sum_is_0(patch: Patch) -> None:
    combine = router._combine

    def planted(parts: Any, weights: Any) -> Any:
        return combine(
            {n: Score(0.0) if isinstance(part, Error) else part for n, part in parts.items()},
            weights,
        )

    patch.setattr(router, "_combine", planted)


def failed_part_is_0(patch: Patch) -> None:
    """Each part's result, before the parts are summed."""
    outcome = router.RewardRouter._outcome

    def planted(self: Any, sample: Any, parts: Any) -> Any:
        return outcome(
            self, sample, {n: Score(0.0) if isinstance(p, Error) else p for n, p in parts.items()}
        )

    patch.setattr(router.RewardRouter, "_outcome", planted)


def failed_call_is_0(patch: Patch) -> None:
    """Where a reward process's answer is read."""
    read = process._read_answer

    def planted(*arguments: Any) -> Any:
        result = read(*arguments)
        return Score(0.0) if isinstance(result, Error) else result

    patch.setattr(process, "_read_answer", planted)


SLOW = [
    pytest.param(plant, marks=pytest.mark.slow) for plant in (failed_sum_is_0, failed_call_is_0)
]


@pytest.mark.parametrize("plant", [failed_part_is_0, *SLOW])
def test_dead_sandboxes_scored_0(playground, monkeypatch, plant):
    """allenai/open-instruct#1887, GAIR-NLP/ToRL#27."""
    playground.write_reward(FAILING)
    steps = plant_from(monkeypatch, BEGIN, plant)

    with pytest.raises(TrustError, match=r"\(reward_results\): .* score"):
        playground.run("grpo", *STEPS)

    assert BEGIN <= steps[-1] <= BEGIN + 3


ASYNC = (
    "async.max_staleness=2",
    "trainer.save_freq=1",
    "trainer.total_training_steps=6",
    "data.max_response_length=100",
    "actor_rollout_ref.rollout.max_num_seqs=4",
    "actor_rollout_ref.rollout.enforce_eager=true",
)
"""Few responses at a time, and long ones: some are in flight whenever a step ends."""


def broken_off(playground: Playground, patch: Patch) -> None:
    """A run that ends in its fourth step. Its last checkpoint has groups in flight, and one that
    waits for its step."""
    completed: list[int] = []

    def complete(self: coordinator.Coordinator, number: int, *more: Any) -> None:
        original_complete(self, number, *more)
        completed.append(number)

    def sync_changed(self: WeightSender, version: Any, updated: bool) -> Any:
        if version.step == 3:
            wait_until(lambda: len(completed) > 3 * 4, "a group that waits for step 4")
        if version.step == 4:
            raise RuntimeError("broken off")
        return original(self, version, updated)

    original = WeightSender.sync_changed
    original_complete = coordinator.Coordinator.complete

    with patch.context() as planted, pytest.raises(RuntimeError, match="broken off"):
        planted.setattr(WeightSender, "sync_changed", sync_changed)
        planted.setattr(coordinator.Coordinator, "complete", complete)
        playground.run("grpo", *ASYNC)


def keeps(patch: Patch, kept: Callable[[Any], bool], counted: bool = False) -> None:
    """A resume that restores the groups of a checkpoint that are `kept`. counted: the others count
    as trained on."""
    original = coordinator.Coordinator.__init__

    def init(self: Any, plan: Any, ledger: Any = None, snapshot: Any = None) -> None:
        if snapshot is not None:
            live = [group for group in snapshot["live"] if kept(group)]
            lost = len(snapshot["live"]) - len(live)
            assert lost, "else the fault has no effect"
            snapshot = {**snapshot, "live": live, "consumed": snapshot["consumed"] + lost * counted}
        original(self, plan, ledger, snapshot)

    patch.setattr(coordinator.Coordinator, "__init__", init)


LOST: dict[str, tuple[Callable[[Any], bool], bool, str]] = {
    # NVIDIA-NeMo/RL#3599: what was in flight, the longest responses, is in no checkpoint.
    "a resume that loses the long prompts": (
        lambda group: group["complete"],
        False,
        "resume from an earlier one",
    ),
    "a resume that counts the long prompts as trained": (
        lambda group: group["complete"],
        True,
        "data position consumed",
    ),
    # OpenRLHF/OpenRLHF#1322: what was generated ahead of its step is in no checkpoint.
    "a resume that drops what waits for its step": (
        lambda group: not group["complete"],
        False,
        "resume from an earlier one",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOST)
def test_rows_that_a_resume_loses(playground, monkeypatch, name):
    kept, counted, says = LOST[name]
    broken_off(playground, monkeypatch)
    keeps(monkeypatch, kept, counted)
    with pytest.raises((CountsError, CheckpointError, TrustError), match=says):
        playground.run("grpo", *ASYNC)
