"""A pipeline that waits for something outside between two requests, with `rollout.batch_invariant`:
killed and resumed, it ends with the bits of one that was not, although no two runs have the same
batches."""

from pathlib import Path

import pytest

from tests.e2e.cli_runs import CliRun, Left, same_run
from tests.e2e.runs import Playground

PROGRAM = """
import asyncio
import time

from distflow import NodeRole, node
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.nodes.rollout_reward_filter import SAMPLED_FIELDS, generate
from distflow.rollout.engine import GenerateRequest


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def answer_later(group, rollout, tokenizer):
    draft = GenerateRequest(tuple(group.row.prompt_ids), (0, 1), group.params, group.stream)
    await rollout.generate(draft)
    await asyncio.sleep(time.time_ns() // 1000 % 40 / 1000)
    return await generate(group, rollout, tokenizer)


def pipeline():
    graph = grpo_pipeline()
    graph.nodes["rollout_actor"] = Node("rollout_actor", answer_later)
    return graph
"""


@pytest.mark.by_hand
@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    (tmp_path / "late.py").write_text(PROGRAM)

    def start(name: str) -> CliRun:
        keys = ground.overrides(
            name, "actor_rollout_ref.rollout.batch_invariant=true", "trainer.save_freq=1"
        )
        keys += [f"dag.pipeline={tmp_path}/late.py:pipeline"]
        return CliRun(tmp_path / f"{name}.log", ["train", "grpo", *keys])

    whole = start("whole")
    killed = start("killed")
    killed.wait_for((tmp_path / "killed/checkpoints/step-000001/manifest.json").exists)
    assert killed.kill()
    resumed = start("killed")
    assert (whole.status(), resumed.status()) == (0, 0), whole.said() + resumed.said()
    assert "resumed from step-00000" in resumed.said()
    same_run(Left(tmp_path / "whole"), Left(tmp_path / "killed"))
