"""`distflow.rollouts` over a real Ray: the numbers of one process, the same bounds, and nothing
left behind."""

import asyncio
import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import distflow
from distflow import Chat, Row
from distflow.algorithms.objectives import PolicyObjective
from distflow.cluster.remote_calls import WorkerDied
from distflow.data.batch import Batch
from distflow.observe.run_reader import read_metrics
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.fault_injection import Fault
from distflow.runtime.sample_queue.submissions import NothingToWaitFor
from tests.api.test_own_training_loop import OWN, learn, opened, prompts
from tests.cluster.distance import distance
from tests.cluster.test_supervisor import TIMES
from tests.ledger_audit import verify

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_ray")]

ROOT = Path(__file__).parents[2]
TWO = {"trainer__launcher": "ray", "trainer__n_gpus_per_node": 2, "trainer__device": "cpu"}
APART = {
    "trainer__launcher": "ray",
    "trainer__allocation": "embedded[rollout]:d1+torch[actor]:d1",
    "trainer__device": "cpu",
}


class ReadsNothing(PolicyObjective):
    """A loss that reads a column that is not there, and does not say so before."""

    reads: tuple[str, ...] = ()

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float(batch["nothing"].sum())}


def areal(folder: Path, *overrides: str) -> distflow.Run:
    """The example, three steps of it."""
    main = runpy.run_path(str(ROOT / "examples" / "areal_gsm8k_grpo.py"))["main"]
    keys = (
        "total_training_steps=3",
        "save_freq=3",
        "test_freq=-1",
        "num_threads=1",
        f"default_local_dir={folder}",
    )
    data = ("data.train_batch_size=4", "data.max_response_length=8")

    return main(*data, *(f"trainer.{key}" for key in keys), *overrides)


def columns_here(batch: Batch) -> list[str]:
    """That this process has."""
    return [
        field.name for field, column in batch.columns() if isinstance(column, torch.Tensor | list)
    ]


def marked_by_rank(batch: Batch) -> None:
    batch["returns"] = torch.full_like(batch["token_level_rewards"], len(batch))
    batch["copied"] = [f"{text}!" for text in batch["prompts"]]
    batch["advantages"] = batch["advantages"] + batch["token_level_rewards"]


def figures(run: distflow.Run) -> list[Mapping[str, float]]:
    return [record.values for record in read_metrics(run.folder) if record.kind == "train"]


def test_areals_loop_trains_the_same_weights_on_one_process_and_on_two_workers(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    alone = areal(tmp_path / "alone")

    two = areal(
        tmp_path / "two", "trainer.launcher=ray", "trainer.n_gpus_per_node=2", "trainer.device=cpu"
    )
    for here, there in zip(figures(two), figures(alone), strict=True):
        wanted = {name: value for name, value in there.items() if not name.startswith(TIMES)}
        assert {name: here.get(name) for name in wanted} == pytest.approx(
            wanted, rel=1e-4, abs=1e-5
        )

    ours, theirs = (
        CheckpointStore(run.folder / "checkpoints").load(3).load("actor") for run in (two, alone)
    )
    names = [name for name in theirs if name.startswith("model.")]
    assert (
        distance({name: ours[name] for name in names}, {name: theirs[name] for name in names})
        < 1e-6
    )
    assert verify(two.folder / "ledger.jsonl") == verify(alone.folder / "ledger.jsonl")


def test_a_batch_stays_with_the_ranks_and_their_engines_answer_in_turn(tmp_path):
    """A column is here once it is written here, and is read from the ranks. What is generated is
    what one process generates."""

    async def asked(rollouts: distflow.Rollouts, ids: list[int]) -> list:
        return [rollouts.generate(ids)] + await asyncio.gather(
            *(rollouts.agenerate(ids) for _ in range(3))
        )

    with opened(tmp_path / "alone", None) as rollouts:
        ids = rollouts.tokenizer.encode("2+2=")
        alone = asyncio.run(asked(rollouts, ids))

    with opened(tmp_path / "run", None, **TWO) as rollouts:
        for (here,), (there,) in zip(asyncio.run(asked(rollouts, ids)), alone, strict=True):
            assert (here.token_ids, here.versions) == (there.token_ids, there.versions)
            assert here.rollout_log_probs == pytest.approx(there.rollout_log_probs, abs=1e-4)

        for row in OWN[:4]:
            rollouts.submit(row)
        first = rollouts.wait(1)
        second = rollouts.wait(1)
        batch = type(first).concat([first, second])
        assert len(batch) == 4 and not columns_here(batch)
        batch.copy_columns(rollouts.actor.forward(batch, ("log_probs",)), old_log_probs="log_probs")
        assert not columns_here(batch) and "log_probs" not in batch
        assert torch.allclose(batch["old_log_probs"], batch["rollout_log_probs"], atol=1e-4)
        batch["advantages"] = torch.arange(4.0)[:, None] * batch["response_mask"]
        assert columns_here(batch) == ["advantages"]
        rollouts.apply(batch, marked_by_rank)
        assert not columns_here(batch)
        assert batch["copied"] == [f"{text}!" for text in batch["prompts"]]
        assert (batch["returns"] == 2.0).all(), "each of two ranks has one of two groups"
        wanted = torch.arange(4.0)[:, None] * batch["response_mask"] + batch["token_level_rewards"]
        assert torch.equal(batch["advantages"], wanted)
        picked = batch.select([3, 0])
        assert not columns_here(picked)
        assert picked["prompts"] == [batch["prompts"][3], batch["prompts"][0]]
        rollouts.apply(picked, marked_by_rank)
        assert picked["advantages"][0, 0] == (wanted + batch["token_level_rewards"])[3, 0]
        renamed = batch.only([])
        renamed.copy_columns(batch, returns="advantages")
        both = Batch.concat([batch.only(["returns"]), renamed])
        assert not columns_here(both)
        values = torch.cat([batch.flat("returns"), batch.flat("advantages")])
        assert torch.equal(both.flat("returns"), values)
        rollouts.publish()


def test_submitted_prompts_come_back_in_their_order_if_their_function_accepts_them(tmp_path):
    """Two ranks generate and train. A batch has fewer groups than ranks, or is taken in parts."""

    def never(group: Batch) -> str:
        return "unwanted"

    async def counts(chat: Chat, row: Row) -> float:
        return 10.0 + len((await chat.ask(row.prompt)).token_ids)

    episodes = {"actor_rollout_ref__rollout__workflow": "single_turn"}
    with opened(tmp_path / "run", None, async__max_staleness=1, **TWO, **episodes) as rollouts:
        for number, row in enumerate(OWN[:5]):
            workflow = counts if number == 2 else None
            rollouts.submit(row, should_accept=never if number == 1 else None, workflow=workflow)

        first = rollouts.wait(1)
        learn(rollouts, first)
        second = rollouts.wait(1)
        learn(rollouts, second)
        rollouts.publish()
        batch = rollouts.wait(2)
        taken = [*prompts(first), *prompts(second), *prompts(batch)]
        assert taken == sorted(taken) == [row["prompt"] for row in (OWN[0], *OWN[2:5])]
        assert set(first["ground_truth"]) == {OWN[0]["answer"]} and len(batch) == 4
        scores = [float(each["scores"].min()) for each in (first, second, batch)]
        assert max(scores[0], scores[2]) < 10 < scores[1]
        with pytest.raises(NothingToWaitFor, match=" 1 unwanted"):
            rollouts.wait(1)
        with pytest.raises(KeyError, match="column 'nothing'"):
            rollouts.actor.train_step(batch, ReadsNothing())
        rollouts.train(batch)
        assert "actor/grad_norm" in rollouts.publish(), (
            "the loop goes on after an error of the loss"
        )

    assert dict(verify(tmp_path / "run" / "ledger.jsonl").dropped) == {"unwanted": 1}


@pytest.mark.faults
def test_a_rollout_worker_that_dies_is_replaced_within_a_step(tmp_path, plan):
    plan(Fault("rollout.generate", rank=0, call=1), Fault("queue.put", rank=0, call=2))
    with opened(tmp_path / "run", **APART) as rollouts:
        ids = rollouts.tokenizer.encode("2+2=")
        with pytest.raises(WorkerDied, match="newest weights"):
            rollouts.generate(ids)
        rollouts.submit(OWN[0])
        first = prompts(rollouts.wait(1))
        rollouts.submit(OWN[1])
        assert [*first, *prompts(rollouts.wait(1))] == [OWN[0]["prompt"], OWN[1]["prompt"]]
        assert set(rollouts.generate(ids)[0].versions) == {0}
        rollouts.publish()

        while batch := rollouts.prepare_batch():
            rollouts.train(batch)
            rollouts.publish()

    assert "worker 0 runs again" in [row["message"] for row in rollouts.run.events("warning")]
    assert verify(tmp_path / "run" / "ledger.jsonl").consumed == 8
