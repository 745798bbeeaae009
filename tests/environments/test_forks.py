"""Whole runs with episodes whose conversations branch: what is trained on, by which advantage and
loss."""

from collections.abc import Iterator
from typing import Any

import pytest

from distflow.data.batch import Batch
from distflow.environments.chat import Chat
from distflow.errors import TrustError
from distflow.observe.run_reader import read_samples
from tests.environments.test_training import Games, saved

pytestmark = pytest.mark.slow

WORKFLOW = "actor_rollout_ref.rollout.workflow"
BRANCHES = """
import asyncio, os

async def branches(chat, row):
    first = await chat.ask(row.prompt, max_tokens=3)
    if sum(first.token_ids) % 3 == 0:
        return len(first.text) / 4
    left, right = chat.fork(), chat.fork()
    await asyncio.sleep(os.urandom(1)[0] / 10_000)
    one, two = await asyncio.gather(left.ask("L", max_tokens=2), right.ask("RR", max_tokens=3))
    await asyncio.gather(left.fork().ask("LL", max_tokens=2), left.ask("?", max_tokens=1), idle(chat.fork()))
    summary = chat.fork([{"role": "user", "content": one.text + two.text}])
    last = await summary.ask("so", max_tokens=4)
    return sum(last.token_ids) % 7 / 6

async def idle(chat):
    pass

async def back(chat, row):
    await chat.ask(row.prompt, max_tokens=2)
    side = chat.fork()
    await side.ask("x", max_tokens=2)
    side.reward(0.5)
    last = await chat.ask("so?", max_tokens=10 if sum(chat.token_ids) % 2 else 3)
    chat.fork()
    return sum(last.token_ids) % 5 / 4
"""  # noqa: E501


@pytest.fixture
def playground(tmp_path):
    playground = Games(tmp_path)
    (tmp_path / "branches.py").write_text(BRANCHES)
    return playground


def conversations(batch: Batch, row: int) -> Iterator[tuple[list[int], list[bool]]]:
    """The token ids of each conversation of an episode, and which of them were drawn there."""
    prompt = int(batch.lengths("prompt")[row])
    response = int(batch.lengths("response")[row])
    ids = [
        *batch["prompt_ids"][row, :prompt].tolist(),
        *batch["response_ids"][row, :response].tolist(),
    ]
    drawn = [False] * prompt + (batch["response_mask"][row, :response] > 0).tolist()
    starts = [0, *(prompt + start for _, start in batch["forks"][row]), len(ids)]
    for start, end in zip(starts, starts[1:], strict=False):
        yield ids[start:end], drawn[start:end]


@pytest.mark.parametrize(("pipeline", "max_staleness"), [("grpo", 0), ("ppo", 1)])
def test_episodes_that_branch_train_and_every_check_passes(playground, pipeline, max_staleness):
    run = playground.run(
        pipeline,
        f"{WORKFLOW}={playground.folder}/branches.py:branches",
        "trainer.total_training_steps=3",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        f"async.max_staleness={max_staleness}",
    )
    assert not run.notes("warning")
    found = run.checks()
    assert len(found) == 3
    for step in found:
        assert {"turns", "masks", "versions", "draws", "loss", "advantages"} <= {*step["passed"]}
    batch = saved(run)
    branched = [row for row in range(len(batch)) if batch["forks"][row]]
    assert 0 < len(branched) < len(batch)

    for row in branched:
        assert [name for name, _ in batch["forks"][row]] == ["1", "1.1", "2", "4"], (
            "the idle fork leaves nothing"
        )
        root, left, under, right, summary = conversations(batch, row)
        assert left[0][: len(root[0])] == root[0] == right[0][: len(root[0])]
        assert not any(left[1][: len(root[0])]) and not any(right[1][: len(root[0])]), (
            "trained where they were drawn"
        )
        assert sum(root[1]) == 3 or root[1][-1]
        assert (
            sum(left[1]) <= 3 and sum(under[1]) <= 2 and sum(right[1]) <= 3 and sum(summary[1]) <= 4
        )
        assert under[0][: len(under[0]) - sum(under[1])][: len(root[0])] == root[0]

    rows = [row for step in (1, 2, 3) for row in read_samples(run.folder, step)]
    (said,) = {
        len(row["conversation"])
        for row in rows
        if any("fork" in turn for turn in row["conversation"])
    }
    assert said == 2 + 5 + 3 + 3 + 2, (
        "prompt and reply; left asks twice, its fork and right once, the summary"
    )

    for group in range(12 if pipeline == "grpo" else 0):
        rows = [row for row in range(len(batch)) if int(batch["group_index"][row]) == group]
        scores = batch["scores"][rows].double()

        # an episode counts once, with branches or without
        wanted = (scores - scores.mean()) / (scores.std() + 1e-6)
        for row, advantage in zip(rows, wanted.tolist(), strict=True):
            drawn = batch["advantages"][row][batch["response_mask"][row] > 0].tolist()
            assert len(rows) == 4 and drawn == pytest.approx([advantage] * len(drawn), abs=1e-4)

    told = sum(row["episodes/branches"] for row in run.metrics()) / len(run.metrics())
    assert told == pytest.approx(4 * len(branched) / len(batch))


def test_a_drawn_token_that_would_be_trained_in_two_conversations_is_found(playground, monkeypatch):
    right = Chat.fork

    def wrong(self: Chat, messages: Any = None) -> Chat:
        fork = right(self, messages)
        if fork.segments:
            fork.segments = list(self.segments)
        return fork

    monkeypatch.setattr(Chat, "fork", wrong)
    with pytest.raises(TrustError, match=r"\(turns\): .* no request"):
        playground.run(
            "grpo", f"{WORKFLOW}={playground.folder}/branches.py:branches", "trust.check_freq=1"
        )
