"""Functions that were passed from Python run in workers, which cannot import them."""

import asyncio

import pytest

import distflow
from distflow.environments.chat import Chat
from distflow.environments.workflows import Row
from distflow.observe.run_reader import read_events
from tests.api.passed_functions import CELLS, REGISTERED, cells
from tests.api.reward_results import lengths
from tests.api.small import ROWS, TINY, small
from tests.api.test_passed_functions import advantages
from tests.api.test_workflows import unscored
from tests.sparse_params import BY_HAND, one_fast_in
from tests.user_code import forgotten

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_ray")]


@pytest.mark.parametrize("launcher", one_fast_in(2, ["ray", "local"], others=BY_HAND))
def test_two_workers_run_what_a_cell_passes_and_registers(tmp_path, launcher):
    with forgotten():
        own = cells(CELLS + REGISTERED)
        settings = small(
            tmp_path / "run",
            trainer__total_training_steps=1,
            trainer__launcher=launcher,
            trainer__n_gpus_per_node=2,
            trainer__device="cpu",
            algorithm__adv_estimator="cells_level",
        )
        passed = {"loss": own["plain"], "pipeline": own["counting"]}
        run = distflow.train(TINY, settings, data=ROWS, reward=lengths, **passed)

    assert run.status == "finished" and advantages(run) == pytest.approx([0.25])
    assert [row["rollout/rows"] for row in run.metrics("train")] == [2.0]


def test_two_workers_train_episodes_that_branch(tmp_path):
    settings = unscored(
        tmp_path / "run",
        data={"train_batch_size": 2, "max_response_length": 8},
        trainer__launcher="ray",
        trainer__n_gpus_per_node=2,
        trainer__device="cpu",
        trainer__total_training_steps=2,
        trust__check_freq=1,
    )
    run = distflow.train(TINY, settings, data=ROWS, workflow=branching)
    assert (
        run.status == "finished"
        and [row["episodes/branches"] for row in run.metrics("train")] == [2.0] * 2
    )
    checks = [event.fields for event in read_events(tmp_path / "run") if event.kind == "checks"]
    assert {"turns", "masks", "log_probs", "loss", "draws"} <= {
        name for own in checks for name in own["passed"]
    }


async def branching(chat: Chat, row: Row) -> float:
    await chat.ask(row.prompt, max_tokens=2)
    sides = [chat.fork(), chat.fork([{"role": "user", "content": "a="}])]
    replies = await asyncio.gather(*(side.ask("=", max_tokens=2) for side in sides))
    return sum(sum(map(ord, reply.text)) for reply in replies) % 5 / 4
