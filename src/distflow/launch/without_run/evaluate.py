"""`distflow eval`: validation without a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from distflow.checks.canary import make_canary
from distflow.checks.group_records import GroupRecords
from distflow.config.derived_settings import reads_labels, reads_pairs
from distflow.errors import UserError
from distflow.graph import BoundNode
from distflow.observe.writing.timing import Waits, lasting
from distflow.planning.plan import plan_local
from distflow.rewards.reward_results import VALIDATION
from distflow.runtime.error_limits import warn_of_errors
from distflow.runtime.node_context import Contexts
from distflow.runtime.resources import Resources, build_resources
from distflow.runtime.rollout_loop.group_tasks import GroupEvents, RolloutLoop
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.sample_rows import SampleRows
from distflow.runtime.spec import Spec
from distflow.runtime.validation import Validator
from distflow.runtime.validation_loss import preference_objective, validation_loss
from distflow.runtime.weight_sync.receiver import WeightReceiver
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.runtime.worker_place import own_device
from distflow.scheduling.group_states import Version


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]
    rows: SampleRows
    """One per response, as in a run's validation."""
    num_prompts: dict[str, int] = field(default_factory=dict)
    """The number of prompts for each metric that is a share of prompts."""


def evaluate(spec: Spec, say: Callable[[str], None]) -> Evaluation:
    """Evaluate the current model on `data.val_files`. Raises UserError if there are none.

    say: called with the reason why a prompt has no score.
    """
    if not spec.validation:
        raise UserError("there is no evaluation data: set data.val_files")

    pipeline = spec.pipeline()
    device = spec.plan.ranks[0].device
    own_device(device)  # a worker's device, if the config is for a cluster

    # wherever the run has its parts, and with whole models
    (rank,) = plan_local(pipeline, device).ranks

    # Models of the training loop alone are not loaded: critic, reference, and models that score
    # whole steps. The loss of pairs and labelled responses reads the reference.
    used = {"actor"}
    if reads_pairs(spec.config) or reads_labels(spec.config):
        used.add("ref")
    for node in pipeline.rollout_nodes:
        used |= {*node.engines}
    rank = replace(rank, engines=tuple(engine for engine in rank.engines if engine in used))
    resources = build_resources(spec.factories, rank, shards=False, say=say)
    assert resources.actor is not None, "a pipeline trains something"

    if resources.rollout is None:
        with lasting(say, "evaluating"):
            objective = preference_objective(pipeline)
            metrics, rows = validation_loss(
                spec.validation,
                resources.actor,
                resources.ref,
                objective,
                spec.config.data.label_key,
            )
            return Evaluation(metrics, rows)

    nodes = [pipeline.node(name) for name in rank.rollout_nodes]
    return _evaluate_responses(spec, nodes, resources, say)


def _evaluate_responses(
    spec: Spec, nodes: Sequence[BoundNode], resources: Resources, say: Callable[[str], None]
) -> Evaluation:
    # the folder of an evaluation is temporary
    services = RolloutServices.of(spec, resources, writes_stacks=False)
    resources = services.resources
    assert resources.actor is not None and resources.rollout is not None, "checked before"
    contexts = Contexts(spec.config, resources, {}, updates=None)
    rollout_loop = RolloutLoop.of(spec, nodes, resources, contexts, GroupRecords(), GroupEvents())
    done = list[int]()
    validator = Validator(
        spec.validation,
        contexts,
        rollout_loop,
        resources.stop_token_ids,
        spec.config.trainer.seed,
        say,
        done.append,
    )

    def progress() -> str:
        return f", {sum(done):,} of {validator.num_responses:,} responses"

    with services, lasting(say, "evaluating", progress):
        weights = LocalWeights(Waits())
        weights.attach(WeightReceiver(resources.rollout, services, Waits()))
        sender = WeightSender(
            resources.actor,
            weights,
            spec.weight_dtype,
            sends=spec.sends_weights,
            canary=make_canary(spec, resources),
            session=services,
        )
        sender.sync(Version(0, 0), at_start=True)
        results = services.call(validator.run(0))
        warn_of_errors(rollout_loop.call_counts.take(VALIDATION), say)

    return Evaluation(results.metrics(), results.rows, results.num_prompts())
