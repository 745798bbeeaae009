"""The parts of a worker, which `launch/build_worker.py` builds from `WorkerInputs`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distflow.rewards.reward_results import RewardCounts
from distflow.runtime.checkpoint.saver import Saver
from distflow.runtime.checks_protocol import RunChecks, Updates
from distflow.runtime.compiled_node import Contexts, Step
from distflow.runtime.error_limits import ErrorShare
from distflow.runtime.offload import Offload
from distflow.runtime.reshard_columns import ColumnReshard
from distflow.runtime.rollout_loop.group_tasks import RolloutLoop
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.validation import ValidationRunner
from distflow.runtime.weight_sync.sender import WeightSync
from distflow.runtime.worker_inputs import WorkerInputs


@dataclass(frozen=True)
class WorkerParts:
    """The parts that a worker calls. services: with the resources, their engine watched.
    training_nodes: compiled, in order. reward_counts: of this worker's reward calls since the last
    call."""

    inputs: WorkerInputs
    services: RolloutServices
    training_nodes: Sequence[Step]
    checks: RunChecks
    updates: Updates
    contexts: Contexts
    rollout_loop: RolloutLoop
    reshard: ColumnReshard
    validation: ValidationRunner
    weight_sync: WeightSync
    offload: Offload
    saver: Saver
    errors: ErrorShare
    reward_counts: Callable[[], RewardCounts]
