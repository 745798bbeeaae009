"""Single checks on small steps that are recorded by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distflow.audit import log_probs
from distflow.audit.log_probs import audit_log_probs
from distflow.audit.recorded_calls import UpdateRecord
from distflow.audit.recorded_data import RecordedStep, Wrong
from distflow.audit.samples import audit_groups
from distflow.audit.updates import audit_gradients, audit_mini_batches, audit_optimizer, schedule, total_updates
from distflow.config import load_config
from distflow.data.batch import Batch
from distflow.graph import NodeRole
from distflow.pipelines import nodes
from tests.checks.batches import WeightsOnly, sampled_batch


def writer(column: str) -> Any:
    """A built-in node that writes the column."""
    return SimpleNamespace(
        node_id=column, node_role=NodeRole.DEFAULT, fn=nodes.generate, contract=SimpleNamespace(writes=(column,))
    )


def recorded(batch: Batch, *overrides: str, pipeline: tuple[Any, ...] = (), **resources: Any) -> RecordedStep:
    """Step 1 of a run with this batch. pipeline: its nodes. resources: its engines, None for the others."""
    config = load_config("grpo", overrides, complete=False).config
    data = SimpleNamespace(domains=(), group_size=2, total_steps=10)
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(config=config, data=data),
        pipeline=SimpleNamespace(nodes=pipeline),
        resources=SimpleNamespace(**{"actor": None, "ref": None, "critic": None} | resources),
        num_ranks=1,
        state={},
    )
    return RecordedStep(run, 0, {}, [0, 1], batch, None, {}, {})


def update(step: RecordedStep, batch: Batch | None = None) -> UpdateRecord:
    """An update at the scheduled rate by an engine that hides its model and optimizer."""
    optim = step.config.actor_rollout_ref.actor.optim
    metrics = {"lr": optim.lr * schedule(optim, 0, total_updates(step, "actor"))}
    loss: Any = None
    return UpdateRecord("actor", WeightsOnly(), loss, step.batch if batch is None else batch, metrics=metrics)


@pytest.mark.parametrize("node_id", ["dynamic_sampling", "mine"])
def test_the_filter_of_groups_is_found_under_any_id(node_id: str) -> None:
    batch = sampled_batch()
    batch["acc"] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    role, contract = NodeRole.DYNAMIC_SAMPLING, SimpleNamespace(writes=())
    node = SimpleNamespace(node_id=node_id, node_role=role, fn=nodes.dynamic_sampling, contract=contract)
    filters = "algorithm.filter_groups.enable=true"
    with pytest.raises(Wrong, match=r"group 1 was kept, but all its samples have the accuracy \{1\.0\}"):
        audit_groups.run(recorded(batch, filters, pipeline=(node,)))
    assert audit_groups.run(recorded(batch, filters)) is None, "without the node nothing is filtered"
    node.fn = lambda: None
    assert audit_groups.run(recorded(batch, filters, pipeline=(node,))) is None, "a user's filter has its own criterion"


def test_an_engine_that_hides_its_parts_is_named_in_the_checks_of_updates() -> None:
    step = recorded(sampled_batch())
    step.updates.append(update(step))
    assert audit_gradients.run(step) == "an engine that was updated does not expose its model"
    assert "its engine does not expose it" in str(audit_optimizer.run(step))


def test_an_engine_that_hides_its_model_is_named_in_the_check_of_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ("old_log_probs", "ref_log_prob", "values")
    engines = {"ref": WeightsOnly(), "critic": WeightsOnly()}
    pipeline = tuple(map(writer, columns))
    hidden = recorded(sampled_batch(), pipeline=pipeline, actor=WeightsOnly(), **engines)
    assert audit_log_probs.run(hidden) == "the model that computes old_log_probs is not exposed"

    policy = SimpleNamespace(model=nn.Linear(1, 1), optimizer=None)
    step = recorded(
        sampled_batch(), "algorithm.recompute_old_log_probs=false", pipeline=pipeline, actor=policy, **engines
    )
    monkeypatch.setattr(log_probs, "audited_samples", lambda step: step.samples[:1])
    monkeypatch.setattr(log_probs, "policy_scores", lambda *_: {})
    assert audit_log_probs.run(step) == "the model that computes ref_log_prob, values is not exposed"


@pytest.mark.parametrize("column", ["selected_tokens", "advantages"])
def test_a_column_may_not_change_between_mini_batches(column: str) -> None:
    batch = sampled_batch()
    batch[column] = torch.ones_like(batch.flat("response_mask"))
    later = batch.select(range(len(batch)))
    later[column] = torch.zeros_like(batch.flat("response_mask"))
    step = recorded(batch)
    step.updates += [update(step), update(step, later)]
    with pytest.raises(Wrong, match=f"{column} of sample 0-0 in mini-batch 2 of the actor differs from its value"):
        audit_mini_batches.run(step)
