"""Runs whose policy draws the numbers of its actions: checked, resumed, over two processes; and
faults that the first step finds."""

import math
from typing import Any

import pytest

from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.errors import TrustError
from distflow.observe.run_reader import read_samples
from distflow.rollout import hf_engine as hf
from distflow.runtime.error_limits import TooManyErrors
from tests.e2e.planting import plant_in_group
from tests.e2e.runs import Playground
from tests.e2e.test_acting import ACTS, FILE, flow

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.slow
ACTIONS = {
    "head": "gaussian",
    "low": -1.5,
    "high": 1.5,
    "action_dim": 2,
    "action_chunks_len": 4,
    "first_token": 20,
}
FLOW = ACTIONS | {
    "head": "flow_sde",
    "action_chunks_len": 2,
    "denoising_steps": 2,
    "bins": 4,
    "noise": 0.7,
}
HEADS = pytest.mark.parametrize("actions", [ACTIONS, FLOW], ids=lambda own: str(own["head"]))
KEYS = (*ACTS, "actor_rollout_ref.actor.optim.lr=1e-4", "data.max_response_length=12")
FAST = "trainer.total_training_steps=1"


def options(**changes: Any) -> str:
    """Episodes of 5 steps, so that they end within a chunk."""
    made = {
        "env": f"{FILE}Pays",
        "env_kwargs": {"ends_at": 5},
        "prompt": "{state}",
        "score": "return",
        **changes,
    }
    return f"actor_rollout_ref.rollout.workflow_kwargs={flow({'actions': ACTIONS, **made})}"


@pytest.fixture
def playground(tmp_path):
    made = Playground(tmp_path)
    made.write_rows([{"prompt": f"{number}", "answer": "", "seed": number} for number in range(12)])
    return made


@HEADS
def test_every_check_of_a_run_passes(playground, actions):
    keys = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coef=0.01")
    validates = (
        f"data.val_files={playground.folder}/rows.jsonl",
        "data.allow_overlap=true",
        "trainer.test_freq=1",
    )
    run = playground.run(
        "grpo",
        *KEYS,
        options(actions=actions),
        *keys,
        *validates,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )
    passed = {name for step in run.checks() for name in step["passed"]}
    assert {"episodes", "gradients", "masks", "rewards", "turns", "validation"} <= passed
    assert not run.notes("warning")
    assert all(row["reward_parts"]["env_steps"] == 5 for row in read_samples(run.folder, 1))


def shifted_by_a_hundredth(patch: Patch) -> None:
    def shift(batch: Batch) -> None:
        batch["action_values"] = batch.flat("action_values") + 0.01 * batch.flat("response_mask")

    plant_in_group(patch, shift)


def drawn_a_hundredth_away(patch: Patch) -> None:
    """The engine records another number than it drew, with the log-prob of the one that it drew."""

    draw = Segment.drawn

    def drawn(*given: Any, values: list[float], **more: Any) -> Segment:
        return draw(*given, values=[each + 0.01 for each in values], **more)

    patch.setattr(Segment, "drawn", drawn)


def clipped_before_it_is_recorded(patch: Patch) -> None:
    def clip(batch: Batch) -> None:
        batch["action_values"] = batch.flat("action_values").clamp(-0.5, 0.5)

    plant_in_group(patch, clip)


FAULTS = {
    shifted_by_a_hundredth: r"found \(.*(turns|log_probs|draws)",
    drawn_a_hundredth_away: r"found \(|disagree",
    clipped_before_it_is_recorded: r"found \(",
}


@pytest.mark.parametrize("plant", FAULTS)
def test_a_wrong_number_ends_the_run_in_the_first_step(playground, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(TrustError, match=FAULTS[plant]):
        playground.run("grpo", *KEYS, options(), FAST)


def test_numbers_that_are_not_finite_are_errors_of_their_episodes(playground, monkeypatch):
    """They are neither executed nor trained on, and the run ends with their cause."""
    right = hf.normal_of
    monkeypatch.setattr(hf, "normal_of", lambda *given: [each * math.nan for each in right(*given)])

    with pytest.raises(
        TooManyErrors,
        match="160 of 160 scores .* is nan: ",
    ):
        playground.run("grpo", *KEYS, options(), FAST)
