"""A worker's inputs from its launcher: its ports to other processes, and what it works on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distflow.runtime.checkpoint.checkpoint_store import Checkpoint, CheckpointStore
from distflow.runtime.node_context import NodeState
from distflow.runtime.reshard_columns import ReshardPort
from distflow.runtime.resources import Resources
from distflow.runtime.run_recorder import Recorder
from distflow.runtime.sample_queue.protocol import SampleQueuePort
from distflow.runtime.spec import Spec
from distflow.runtime.stop_signals import Stop
from distflow.runtime.validation_results import ValidationResults
from distflow.runtime.weight_sync.protocol import EnginePort, WeightPort
from distflow.scheduling.group_states import Version
from distflow.training.engine import Collective


@dataclass(frozen=True)
class Ports:
    """The ports of one worker."""

    queue: SampleQueuePort
    engine: EnginePort
    """Where its rollout engine gets weights."""
    weights: WeightPort | None
    """Where its weights go; None if it does not train."""
    collective: Collective
    """Of the ranks of its dp group."""
    data: Collective
    """Of the ranks among them with separate samples, one for each share of a step."""
    everyone: Collective
    """Of all training ranks."""
    abort: Callable[[BaseException], None]
    """Informs all other parts of the run that this one has failed."""
    validate: Callable[[int], Sequence[ValidationResults]] = lambda step: ()
    """Validates on the workers with an engine, for one without."""
    reshard: ReshardPort | None = None
    """None if no columns go from one dp group to another."""


@dataclass(frozen=True)
class WorkerInputs:
    """The inputs of a worker."""

    spec: Spec
    rank: int
    resources: Resources
    ports: Ports
    recorder: Recorder
    store: CheckpointStore
    stop: Stop
    state: NodeState
    """Of nodes, across steps."""
    version: Version
    """Of the weights in the resources."""
    resumed: Checkpoint | None = None
    """The checkpoint that both come from; None at a run's start."""
