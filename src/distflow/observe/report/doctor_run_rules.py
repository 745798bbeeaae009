"""Findings on a run's numbers, in words: most important first, with the key to change."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from distflow.errors import count_of, joined
from distflow.observe.crash_safe_files import JSON, read_object, to_number
from distflow.observe.report.activity import RunActivity, read_activity
from distflow.observe.report.chart_data import tabulate
from distflow.observe.report.doctor_step_rules import MANY_STEPS, setting
from distflow.observe.report.step_times import StepTimes, step_times
from distflow.observe.report.summary_sentences import REWARD, Finding, Steps, known_values
from distflow.observe.run_reader import (
    RIGHT,
    Group,
    GrowingMetrics,
    read_config,
    read_events,
    read_metrics,
    read_samples,
    read_timeline,
    sample_splits,
)
from distflow.observe.writing.timing import DATA, ENGINE, RANKS, REWARDS

MANY_CUT = 0.1
MANY_EQUAL = 0.5
ACCURACY_IN_TRAINING = "reward/accuracy"
_MANY_SOLVED = 0.6
_NEARLY_ALL = 0.98
_ENTROPY = "actor/entropy"
_SOME_ENTROPY = 0.05
PLANNED = "slower-than-plan"
MISSED = 0.5
"""The rule, and the share of what was measured by which a plan may miss it."""
UNPLANNED = ("eval", "save", "save_wait", "start")
"""Phases that a plan leaves out."""
MUCH = 0.2
"""The share of the last steps above which idleness is reported."""
_LAST_STEPS = 20
_SHORT_S = 0.5
"""Steps that are shorter are mostly overhead."""
_ADVICE_BY_CAUSE = {
    REWARDS: (
        "Give the reward functions more processes (reward.num_workers), or a shorter "
        "reward.timeout_s."
    ),
    ENGINE: (
        "Generation is the slower side: give it more devices, or fewer and shorter responses, or "
        "raise async.max_staleness."
    ),
    DATA: "Rows are made too slowly: set data.lazy=false, or prepare the data beforehand.",
    RANKS: (
        "One rank is slower than the others: look at its machine, and at the sizes of its share."
    ),
    "tool ": "Episodes wait for their tools: make these faster, or run more groups.",
    "environment": "Episodes wait for their environment: make it faster, or run more groups.",
    "training": "Training is the slower side: give it more devices, or lower async.max_staleness.",
    "coordinator": (
        "Training is the slower side: give it more devices, or lower async.max_staleness."
    ),
}
"""What to do by the beginning of what idle workers waited for."""
MAX_SHOWN = 300
MAX_UIDS = 5
_MAX_FILES = 10
_MAX_NAMED = 5
_SOME_ERRORS = 0.02
_MANY_ERRORS = 0.1
_FEW_DROPPED = 20


class RunRecords:
    """What the rules read of a run's folder. growing: its metrics, if they may have been read
    before."""

    def __init__(self, run_dir: Path, growing: GrowingMetrics | None = None) -> None:
        self.run_dir = run_dir
        self.timeline = read_timeline(run_dir)
        self.growing = growing
        self.records = (
            read_metrics(run_dir, self.timeline) if growing is None else growing.read(self.timeline)
        )
        self.events = read_events(run_dir, self.timeline)

    @cached_property
    def steps(self) -> Steps:
        return tabulate(self.records)

    @cached_property
    def metrics(self) -> frozenset[str]:
        return frozenset(name for values in self.steps.values() for name in values)

    @cached_property
    def config(self) -> dict[str, JSON]:
        return read_config(self.run_dir)

    @cached_property
    def activity(self) -> RunActivity:
        return read_activity(self.run_dir)

    @cached_property
    def times(self) -> StepTimes:
        return step_times(self.activity, self.records)

    def samples(self, step: int, split: str = "train") -> list[dict[str, JSON]]:
        return read_samples(self.run_dir, step, split, self.timeline)


def predicted_and_measured(run: RunRecords) -> Finding | None:
    """A step's time and memory beside the estimate before the start, by the medians of the steps.
    What the estimate missed by more than half is named if a run calibrated it."""
    predicted = read_object(run.run_dir / "plan.json", run.run_dir).get("predicted")
    steps = run.steps
    phases = predicted.get("phases") if isinstance(predicted, Mapping) else None
    measured = measured_phases(steps)
    if (
        not isinstance(predicted, Mapping)
        or not isinstance(phases, Mapping)
        or "step" not in measured
    ):
        return None
    expected = {
        name: seconds for name, value in phases.items() if (seconds := to_number(value)) is not None
    }
    if "step" not in expected:
        return None
    others = [name for name in expected if name != "step" and name in measured]
    measured["rest"] = measured["step"] - sum(measured[name] for name in others)
    missed = [
        f"{name} (expected {seconds:.3g} s, took {measured[name]:.3g} s)"
        for name, seconds in expected.items()
        if name in measured and _misses(seconds, measured[name], measured["step"])
    ]
    took = f"it took {measured['step']:.3g} s"
    estimate = f"{expected['step']:.3g} s a step"
    peak = predicted.get("peak_bytes")
    used = known_values(steps, "memory/process/peak")
    if isinstance(peak, int | float) and used:  # in GiB, as a report has them
        took += f" and at most {max(used):.3g} GiB"
        estimate += f" and {peak / 2**30:.3g} GiB of memory"
        missed += ["peak memory"] if abs(peak / 2**30 - max(used)) > MISSED * max(used) else []
    source = predicted.get("calibrated_by")
    if not source:
        text = f"The estimate before the start was {estimate}; {took}."
        return Finding(
            "unknown",
            text,
            "To estimate the next run by this one, set trainer.plan_from to its folder.",
        )
    text = f"The estimate before the start, by {source}, was {estimate}; {took}."
    if not missed:
        return Finding("unknown", text)
    advice = f"Calibrate the plan by this run (distflow plan --from), instead of {source}."
    return Finding("flat", f"{text} It was wrong by more than half in {joined(missed)}.", advice)


def measured_phases(steps: Steps) -> dict[str, float]:
    """Medians of the steps' times by phase, as a plan has them: without validation and checkpoints,
    and without the first quarter of the steps."""
    timed = [values for _, values in sorted(steps.items()) if "timing_s/step" in values]
    timed = timed[min(len(timed) - 1, max(1, len(timed) // 4)) :]
    names = {name for values in timed for name in values if name.startswith("timing_s/")}
    found = {
        n.removeprefix("timing_s/"): statistics.median(values.get(n, 0.0) for values in timed)
        for n in names
    }
    step = [
        values["timing_s/step"] - sum(values.get(f"timing_s/{name}", 0.0) for name in UNPLANNED)
        for values in timed
    ]
    return {**found, "step": statistics.median(step)} if timed else {}


def _misses(predicted: float, measured: float, step: float) -> bool:
    """Parts below a twentieth of a step do not count."""
    return max(predicted, measured) > step / 20 and abs(predicted - measured) > MISSED * measured


def truncation(steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    """Responses truncated at the length limit, over the run's last quarter."""
    shares = known_values(steps, "rollout/truncated")
    # of time, not of tokens
    if not shares or setting(config, "actor_rollout_ref.rollout.workflow") == "simulator":
        return None
    late = _mean(_last_quarter(shares))
    overall = _mean(shares)
    limit = setting(config, "data.max_response_length")
    now, at = (f" (now {limit})", f" at {limit} tokens") if isinstance(limit, int) else ("", "")
    if late >= MANY_CUT:
        return Finding(
            "bad" if late >= 0.5 else "flat",
            f"{late:.0%} of responses were truncated{at}, {_over(shares)}.",
            f"Raise data.max_response_length{now}, or prompt for shorter responses.",
            action=f"data.max_response_length={2 * limit}" if isinstance(limit, int) else "",
            first=_first_step(steps, "rollout/truncated", MANY_CUT),
            numbers={"rollout/truncated": late},
            worst="response_length",
        )
    if overall >= MANY_CUT:
        return Finding(
            "good",
            f"{shares[0]:.0%} of responses were truncated at first, {late:.0%} {_over(shares)}.",
        )
    return None


def constant_reward(steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    """A reward that was the same for every response of all these steps."""
    highest = known_values(steps, "reward/max")
    lowest = known_values(steps, "reward/min")
    if not highest or not lowest or max(highest) - min(lowest) > 1e-9 * max(1.0, abs(max(highest))):
        return None
    value = max(highest)
    right = known_values(steps, ACCURACY_IN_TRAINING)
    path = setting(config, "custom_reward_function.path")
    function = f"the reward function ({path})" if path else "the reward function"
    if setting(config, "actor_rollout_ref.rollout.workflow"):
        function = "what scores the episodes"
    everything = f"every response of {_which(steps, 'reward/max')}"
    advice = (
        f"It does not distinguish better responses from worse: check what {function} returns for a "
        "few."
    )
    if max(right, default=value) == 0:
        advice = (
            "Either the model never solves a prompt: use easier prompts or a stronger model, or "
            "fine-tune it first. "
            f"Or {function} does not recognise it: compare a few responses with their ground truth."
        )
    elif min(right, default=0.0) == 1:
        advice = (
            f"Either the model solves every prompt: use harder prompts. Or {function} accepts "
            "every response."
        )
    text = f"The reward was {value:.4g} for {everything}: there was nothing to learn from."
    return Finding("bad", text, advice, hinders=True)


def broken_policy(
    steps: Steps, config: Mapping[str, JSON], abruptly: bool = True
) -> Finding | None:
    """A policy whose entropy fell to a tenth without a better reward, or to a third or to three
    times with a worse one. abruptly: within a few steps; a slow change is judged by other rules."""
    entropies = {
        step: value
        for step, values in sorted(steps.items())
        if (value := values.get(_ENTROPY)) is not None
    }
    rewards = known_values(steps, REWARD)
    heads = setting(config, "actor_rollout_ref.rollout.workflow_kwargs.actions.head")
    if len(entropies) < 2 or len(rewards) < 2 or heads not in (None, "action_tokens"):
        return None  # the entropy of a normal distribution passes through 0
    first = next(iter(entropies.values()))
    last = _mean(_last_quarter(known_values(steps, _ENTROPY)))
    gain = _mean(_last_quarter(rewards)) - rewards[0]
    spread = max(known_values(steps, "reward/max"), default=0) - min(
        known_values(steps, "reward/min"), default=0
    )
    is_worse = gain < -0.1 * spread
    is_low = last < first / (3 if is_worse else 10) and first > _SOME_ENTROPY
    is_high = last > max(3 * first, _SOME_ENTROPY)
    if not (is_low and gain <= 0.1 * spread or is_high and is_worse):
        return None
    middle = math.sqrt(max(first, 1e-9) * max(last, 1e-9))
    since = next(
        (
            step
            for step, value in entropies.items()
            if (value < middle if is_low else value > middle)
        ),
        None,
    )
    before = [
        value
        for step, value in entropies.items()
        if since is not None and since - 5 <= step < since
    ]
    if since is None:
        return None
    fall = 1.5 if is_worse else 2
    if abruptly and not (
        before and (before[0] > fall * middle if is_low else before[0] < middle / 1.5)
    ):
        return None
    rate = setting(config, "actor_rollout_ref.actor.optim.lr")
    now = (
        f" (actor_rollout_ref.actor.optim.lr, now {rate:g})"
        if isinstance(rate, int | float)
        else ""
    )
    norms = [
        f"; its gradient's norm was {norm:.3g}"
        for norm in [steps[since].get("actor/grad_norm")]
        if norm
    ]
    return Finding(
        "bad",
        f"The policy came apart at step {since}: its entropy went from {first:.3g} to {last:.3g} "
        "nats, and the reward "
        f"did not rise{''.join(norms)}.",
        f"Lower the learning rate{now}. What is said of its later responses follows from this.",
        hinders=True,
        action=f"actor_rollout_ref.actor.optim.lr={rate / 10:g}"
        if isinstance(rate, int | float) and rate
        else "",
        first=since,
        numbers={_ENTROPY: last},
    )


def no_update(steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    """Optimizer steps that changed nothing; with at most two steps a schedule may be the reason."""
    for role in ("actor", "sft", "rm"):
        norms, rates = (known_values(steps, f"{role}/{name}") for name in ("grad_norm", "lr"))
        nothing = f"Nothing was learned in {_which(steps, f'{role}/grad_norm')}"
        if len(rates) > 2 and not any(rates):
            advice = "Raise actor_rollout_ref.actor.optim.lr."
            if setting(config, "actor_rollout_ref.actor.optim.lr"):
                advice = (
                    "The schedule kept it there: see actor_rollout_ref.actor.optim.scheduler and "
                    "its warm-up."
                )
            return Finding("bad", f"{nothing}: the learning rate was 0.", advice, hinders=True)
        if len(norms) > 2 and not any(norms):
            advice = (
                "Check whether responses to a prompt differ in reward, and which tokens the loss "
                "mask keeps."
            )
            return Finding(
                "bad",
                f"{nothing}: the gradient was 0.",
                advice if role == "actor" else "",
                hinders=True,
            )
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
        'no "acc", a reward '
        f"of 1 (the highest was {max(highest):.3g}).",
        'If it misses correct responses, correct "acc", or return {"score": ..., "acc": 0 or 1}.',
    )


def equal_groups(steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    """Groups in which no response was better than another; does not repeat `constant_reward`."""
    shares = known_values(steps, "reward/frac_reward_zero_std")
    late = _mean(_last_quarter(shares)) if shares else 0.0
    highest = known_values(steps, "reward/max")
    lowest = known_values(steps, "reward/min")
    if late < MANY_EQUAL or not highest or not lowest or max(highest) == min(lowest):
        return None
    reward = _mean(_last_quarter(known_values(steps, REWARD)))
    right = known_values(steps, ACCURACY_IN_TRAINING)
    # Without an accuracy, the place of the reward in its range says whether the policy solves the
    # prompts.
    solved = (
        _mean(_last_quarter(right))
        if right
        else (reward - min(lowest)) / (max(highest) - min(lowest))
    )
    prompts = "prompts that it solves sometimes: most are solved always or never"
    if solved > _MANY_SOLVED:
        prompts = "harder prompts"
    elif solved < 1 - _MANY_SOLVED:
        prompts = "easier prompts, or more responses to each (actor_rollout_ref.rollout.n)"
    advice = f"Use {prompts}."
    action = "algorithm.filter_groups.enable=true"
    if late > _NEARLY_ALL or setting(config, "algorithm.filter_groups.enable"):
        action = ""  # there is nothing to replace them with, or they are replaced already
    else:
        advice = f"Use {prompts}, or let {action} replace them."
    return Finding(
        "flat",
        (
            f"In {late:.0%} of the groups all responses got the same reward, {_over(shares)}: they "
            "carry no gradient."
        ),
        advice,
        action=action,
        first=_first_step(steps, "reward/frac_reward_zero_std", MANY_EQUAL),
        numbers={"reward/frac_reward_zero_std": late, REWARD: reward},
    )


def reward_errors(run: RunRecords) -> Finding | None:
    """Responses with reward errors, with the most frequent messages."""
    errors = {step: n for step, values in run.steps.items() if (n := _failed(values))}
    validation = {
        step: n
        for step, values in run.steps.items()
        if (n := _finite(values.get("val/errors", 0.0)))
    }
    if not errors and not validation:
        return None
    num_calls = sum(known_values(run.steps, "reward/calls"))
    messages = Counter(_messages(run, "train", errors))
    for split in _validations(run):
        messages.update(_messages(run, split, validation))
    of = f" of {num_calls:,.0f}" if num_calls else ""
    end = "," if validation else ""
    parts = (
        [f"on {sum(errors.values()):,.0f}{of} responses in training, which are left out{end}"]
        if errors
        else []
    )
    parts += (
        [f"on {sum(validation.values()):,.0f} validation responses, which count as wrong"]
        if validation
        else []
    )
    kinds = [
        f"“{message}” ({number:,} times in the samples)"
        for message, number in messages.most_common(2)
    ]
    share = sum(errors.values()) / num_calls if num_calls else float(bool(errors))
    first = min(errors, default=None)
    failed = (
        []
        if first is None
        else [str(row.get("uid")) for row in run.samples(first) if row.get("errors")]
    )
    return Finding(
        "bad" if share > 0.05 or validation else "flat",
        f"The reward function failed {joined(parts)}."
        + (f" It said {joined(kinds)}." if kinds else ""),
        level="error"
        if share > _MANY_ERRORS
        else "warning"
        if share > _SOME_ERRORS or validation
        else "",
        first=first,
        numbers={"reward/error_rate": share},
        uids=tuple(failed[:MAX_UIDS]),
    )


def _validations(run: RunRecords) -> list[str]:
    return [split for split in sample_splits(run.run_dir) if split != "train"]


def _first_step(steps: Steps, name: str, limit: float) -> int | None:
    """The first step in which a metric reached its limit, of the last ones whose means over ten
    steps are above it."""
    known = [
        (step, value)
        for step, metrics in sorted(steps.items())
        if (value := metrics.get(name)) is not None
    ]
    values = [value for _, value in known]
    below = (
        end for end in range(len(values), 0, -1) if _mean(values[max(end - 10, 0) : end]) < limit
    )
    return next(
        (step for step, value in known[max(next(below, 0) - 10, 0) :] if value >= limit), None
    )


def _messages(run: RunRecords, split: str, steps: Iterable[int]) -> Iterable[str]:
    for step in sorted(steps)[:_MAX_FILES]:
        for row in run.samples(step, split):
            errors = row.get("errors")
            for error in errors if isinstance(errors, list) else [errors]:
                if isinstance(error, str) and error:
                    yield error if len(error) <= MAX_SHOWN else f"{error[:MAX_SHOWN]}…"


def _failed(values: Mapping[str, float]) -> float:
    """Reward errors of a step, including those on dropped groups if they were recorded."""
    if "reward/error_rate" in values:
        return round(_finite(values["reward/error_rate"] * values.get("reward/calls", 0.0)))
    return _finite(values.get("reward/errors", 0.0)) + _finite(values.get("reward/timeouts", 0.0))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _last_quarter(values: Sequence[float]) -> Sequence[float]:
    return values[-max(len(values) // 4, 1) :]


def _which(steps: Steps, metric: str) -> str:
    """The steps with the metric in words: all of a run, or the last ones of a run in progress."""
    known = sorted(step for step, values in steps.items() if metric in values)
    if len(known) > 1 and known[0] > 1:
        return f"steps {known[0]:,} to {known[-1]:,}"
    return f"{'all ' if len(known) > 1 else ''}{count_of(len(known), 'step')}"


def _over(values: Sequence[float]) -> str:
    number = len(_last_quarter(values))
    return f"over the last {count_of(number, 'step')}" if number > 1 else "in the last step"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def idle_workers(run: RunRecords) -> Finding | None:
    """Workers that do nothing for more than a fifth of the last steps."""
    last = list(run.times.windows)[-_LAST_STEPS:]
    share = run.times.idle_share(last) or 0.0
    is_short = run.times.seconds(last) < _SHORT_S * len(last) * run.times.workers
    if share <= MUCH or len(last) < MANY_STEPS or is_short:
        return None
    seconds: dict[str, float] = {}
    for (step, cause), idle in run.times.idle_causes.items():
        if step in last:
            seconds[cause] = seconds.get(cause, 0.0) + idle
    total = run.times.seconds(last)
    longest_first = sorted(seconds.items(), key=lambda each: -each[1])
    shares = {cause: idle / total for cause, idle in longest_first[:_MAX_NAMED]}
    named = [f"{cause} {part:.0%}" for cause, part in shares.items() if part >= 0.01]
    waited = f", while something waited for {joined(named)}" if named else ""
    text = f"Workers were idle in {share:.0%} of the time of the last {len(last)} steps{waited}."
    longest = next(iter(shares), "")
    advice = next(
        (text for start, text in _ADVICE_BY_CAUSE.items() if longest.startswith(start)), ""
    )
    return Finding("flat", text, advice, numbers={"idle": share, **shares}, files=("spans/",))


def starved_prompts(run: RunRecords) -> Finding | None:
    """Long groups that are dropped as stale more often than short ones: the policy then learns from
    short ones."""
    sized = sorted(
        (group for group in run.activity.groups.values() if group.tokens),
        key=lambda group: group.tokens or 0,
    )
    quarter = len(sized) // 4
    short, long = (
        sum(_is_stale(group) for group in part) for part in (sized[:quarter], sized[-quarter:])
    )
    if short + long < _FEW_DROPPED or long <= 2 * short:
        return None
    bound = setting(run.config, "async.max_staleness")
    text = f"Of the longest quarter of groups {long / quarter:.0%} were dropped as stale"
    text += f", of the shortest {short / quarter:.0%}."
    stale = [group for group in sized[-quarter:] if _is_stale(group)]
    return Finding(
        "flat",
        text,
        (
            "The policy learns from short responses alone: allow more staleness, or recompute "
            "instead of aborting."
        ),
        action=f"async.max_staleness={bound + 1}" if isinstance(bound, int) else "",
        numbers={"longest quarter": long / quarter, "shortest quarter": short / quarter},
        uids=tuple(f"{group.group_id}-0" for group in stale[-MAX_UIDS:]),
        files=("ledger.jsonl",),
    )


def _is_stale(group: Group) -> bool:
    return (group.reason or "").startswith("stale")
