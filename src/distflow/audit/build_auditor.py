"""Builds the auditor of a worker, with its access to the run, its state and its event log."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from distflow.audit.auditor import Auditor, Note
from distflow.audit.recorded_data import Inputs, Parts
from distflow.audit.recorder import GroupRecords
from distflow.audit.schedule import AuditSchedule
from distflow.audit.sharded_forward import Turns
from distflow.data.batch import Batch
from distflow.graph import BoundPipeline
from distflow.rewards.score import RewardResult
from distflow.runtime.audit_protocol import AUDIT_STATE
from distflow.runtime.compiled_node import Step
from distflow.runtime.context import NodeContext
from distflow.runtime.recorder import Recorder
from distflow.runtime.rollout_services import Session
from distflow.runtime.worker_inputs import WorkerInputs


def build_auditor(
    inputs: WorkerInputs,
    pipeline: BoundPipeline,
    training_nodes: Sequence[Step],
    services: Session,
    bring: Callable[[], None],
) -> Auditor:
    """The auditor of a worker. bring: see `Parts`."""
    spec, groups, reward_fn = inputs.spec, GroupRecords(), services.resources.reward_fn
    if reward_fn is not None and spec.options.audit_freq > 0:
        reward_fn.pools.set_on_result(groups.add_score)
    first, warmup = inputs.version.step, spec.config.trainer.critic_warmup  # the policy is first trained after it
    return Auditor(
        _parts(inputs, pipeline, training_nodes, services, bring),
        groups,
        AuditSchedule(spec.options.audit_freq, first, spec.data.max_staleness, (warmup,)),
        inputs.state.setdefault(AUDIT_STATE, {}),
        _note(inputs.recorder),
    )


def _parts(
    inputs: WorkerInputs,
    pipeline: BoundPipeline,
    training_nodes: Sequence[Step],
    services: Session,
    bring: Callable[[], None],
) -> Parts:
    spec, resources, ranks = inputs.spec, services.resources, inputs.ports.collective
    ends, reward_fn = resources.stop_token_ids, resources.reward_fn
    estimator = next((step for step in training_nodes if "advantages" in step.node.contract.writes), None)
    return Parts(
        config=spec.config,
        pipeline=pipeline,
        training_nodes=[step.node for step in training_nodes],
        rows=spec.rows,
        data=spec.data,
        sampling=replace(spec.sampling, stop_token_ids=ends),
        sampling_of={name: replace(own, stop_token_ids=ends) for name, own in spec.sampling_of.items()},
        tokenizer=resources.tokenizer,
        actor=resources.actor,
        critic=resources.critic,
        ref=resources.ref,
        reward_fn=partial(_ask, services) if reward_fn is not None else None,
        scored_in_groups=reward_fn.pools.takes_groups if reward_fn is not None else frozenset(),
        hashes=partial(_engine_hashes, services) if resources.rollout is not None else None,
        weight_dtype=spec.weight_dtype,
        exact=spec.config.actor_rollout_ref.model.dtype == "float32",
        num_ranks=sum(bool(rank.training_nodes) for rank in spec.plan.ranks),
        estimate=partial(_estimate, inputs, estimator, resources.tokenizer) if estimator is not None else None,
        turns=Turns(ranks, _models(resources.actor, resources.critic, resources.ref)),
        bring=bring,
        ranks=ranks,
        first_step=inputs.version.step,
        total_steps=spec.data.total_steps,
    )


def _ask(services: Session, name: str, arguments: Mapping[str, object]) -> RewardResult:
    assert services.resources.reward_fn is not None, "called only if there is one"
    return services.call(services.resources.reward_fn.pools.call(name, arguments))


def _engine_hashes(services: Session) -> dict[str, str]:
    assert services.resources.rollout is not None, "called only if there is one"
    return services.call(services.resources.rollout.hashes())


def _estimate(inputs: WorkerInputs, estimator: Step, tokenizer: Any, batch: Batch) -> Inputs:
    """The function that writes the advantages, and its arguments, with a copy of its state."""
    state = copy.deepcopy(inputs.state.get(estimator.node.node_id, {}))
    ctx = NodeContext(inputs.spec.config, inputs.version.step, tokenizer, state)
    return estimator.fn, *estimator.inputs(batch, {"batch": batch, "ctx": ctx})


def _note(recorder: Recorder) -> Note:
    """The callback that records a warning or an audit event."""

    def note(kind: str, message: str, **fields: Any) -> None:
        if kind == "warning":
            recorder.note(kind, message)
        else:
            recorder.audited(message, **fields)

    return note


def _models(*engines: object) -> list[nn.Module]:
    """The models of the engines that expose them."""
    return [model for engine in engines if isinstance(model := getattr(engine, "model", None), nn.Module)]
