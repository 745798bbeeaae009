"""Check: a mini-batch's gradient starts from zero and is the sum of its micro-batches' gradients,
clipped once."""

from distflow.checks.check import Wrong, check
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.update_records import OpenEngine, Stripe, UpdateRecord, leftover
from distflow.config.derived_settings import config_of_policy, trained_policies
from distflow.config.keys.actor import ActorConfig
from distflow.config.keys.critic import CriticConfig
from distflow.training.engine import TrainEngine

LIMIT = 1e-3
SUM_LIMIT = 2e-4


@check(
    "gradients",
    "a mini-batch's gradient starts from zero and sums the gradients of its micro-batches, each "
    "counted once, clipped to max_grad_norm",
    needs="a train engine that exposes its model",
    limit=f"{LIMIT:g} relative",
)
def check_gradients(recorded: RecordedStep) -> str | None:
    if not recorded.updates:
        return "no update was recorded"

    for update in recorded.updates:
        _each_once(update)
        if isinstance(update.engine, OpenEngine) and not update.metrics.get("skipped"):
            _clipped(recorded, update)

    if not all(isinstance(update.engine, OpenEngine) for update in recorded.updates):
        return "an engine that was updated does not expose its model"

    stripes = list[Stripe]()
    for update in recorded.updates:
        stripes += update.stripes.values()
    if stripes and all(stripe.contributions is None for stripe in stripes):
        return "gradients of sharded weights are summed over the ranks before they are seen"

    return None


def check_cleared(role: str, engine: TrainEngine) -> None:
    """Check before an update that nothing is left of another's gradients. Every update has this
    check."""
    names = leftover(engine.model) if isinstance(engine, OpenEngine) else []

    if names:
        raise Wrong(
            f"a mini-batch of the {role} began with gradients left over from the one before "
            f"({names[0]} and {len(names) - 1} more weights): they were not cleared, or these "
            "weights are not the optimizer's"
        )


def settings_of(recorded: RecordedStep, role: str) -> ActorConfig | CriticConfig:
    """Of the critic, or of the policy of that name."""
    if role == "critic":
        return recorded.config.critic
    config = recorded.config
    if role in trained_policies(config):
        config = config_of_policy(config, role)
    return config.actor_rollout_ref.actor


def _each_once(update: UpdateRecord) -> None:
    """Each micro-batch's loss started its backward passes with a weight of 1 in all."""
    weights = [float(sum(micro.weights)) for micro in update.micros if micro.weights is not None]
    odd = [weight for weight in weights if weight != 1.0]
    if odd:
        raise Wrong(
            f"the loss of a micro-batch of the {update.role} entered the gradient {odd[0]:g} times "
            f"instead of once ({len(odd)} of {len(weights)} micro-batches): it was scaled, left "
            "out, or used again"
        )


def _clipped(recorded: RecordedStep, update: UpdateRecord) -> None:
    reported = float(update.metrics["grad_norm"])
    most = settings_of(recorded, update.role).max_grad_norm
    factor = 1.0 if most is None else min(1.0, most / (reported + 1e-6))

    norm = update.norm
    if norm is not None and not abs(norm - reported * factor) <= LIMIT * reported + 1e-9:
        raise Wrong(
            f"the {update.role}'s optimizer was given a gradient of norm {norm:.4g}, but it was "
            f"measured as {reported:.4g} and max_grad_norm is {most}: it should be "
            f"{reported * factor:.4g}"
        )

    for name, stripe in update.stripes.items():
        if stripe.gradient is None or stripe.contributions is None:
            continue

        gap = float((stripe.gradient - stripe.contributions * factor).norm())
        if not gap <= SUM_LIMIT * float(stripe.gradient.norm()) + 1e-7 * reported:
            raise Wrong(
                f"the gradient of {name} that the {update.role}'s optimizer was given is not the "
                "sum of the micro-batches' gradients over all ranks times the clip factor: some "
                "was left over, dropped, scaled or rounded"
            )
