"""Single checks on small steps that are recorded by hand."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distflow.checks import log_probs
from distflow.checks.check import Wrong
from distflow.checks.gradients import check_gradients
from distflow.checks.group_records import GroupRecord, GroupRecords
from distflow.checks.groups import check_groups
from distflow.checks.log_probs import check_log_probs
from distflow.checks.mini_batches import check_mini_batches
from distflow.checks.optimizers import check_optimizers
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.rewards import check_rewards
from distflow.checks.samples import samples_of
from distflow.checks.update_records import UpdateRecord
from distflow.config import load_config
from distflow.data.batch import Batch
from distflow.graph import NodeRole
from distflow.pipelines import nodes
from distflow.scheduling.group_states import PromptGroup
from distflow.training.engine import OneRank
from tests.checks.batches import WeightsOnly, sampled_batch


def writer(column: str) -> Any:
    """A built-in node that writes the column."""
    return SimpleNamespace(
        node_id=column,
        node_role=NodeRole.DEFAULT,
        fn=nodes.generate,
        contract=SimpleNamespace(writes=(column,)),
    )


def recorded(
    batch: Batch,
    *overrides: str,
    pipeline: tuple[Any, ...] = (),
    ranks: Any = None,
    **resources: Any,
) -> RecordedStep:
    """Step 1 of a run with this batch. pipeline: its nodes. ranks: that share the step, one without
    it. resources: its engines, None for the others."""
    config = load_config("grpo", overrides, complete=False).config
    data = SimpleNamespace(domains=(), group_size=2, total_steps=10)
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(config=config, data=data),
        pipeline=SimpleNamespace(nodes=pipeline),
        resources=SimpleNamespace(**{"actor": None, "ref": None, "critic": None} | resources),
        ranks=ranks or OneRank(),
        training_steps=(),
        state={},
        rows_used={},
    )

    return RecordedStep(run, 0, {}, [0, 1], batch, None, {}, {})


def update(step: RecordedStep, batch: Batch | None = None) -> UpdateRecord:
    """A first update, in its warm-up, by an engine that hides its model and optimizer."""
    metrics = {"lr": 0.0}
    loss: Any = None
    return UpdateRecord(
        "actor", WeightsOnly(), loss, step.batch if batch is None else batch, metrics=metrics
    )


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        (None, ""),
        ((0, 1, 0.25), r"token_level_scores of sample 0-0 is 0\.25 at token 1 of 5, .* 0"),
        ((0, 2, 0.25), r"sample 0-0 has the score 0\.5, "),
        ((3, 5, 9.0), "sample 1-1 has the score 9, "),
    ],
)
def test_rewards_of_turns_are_on_their_last_tokens_and_sum_to_the_score(changed, wrong):
    """The second turn follows the first without a token between them."""
    batch = sampled_batch()
    batch["turn_index"] = torch.tensor(
        [[0, 0, 0, 1, 1, -1], [0] + [-1] * 5, [0] * 4 + [-1] * 2, [0] * 6]
    )
    placed = torch.zeros(4, 6)
    placed[0, 2] = 0.5
    placed[0, 4] = 0.25
    placed[3, 5] = -1.0
    batch["scores"] = placed.sum(-1)
    batch["reward_errors"] = [None] * 4
    batch["reward_parts"] = batch["reward_extra"] = [{}] * 4
    if changed is not None:
        placed[changed[:2]] = changed[2]
    batch["token_level_scores"] = batch["token_level_rewards"] = placed
    keys = "actor_rollout_ref.rollout.workflow=theirs.py:theirs"
    step = recorded(batch, keys, pipeline=(writer("scores"), writer("token_level_rewards")))
    with pytest.raises(Wrong, match=wrong) if wrong else nullcontext():
        assert check_rewards.run(step) is None


@pytest.mark.parametrize("paid", [0.75, 0.5])
def test_the_score_of_every_episode_is_what_its_workflow_returned(paid):
    batch = sampled_batch()
    batch["scores"] = torch.tensor([0.75, 0.75, 0.75, paid])
    batch["reward_errors"] = [None] * 4
    batch["reward_parts"] = [{}] * 4
    key = "actor_rollout_ref.rollout.workflow=theirs.py:theirs"
    step = recorded(batch, key, pipeline=(writer("scores"),))
    step.records = {number: GroupRecord(PromptGroup(number, 0, number, 2, 0)) for number in (0, 1)}

    for sample in step.samples:
        index = int(sample["uid"].rpartition("-")[2])
        step.records[int(sample["group_index"])].add_event(index, "returned", 0.75)

    is_wrong = paid != 0.75
    with pytest.raises(Wrong, match=r"sample 1-1 .* 0\.5") if is_wrong else nullcontext():
        assert check_rewards.run(step) is None


def test_an_engine_that_hides_its_parts_is_named_in_the_checks_of_updates():
    step = recorded(sampled_batch())
    step.updates.append(update(step))
    assert check_gradients.run(step) == "an engine that was updated does not expose its model"
    assert "its engine does not expose it" in str(check_optimizers.run(step))


def test_an_engine_that_hides_its_model_is_named_in_the_check_of_log_probs(monkeypatch):
    columns = ("old_log_probs", "ref_log_prob", "values")
    engines = {"ref": WeightsOnly(), "critic": WeightsOnly()}
    pipeline = tuple(map(writer, columns))
    hidden = recorded(sampled_batch(), pipeline=pipeline, actor=WeightsOnly(), **engines)
    assert check_log_probs.run(hidden) == "the model that computes old_log_probs is not exposed"

    policy = SimpleNamespace(model=nn.Linear(1, 1), optimizer=None)
    step = recorded(
        sampled_batch(),
        "algorithm.recompute_old_log_probs=false",
        pipeline=pipeline,
        actor=policy,
        **engines,
    )
    monkeypatch.setattr(log_probs, "scored_samples", lambda step: step.samples[:1])
    monkeypatch.setattr(log_probs, "policy_scores", lambda *_: {})
    assert (
        check_log_probs.run(step) == "the model that computes ref_log_prob, values is not exposed"
    )


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([2, 3], ""),
        ([], " 2 groups, .* 1"),
        ([2], "group 1 has 1 samples, .* 2"),
        ([3, 3], "sample 1-1 .* 2 times"),
        ([0, 1, 2, 3], "group 0 has 4 samples, .* 2"),
    ],
)
def test_groups_are_counted_over_all_ranks(rows, wrong):
    """rows: of the other rank; this one has those of the first group."""
    batch = sampled_batch()
    other = [
        (sample["group_index"], sample["domain"], sample["uid"])
        for sample in samples_of(batch.select(rows))
    ]
    ranks = SimpleNamespace(size=2, gather=lambda own: [own, other])
    step = recorded(batch.select([0, 1]), pipeline=(writer("responses"),), ranks=ranks)
    with pytest.raises(Wrong, match=wrong) if wrong else nullcontext():
        assert check_groups.run(step) is None


def test_a_group_of_a_worker_that_takes_no_step_is_handed_on_and_not_kept():
    seen, batch = list[int](), sampled_batch()
    records = GroupRecords(
        lambda record, columns: seen.append(record.prompt_group.group_id + len(columns))
    )
    records.begin(PromptGroup(7, 0, 7, 2, 0))
    records.keep(batch)
    assert seen == [7 + len(batch)] and records.take([7]) == {}
    records.keep()
    assert len(records.take_validated()) == 1


def test_a_role_that_takes_no_update_at_all_is_found():
    critic = writer("")
    critic.contract.writes = ()
    critic.engines = ("critic",)
    step = recorded(sampled_batch(), "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    step.run.training_steps = (SimpleNamespace(node=critic),)
    step.updates += [update(step)]
    with pytest.raises(Wrong, match="critic .* 0 optimizer steps"):
        check_mini_batches.run(step)


@pytest.mark.parametrize("column", ["selected_tokens", "advantages"])
def test_a_column_may_not_change_between_mini_batches(column):
    batch = sampled_batch()
    batch[column] = torch.ones_like(batch.flat("response_mask"))
    later = batch.select(range(len(batch)))
    later[column] = torch.zeros_like(batch.flat("response_mask"))
    step = recorded(batch, "actor_rollout_ref.actor.ppo_epochs=2")
    step.updates += [update(step), update(step, later)]

    with pytest.raises(Wrong, match=f"{column} of sample 0-0 in mini-batch 2 of the actor"):
        check_mini_batches.run(step)
