"""Check: the learning rate follows the schedule, and the optimizer moves the weights by its formula."""

import math
from collections.abc import Iterator

from torch import Tensor

from distflow.audit.mini_batches import plan_of
from distflow.audit.recorded_data import Check, RecordedStep, Wrong
from distflow.audit.recorder import Stripe, UpdateRecord
from distflow.config.derived_settings import is_rl
from distflow.config.keys.engines import OptimConfig

LIMIT = 1e-3


def audit_optimizer(recorded: RecordedStep) -> str | None:
    if not recorded.updates:
        return "no update was recorded"
    known = [_same_weights(update, settings, rate, taken) for update, settings, rate, taken in scheduled(recorded)]
    return (
        None
        if any(known)
        else "only the learning rate: the optimizer is neither adamw nor sgd, or its engine does not expose it"
    )


def scheduled(recorded: RecordedStep) -> Iterator[tuple[UpdateRecord, OptimConfig, float, int]]:
    """Each update that was not skipped, its optimizer's config, its scheduled rate, and the number of updates before
    it. Raises Wrong if it was made at another rate."""
    for role in sorted({update.role for update in recorded.updates}):
        taken = recorded.num_updates.get(role, 0)
        settings = (recorded.config.critic if role == "critic" else recorded.config.actor_rollout_ref.actor).optim
        for update in recorded.updates_of(role):
            if update.metrics.get("skipped"):
                continue
            rate = settings.lr * schedule(settings, taken, total_updates(recorded, role))
            _same_rate(update, rate)
            yield update, settings, rate, taken
            taken += 1


def audit_learning_rates(recorded: RecordedStep) -> str | None:
    """The learning rate of each update is the schedule's."""
    for _ in scheduled(recorded):
        pass
    return None


def total_updates(recorded: RecordedStep, role: str) -> int:
    """Optimizer steps of the whole run: the schedule's length."""
    config = recorded.config
    passes, num_prompts = plan_of(config, role)
    steps = recorded.total_steps - (config.trainer.critic_warmup if role == "actor" and is_rl(config) else 0)
    return max(steps * passes * math.ceil(config.data.train_batch_size / num_prompts), 1)


def schedule(settings: OptimConfig, step: int, total: int) -> float:
    """The factor of the rate at optimizer step `step`, counted from 0."""
    if settings.scheduler == "constant":
        return 1.0
    warmup = settings.lr_warmup_steps if settings.lr_warmup_steps >= 0 else int(settings.warmup_ratio * total)
    if step < warmup:
        return step / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    shape = {
        "constant_with_warmup": 1.0,
        "linear_with_warmup": settings.min_lr_ratio + (1 - settings.min_lr_ratio) * (1 - done),
        "cosine_with_warmup": settings.min_lr_ratio + (1 - settings.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2,
    }
    return shape[settings.scheduler]


def _same_rate(update: UpdateRecord, rate: float) -> None:
    found = float(update.metrics["lr"])
    if not abs(found - rate) <= LIMIT * rate + 1e-15:
        raise Wrong(f"the learning rate of the {update.role} is {found:.4g}, but the schedule gives {rate:.4g}")


def _same_weights(update: UpdateRecord, settings: OptimConfig, rate: float, taken: int) -> bool:
    """Whether there is a formula to compare with."""
    if settings.optimizer not in ("adamw", "sgd") or not update.stripes:
        return False
    for name, stripe in update.stripes.items():
        if stripe.gradient is None or stripe.after is None:
            raise Wrong(
                f"the optimizer of the {update.role} was not called, or {name} had no gradient, though the update was "
                "not skipped"
            )
        steps = int(stripe.moments.get("step", 0 if settings.optimizer == "adamw" else taken))
        if steps != taken:
            raise Wrong(
                f"the optimizer of the {update.role} has counted {steps} steps, but {taken} were taken: its "
                "moments were lost"
            )
        expected = _adamw(stripe, settings, rate) if settings.optimizer == "adamw" else _sgd(stripe, settings, rate)
        if not len(stripe.before):
            continue  # this rank has no part of it
        gap, moved = (stripe.after - expected).abs(), (expected - stripe.before).abs()
        rounding = 4e-7 * stripe.before.abs()
        if bool((gap > LIMIT * moved.max() + rounding + 1e-12).any()):
            raise Wrong(
                f"{name} of the {update.role} moved by {float((stripe.after - stripe.before).abs().max()):.4g} at "
                f"most, but {settings.optimizer} at the learning rate {rate:.4g} gives {float(moved.max()):.4g} for "
                "its gradient, moments and weight decay"
            )
    return True


def _adamw(stripe: Stripe, settings: OptimConfig, rate: float) -> Tensor:
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2."""
    assert stripe.gradient is not None
    first, second = settings.betas
    step = float(stripe.moments.get("step", 0.0)) + 1
    mean = first * stripe.moments.get("exp_avg", 0.0) + (1 - first) * stripe.gradient
    square = second * stripe.moments.get("exp_avg_sq", 0.0) + (1 - second) * stripe.gradient**2
    decayed = stripe.before * (1 - rate * settings.weight_decay)
    return decayed - rate * (mean / (1 - first**step)) / ((square / (1 - second**step)).sqrt() + settings.eps)


def _sgd(stripe: Stripe, settings: OptimConfig, rate: float) -> Tensor:
    assert stripe.gradient is not None
    return stripe.before - rate * (stripe.gradient + settings.weight_decay * stripe.before)


CHECK = Check(
    "optimizer",
    "the learning rate is the schedule's at this optimizer step, and sampled elements of several weights moved by the "
    "optimizer's formula of gradient, moments, rate and decay",
    "adamw or sgd; for other optimizers the learning rate alone",
    f"{LIMIT:g} of the move",
    audit_optimizer,
)
