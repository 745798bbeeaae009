"""Rules on whether a run can learn: over its last steps while it runs, then over all."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from distflow.observe.findings.finding import (
    REWARD,
    Config,
    Finding,
    Steps,
    draws_numbers,
    known_values,
    last_quarter,
    late_mean,
    mean,
    over_last_quarter,
    setting,
    since_step,
    steps_with,
    workflow_of,
)
from distflow.observe.reward_remarks import RIGHT

MANY_CUT = 0.1
"""The share of responses that are truncated from which it is reported."""
MOST_CUT = 0.5
MANY_EQUAL = 0.5
"""The share of groups with equal rewards from which it is reported."""
_NEARLY_ALL = 0.98
_MANY_SOLVED = 0.6
_SOME_ENTROPY = 0.05
"""Nats: below, an entropy is as low as it gets."""

_RESPONSE_LENGTH = "data.max_response_length"
_LR = "actor_rollout_ref.actor.optim.lr"
_WORKFLOW = "actor_rollout_ref.rollout.workflow"
_ACCURACY_IN_TRAINING = "reward/accuracy"
_EQUAL = "reward/frac_reward_zero_std"
_ENTROPY = "actor/entropy"


def truncation(steps: Steps, config: Config) -> Finding | None:
    """Responses truncated at the length limit, over the run's last quarter."""
    shares = known_values(steps, "rollout/truncated")
    workflow = workflow_of(config)
    if not shares or (workflow is not None and workflow.ends_by_time):
        return None

    late = mean(last_quarter(shares))
    over = over_last_quarter(len(shares))

    if late < MANY_CUT and mean(shares) >= MANY_CUT:
        return Finding(
            "good", f"{shares[0]:.0%} of responses were truncated at first, {late:.0%} {over}."
        )
    if late < MANY_CUT:
        return None

    limit = setting(config, _RESPONSE_LENGTH)
    at = now = action = ""
    if isinstance(limit, int):
        at = f" at {limit} tokens"
        now = f" (now {limit})"
        action = f"{_RESPONSE_LENGTH}={2 * limit}"

    return Finding(
        "bad" if late >= MOST_CUT else "flat",
        f"{late:.0%} of responses were truncated{at}, {over}.",
        f"Raise {_RESPONSE_LENGTH}{now}, or prompt for shorter responses.",
        action=action,
        first=since_step(steps, "rollout/truncated", MANY_CUT),
        numbers={"rollout/truncated": late},
    )


def constant_reward(steps: Steps, config: Config) -> Finding | None:
    """A reward that was the same for every response of all these steps."""
    highest = known_values(steps, "reward/max")
    lowest = known_values(steps, "reward/min")
    if not highest or not lowest:
        return None

    value = max(highest)
    if value - min(lowest) > 1e-9 * max(1.0, abs(value)):
        return None

    right = known_values(steps, _ACCURACY_IN_TRAINING)
    path = setting(config, "custom_reward_function.path")
    function = "the reward function"
    if path:
        function = f"the reward function ({path})"

    if setting(config, _WORKFLOW):
        function = "what scores the episodes"

    if max(right, default=value) == 0:
        advice = (
            "Either the model never solves a prompt: use easier prompts or a stronger model, or "
            f"fine-tune it first. Or {function} does not recognise it: compare a few responses "
            "with their ground truth."
        )
    elif min(right, default=0.0) == 1:
        advice = (
            f"Either the model solves every prompt: use harder prompts. Or {function} accepts "
            "every response."
        )
    else:
        advice = (
            f"It does not distinguish better responses from worse: check what {function} returns "
            "for a few."
        )

    everything = f"every response of {steps_with(steps, 'reward/max')}"
    text = f"The reward was {value:.4g} for {everything}: there was nothing to learn from."
    return Finding("bad", text, advice, hinders=True)


def broken_policy(steps: Steps, config: Config) -> Finding | None:
    """A policy whose entropy fell to a tenth without a better reward, or to a third or to three
    times with a worse one."""
    entropies = known_values(steps, _ENTROPY)
    rewards = known_values(steps, REWARD)
    if len(entropies) < 2 or len(rewards) < 2 or draws_numbers(config):
        return None

    first = entropies[0]
    last = late_mean(steps, _ENTROPY)
    gain = mean(last_quarter(rewards)) - rewards[0]
    highest = max(known_values(steps, "reward/max"), default=0)
    spread = highest - min(known_values(steps, "reward/min"), default=0)
    is_worse = gain < -0.1 * spread
    is_low = last < first / (3 if is_worse else 10) and first > _SOME_ENTROPY
    is_high = last > max(3 * first, _SOME_ENTROPY)
    has_fallen = is_low and gain <= 0.1 * spread
    if not has_fallen and not (is_high and is_worse):
        return None

    middle = math.sqrt(max(first, 1e-9) * max(last, 1e-9))
    since = None
    for step, values in sorted(steps.items()):
        value = values.get(_ENTROPY, first)
        if since is None and ((value < middle) if is_low else (value > middle)):
            since = step

    rate = setting(config, _LR)
    now = action = ""
    if isinstance(rate, int | float):
        now = f" ({_LR}, now {rate:g})"
        action = f"{_LR}={rate / 10:g}" if rate else ""

    return Finding(
        "bad",
        f"The policy came apart at step {since}: its entropy went from {first:.3g} to {last:.3g} "
        "nats, and the reward did not rise.",
        f"Lower the learning rate{now}. What is said of its later responses follows from this.",
        hinders=True,
        action=action,
        first=since,
        numbers={_ENTROPY: last},
    )


def no_update(steps: Steps, config: Config) -> Finding | None:
    """Optimizer steps that changed nothing; with at most two steps a schedule may be the reason."""
    if constant_reward(steps, config):  # which is the reason
        return None

    for role in ("actor", "sft", "rm", "preference"):
        norms = known_values(steps, f"{role}/grad_norm")
        rates = known_values(steps, f"{role}/lr")
        nothing = f"Nothing was learned in {steps_with(steps, f'{role}/grad_norm')}"

        if len(rates) > 2 and not any(rates):
            advice = f"Raise {_LR}."
            if setting(config, _LR):
                advice = (
                    "The schedule kept it there: see actor_rollout_ref.actor.optim.scheduler and "
                    "its warm-up."
                )

            return Finding("bad", f"{nothing}: the learning rate was 0.", advice, hinders=True)

        if len(norms) > 2 and not any(norms):
            advice = ""
            if role == "actor":
                advice = (
                    "Check whether responses to a prompt differ in reward, and which tokens the "
                    "loss mask keeps."
                )

            return Finding("bad", f"{nothing}: the gradient was 0.", advice, hinders=True)

    return None


def accuracy_counts_nothing(steps: Steps) -> Finding | None:
    """A meaningless accuracy of 0: the rewards tell responses apart, but none is a full 1."""
    accuracies = known_values(steps, "val_correct/all/mean")
    highest = known_values(steps, "reward/max")
    if not accuracies or max(accuracies) > 0 or not highest or not 0 < max(highest) < RIGHT:
        return None

    return Finding(
        "flat",
        'The accuracy was always 0: no response got "acc": 1, or where the reward function returns '
        f'no "acc", a reward of 1 (the highest was {max(highest):.3g}).',
        'If it misses correct responses, correct "acc", or return {"score": ..., "acc": 0 or 1}.',
        rule="accuracy-counts-nothing",
        level="warning",
    )


def equal_groups(steps: Steps, config: Config) -> Finding | None:
    """Groups in which no response was better than another; does not repeat `constant_reward`."""
    late = late_mean(steps, _EQUAL)
    highest = max(known_values(steps, "reward/max"), default=math.nan)
    lowest = min(known_values(steps, "reward/min"), default=math.nan)
    if not late >= MANY_EQUAL or not highest > lowest:
        return None

    reward = late_mean(steps, REWARD)
    solved = late_mean(steps, _ACCURACY_IN_TRAINING)

    prompts = "prompts that it solves sometimes: most are solved always or never"
    if solved > _MANY_SOLVED:
        prompts = "harder prompts"
    elif solved < 1 - _MANY_SOLVED:
        prompts = "easier prompts, or more responses to each (actor_rollout_ref.rollout.n)"

    advice = f"Use {prompts}."
    action = ""

    # Else there is nothing to replace them with, or they are replaced already.
    if late <= _NEARLY_ALL and not setting(config, "algorithm.filter_groups.enable"):
        action = "algorithm.filter_groups.enable=true"
        advice = f"Use {prompts}, or let {action} replace them."

    over = over_last_quarter(len(known_values(steps, _EQUAL)))
    return Finding(
        "flat",
        f"In {late:.0%} of the groups all responses got the same reward, {over}: they carry no "
        "gradient.",
        advice,
        action=action,
        first=since_step(steps, _EQUAL, MANY_EQUAL),
        numbers={_EQUAL: late, REWARD: reward},
    )


class LearningRule(NamedTuple):
    """A rule that is applied to the last steps of a run, and to all of them."""

    name: str

    needs: str
    """A metric, of which "*" is any part."""

    level: Literal["error", "warning"]

    check: Callable[[Steps, Config], Finding | None]

    def find(self, steps: Steps, whole: Steps, config: Config) -> Finding | None:
        """What it finds in some steps, unless it follows from a policy that came apart. whole:
        with the first steps."""
        broken = broken_policy(whole, config)
        found = broken if self.check is broken_policy else self.check(steps, config)

        if found is None:
            return None

        if broken is not None and self.check is not broken_policy:
            is_cause = self.check is constant_reward and constant_reward(whole, config)
            if not is_cause:
                return None

        return found._replace(rule=self.name, level=self.level)


LEARNING_RULES = (
    LearningRule("policy-broken", "actor/entropy", "error", broken_policy),
    LearningRule("reward-constant", "reward/max", "error", constant_reward),
    LearningRule("nothing-moves", "*/grad_norm", "error", no_update),
    LearningRule("length-runaway", "rollout/truncated", "warning", truncation),
    LearningRule("no-signal", _EQUAL, "warning", equal_groups),
)
"""In the order in which a report shows their findings."""
