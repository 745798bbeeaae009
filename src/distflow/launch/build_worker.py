"""Builds a worker from its parts: the only place that knows all implementations."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from distflow.checks.canary import make_canary
from distflow.checks.checker import Checker
from distflow.launch.run_folders.export_checkpoint import write_hf_models
from distflow.rewards.reward_results import RewardCounts
from distflow.rewards.router import KINDS
from distflow.runtime.checkpoint.saver import Saver
from distflow.runtime.checks_protocol import Updates
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.error_limits import ErrorShare, GroupFailures
from distflow.runtime.node_context import Contexts
from distflow.runtime.offload import Offload
from distflow.runtime.reshard_columns import ColumnReshard
from distflow.runtime.rollout_loop.group_tasks import GroupEvents, RolloutLoop
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.spec import Spec
from distflow.runtime.validation import ValidationRunner, Validator
from distflow.runtime.weight_sync.sender import WeightSync
from distflow.runtime.worker import Worker
from distflow.runtime.worker_inputs import WorkerInputs


def build_worker(inputs: WorkerInputs) -> Worker:
    """The worker of a rank in the plan, not yet entered."""
    spec = inputs.spec
    rank = inputs.rank
    ports = inputs.ports
    recorder = inputs.recorder
    plan = spec.plan.ranks[rank]
    pipeline = spec.pipeline()
    warn = partial(recorder.note, "warning")
    generating = [worker.rank for worker in spec.plan.ranks if worker.rollout_nodes]

    services = RolloutServices.of(spec, inputs.resources, writes_stacks=True)
    resources = services.resources
    if resources.reward_fn is not None:
        resources.reward_fn.has_scored = inputs.version.step > 0

    offload = Offload({**resources.trained(), **resources.scoring_models}, spec.offloads)
    named = {**resources.by_name(), "reduce": ports.data, "dp_group": ports.collective}
    training_nodes = compile_steps([pipeline.node(name) for name in plan.training_nodes], named)

    checks = Checker(inputs, pipeline, training_nodes, services, offload.all)
    updates = Updates(checks, recorder.phases, resources.critic)
    keeps_state = bool(plan.training_nodes) and generating == [rank]
    contexts = Contexts(spec.config, resources, inputs.state, updates, keeps_state)

    def reward_counts() -> RewardCounts:
        taken = rollout_loop.call_counts.take()
        counts = {f"reward/{kind}": 0.0 for kind in KINDS if resources.reward_fn is not None}
        recorder.engine_activity(resources.rollout)
        counts |= recorder.decoded
        recorder.decoded = Counter()
        for name, number in sorted(taken.counts.items()):
            counts[name] = float(number)
        return taken._replace(counts=counts)

    def group_ended(*outcome: Any) -> None:
        recorder.group_ended(*outcome)
        if not training_nodes:
            recorder.folder.flush()
            ports.queue.count(reward_counts())

    nodes = [pipeline.node(name) for name in plan.rollout_nodes]
    events = GroupEvents(
        group_ended, recorder.group_dropped, GroupFailures(warn).add, recorder.waits
    )
    rollout_loop = RolloutLoop.of(spec, nodes, resources, contexts, checks.groups, events)
    validator = Validator(
        spec.validation,
        contexts,
        rollout_loop,
        resources.stop_token_ids,
        spec.config.trainer.seed,
        warn,
    )

    canary = None
    if resources.rollout is not None and resources.actor is not None:
        canary = make_canary(spec, resources)

    saver = Saver(
        inputs.store,
        ports.everyone,
        recorder.checkpoint_saved,
        waits=recorder.waits,
        after_commit=partial(_after_commit, spec, warn),
    )

    return Worker(
        inputs,
        services,
        training_nodes,
        checks,
        updates,
        contexts,
        rollout_loop,
        ColumnReshard(spec.plan, pipeline, rank, ports.reshard),
        ValidationRunner(inputs, services, validator, offload, checks),
        WeightSync(inputs, services, updates, offload, canary),
        offload,
        saver,
        ErrorShare(spec.config.reward.max_error_rate, warn, recorder.view.reward_failed),
        reward_counts,
    )


def _after_commit(spec: Spec, warn: Callable[[str], None]) -> None:
    """What follows a complete checkpoint."""
    if spec.saves_hf_model:
        write_hf_models(spec.run_dir, warn)
