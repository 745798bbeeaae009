"""Whole runs with a workflow: a game of several turns trains, and the audits follow every request."""

from pathlib import Path

import pytest
import torch

from distflow.data.batch import Batch
from distflow.observe.reading.run_reader import read_events
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow

GAME = """
from distflow import workflow

@workflow
async def echo(chat, row, *, rounds: int = 2):
    reply = await chat.ask(row.prompt, max_tokens=3)
    while chat.turns < rounds:
        reply = await chat.ask("=?", max_tokens=3)
    return {"length": len(reply.text) / 4, "letters": sum(map(ord, reply.text)) % 7 / 6}
"""
WORKFLOW = "actor_rollout_ref.rollout.workflow"


class Games(Playground):
    """Runs without reward functions."""

    def overrides(self, name: str, *more: str) -> list[str]:
        return [line for line in super().overrides(name, *more) if "reward" not in line.partition("=")[0]]


@pytest.fixture
def playground(tmp_path: Path) -> Playground:
    playground = Games(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    return playground


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_game_of_two_turns_trains_and_every_audit_passes(playground: Playground, max_staleness: int) -> None:
    run = playground.run(
        "grpo",
        f"{WORKFLOW}={playground.folder}/game.py:echo",
        "trainer.total_training_steps=4",
        "trainer.save_groups=all",
        "trust.audit_freq=1",
        f"async.max_staleness={max_staleness}",
    )
    assert not run.notes("warning")
    audits = [event.fields for event in read_events(run.folder) if event.kind == "audit"]
    assert len(audits) == 4
    for audit in audits:
        assert {"turns", "masks", "versions", "draws", "loss", "advantages"} <= {*audit["proven"]}
    for path in sorted((run.folder / "tokens").glob("*.safetensors")):
        batch = Batch.load(path)
        for mask, trained in zip(batch["response_mask"], batch["loss_mask"], strict=True):
            edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            assert len(edges) == 4 and edges[0] == 0 and edges[2] - edges[1] == 2, "two turns, given tokens between"
            assert torch.equal(mask, trained)
