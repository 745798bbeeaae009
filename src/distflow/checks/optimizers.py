"""Check: an optimizer step is taken once, at the scheduled rate: another optimizer of the same
kind, given the same gradients and moments, moves sampled elements of the weights alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distflow.checks.check import Wrong, check
from distflow.checks.gradients import settings_of
from distflow.checks.mini_batches import plan_of
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.update_records import OpenEngine, Stripe, UpdateRecord
from distflow.config.derived_settings import is_rl
from distflow.config.keys.optim import OptimConfig
from distflow.training.optimizer import make_optimizer, make_schedule

LIMIT = 1e-3
MOMENT_LIMIT = 1e-5
KNOWN = ("adamw", "sgd")


@check(
    "optimizer",
    "learning rate and options are the config's, every step is counted, and sampled weights and "
    "moments move as another optimizer of its kind moves them",
    needs="adamw or sgd; for other optimizers the learning rate alone",
    limit=f"{LIMIT:g} of the move",
)
def check_optimizers(recorded: RecordedStep) -> str | None:
    if not recorded.updates:
        return "no update was recorded"

    is_known = True
    for role in sorted({update.role for update in recorded.updates}):
        num_before = recorded.num_updates.get(role, 0)
        settings = settings_of(recorded, role).optim

        for update in recorded.updates_of(role):
            if update.metrics.get("skipped"):
                continue

            rate = settings.lr * _factor(recorded, role, settings, num_before)
            _check_rate(update, rate)
            _check_options(update, settings)

            if settings.optimizer in KNOWN and update.stripes:
                _check_moves(update, settings, rate, num_before)
            else:
                is_known = False

            num_before += 1

    if not is_known:
        return (
            "only the learning rate: the optimizer is neither adamw nor sgd, or its engine does "
            "not expose it"
        )

    return None


def _factor(recorded: RecordedStep, role: str, settings: OptimConfig, step: int) -> float:
    """The schedule's factor of the optimizer step of this number, from 0."""
    config = recorded.config
    passes, num_prompts = plan_of(config, role)

    warmup = 0
    if role != "critic" and is_rl(config):
        warmup = config.trainer.critic_warmup

    num_steps = recorded.run.spec.data.total_steps - warmup
    per_step = passes * -(-config.data.train_batch_size // num_prompts)
    schedule = make_schedule(
        settings.scheduler,
        total_steps=max(num_steps * per_step, 1),
        warmup_ratio=settings.warmup_ratio,
        warmup_steps=settings.lr_warmup_steps,
        min_lr_ratio=settings.min_lr_ratio,
    )

    return schedule(step)


def _check_rate(update: UpdateRecord, rate: float) -> None:
    found = float(update.metrics["lr"])
    if not abs(found - rate) <= LIMIT * rate + 1e-15:
        raise Wrong(
            f"the learning rate of the {update.role} is {found:.4g}, but the schedule gives "
            f"{rate:.4g}"
        )


def _check_options(update: UpdateRecord, settings: OptimConfig) -> None:
    if not isinstance(update.engine, OpenEngine):
        return

    for group in update.engine.optimizer.param_groups:
        for name in group.keys() & {"betas", "eps", "weight_decay"}:
            wanted = getattr(settings, name)
            if group[name] != wanted:
                raise Wrong(
                    f"the {update.role}'s optimizer has {name}={group[name]} for some weights, not "
                    f"{wanted}"
                )


def _check_moves(update: UpdateRecord, settings: OptimConfig, rate: float, num_before: int) -> None:
    for name, stripe in update.stripes.items():
        if stripe.gradient is None or stripe.after is None:
            raise Wrong(
                f"the optimizer of the {update.role} was not called, or {name} had no gradient, "
                "though the update was not skipped"
            )

        is_counted = settings.optimizer == "adamw"
        steps = int(stripe.moments.get("step", 0 if is_counted else num_before))
        if steps != num_before:
            raise Wrong(
                f"the optimizer of the {update.role} has counted {steps} steps, but {num_before} "
                "were taken: its moments were lost"
            )

        if len(stripe.before):  # this rank has a part of it
            _check_move(update, name, stripe, settings, rate)


def _check_move(
    update: UpdateRecord, name: str, stripe: Stripe, settings: OptimConfig, rate: float
) -> None:
    assert stripe.after is not None
    expected, moments = _moved(stripe, settings, rate)
    for moment, value in moments.items():
        before = torch.as_tensor(stripe.moments.get(moment, 0.0), dtype=torch.float64)
        found = torch.as_tensor(stripe.moved_moments.get(moment, torch.nan), dtype=torch.float64)

        size = value.abs() + before.abs()
        if not bool(((found - value).abs() <= MOMENT_LIMIT * size + 1e-30).all()):
            raise Wrong(
                f"{update.role}: {moment} of {name} is not what the optimizer makes of the "
                f"gradient and the previous {moment}: it was lost, or is kept in a lower precision "
                "than float32"
            )

    most = float((expected - stripe.before).abs().max())
    rounding = 4e-7 * stripe.before.abs() + 1e-12
    if bool(((stripe.after - expected).abs() > LIMIT * most + rounding).any()):
        moved = float((stripe.after - stripe.before).abs().max())
        raise Wrong(
            f"{name} of the {update.role} moved by {moved:.4g} at most, but {settings.optimizer} "
            f"at the learning rate {rate:.4g} gives {most:.4g} for its gradient, moments and "
            "weight decay"
        )


def _moved(
    stripe: Stripe, settings: OptimConfig, rate: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The sampled elements, and their moments, after one step of another optimizer, in float64."""
    weight = nn.Parameter(stripe.before.clone())
    weight.grad = stripe.gradient
    optimizer = make_optimizer(
        settings.optimizer,
        [weight],
        lr=rate,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        eps=settings.eps,
    )
    state: dict[str, Any] = {}
    for name, value in stripe.moments.items():
        state[name] = torch.as_tensor(value).clone()
    if state:
        optimizer.state[weight] = state
    optimizer.step()
    after = optimizer.state[weight]
    moments = {name: value for name, value in after.items() if value is not None and value.dim()}

    return weight.detach(), moments
