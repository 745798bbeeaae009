"""`distflow eval`: validation without a run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from distflow.checks.canary import make_canary
from distflow.checks.group_records import GroupRecords
from distflow.errors import UserError
from distflow.observe.writing.timing import Waits, lasting
from distflow.planning.plan import plan_local
from distflow.rewards.reward_results import VALIDATION
from distflow.runtime.compiled_node import Contexts
from distflow.runtime.error_limits import warn_of_errors
from distflow.runtime.resources import build_resources
from distflow.runtime.rollout_loop.group_tasks import GroupEvents, RolloutLoop
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
from distflow.runtime.spec import Spec
from distflow.runtime.step_metrics import SampleRows
from distflow.runtime.validation import Validator, validation_loss
from distflow.runtime.weight_sync.receiver import WeightReceiver
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.runtime.worker_place import own_device
from distflow.scheduling.group_states import Version


@dataclass(frozen=True)
class Evaluation:
    """rows: one per response, as in a run's validation. num_prompts: the number of prompts for each
    metric that is a share of prompts."""

    metrics: dict[str, float]
    rows: SampleRows
    num_prompts: dict[str, int] = field(default_factory=dict)


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
    # whole steps.
    used = {"actor", *(engine for node in pipeline.rollout_nodes for engine in node.engines)}
    rank = replace(rank, engines=tuple(engine for engine in rank.engines if engine in used))
    resources = build_resources(spec.factories, rank, shards=False, say=say)
    actor = resources.actor
    assert actor is not None, "a pipeline trains something"
    if resources.rollout is None:
        with lasting(say, "evaluating"):
            return Evaluation(*validation_loss(spec.validation, actor))
    # the folder of an evaluation is temporary
    session = RolloutServices.of(spec, resources, writes_stacks=False)
    resources = session.resources
    rollout = session.resources.rollout
    assert rollout is not None, "checked above"
    contexts = Contexts(spec.config, resources, {}, updates=None)
    nodes = [pipeline.node(name) for name in rank.rollout_nodes]
    rollout_loop = RolloutLoop.of(spec, nodes, resources, contexts, GroupRecords(), GroupEvents())
    stop_ids = resources.stop_token_ids
    done = list[int]()
    validator = Validator(
        spec.validation,
        contexts,
        rollout_loop,
        stop_ids,
        spec.config.trainer.seed,
        say,
        done.append,
    )
    with (
        session,
        lasting(
            say, "evaluating", lambda: f", {sum(done):,} of {validator.num_responses:,} responses"
        ),
    ):
        weights = LocalWeights(Waits())
        weights.attach(WeightReceiver(rollout, session, Waits()))
        canary = make_canary(spec, resources)
        sends = spec.sends_weights
        dtype = spec.weight_dtype
        sender = WeightSender(actor, weights, dtype, sends=sends, canary=canary, session=session)
        sender.sync(Version(0, 0), at_start=True)
        results = session.call(validator.run(0))
        counts = rollout_loop.call_counts.take(VALIDATION)
        warn_of_errors(counts, say)
    return Evaluation(results.metrics(), results.rows, results.num_prompts())
