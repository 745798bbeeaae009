"""Findings on a run's numbers, in words: most important first, with the key to change.

Also which side waits for the other if rollout and training overlap.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distflow.errors import joined
from distflow.observe.crash_safe_files import JSON
from distflow.observe.report.graph_and_timelines import RunActivity
from distflow.observe.report.summary_sentences import REWARD, Finding, Steps, known_values
from distflow.observe.run_reader import RIGHT, Timeline, read_samples, sample_splits, sample_steps

MANY_CUT = 0.1
MANY_EQUAL = 0.5
MANY_STEPS = 8
MUCH, LITTLE = 0.3, 0.15
"""Shares of the time above which idleness is reported, and below which it does not count."""
_MAX_SHOWN, _MAX_FILES = 300, 10


def findings(run_dir: Path, timeline: Timeline, steps: Steps, config: Mapping[str, JSON]) -> list[Finding]:
    """The findings that apply; empty if nothing is remarkable. config: as in config.yaml, empty if unknown."""
    found = [
        constant_reward(steps, config) or no_update(steps),
        accuracy_counts_nothing(steps),
        truncation(steps, config),
        equal_groups(steps),
        reward_errors_of(run_dir, timeline, steps),
        greedy_and_sampled(run_dir, timeline, steps, config),
    ]
    return [finding for finding in found if finding]


def truncation(steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    """Responses truncated at the length limit, over the run's last quarter."""
    shares = known_values(steps, "rollout/truncated")
    if not shares or _at(config, "actor_rollout_ref", "rollout", "workflow") == "simulator":  # of time, not of tokens
        return None
    late, overall = _mean(_last_quarter(shares)), _mean(shares)
    limit = _at(config, "data", "max_response_length")
    now, at = (f" (now {limit})", f" at {limit} tokens") if isinstance(limit, int) else ("", "")
    if late >= MANY_CUT:
        return Finding(
            "bad" if late >= 0.5 else "flat",
            f"{late:.0%} of responses were truncated{at}, {_over(shares)}.",
            f"Raise data.max_response_length{now}, or prompt for shorter responses.",
        )
    if overall >= MANY_CUT:
        return Finding("good", f"{shares[0]:.0%} of responses were truncated at first, {late:.0%} {_over(shares)}.")
    return None


def constant_reward(steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    """A reward that was the same for every response of the run."""
    highest, lowest = known_values(steps, "reward/max"), known_values(steps, "reward/min")
    if not highest or not lowest or max(highest) - min(lowest) > 1e-9 * max(1.0, abs(max(highest))):
        return None
    value = max(highest)
    path = _at(config, "custom_reward_function", "path")
    function = f"the reward function ({path})" if path else "the reward function"
    everything = f"every response of {'all ' if len(highest) > 1 else ''}{_count(len(highest), 'step')}"
    advice = f"It does not distinguish better responses from worse: check what {function} returns for a few."
    if value == 0:
        advice = (
            "Either the model never solves a prompt: use easier prompts or a stronger model, or fine-tune it first. "
            f"Or {function} does not recognise it: compare a few responses with their ground truth."
        )
    text = f"The reward was {value:.4g} for {everything}: there was nothing to learn from."
    return Finding("bad", text, advice, hinders=True)


def no_update(steps: Steps) -> Finding | None:
    """A run whose optimizer steps changed nothing; with at most two steps a schedule may be the reason."""
    for role in ("actor", "sft", "rm"):
        norms, rates = (known_values(steps, f"{role}/{name}") for name in ("grad_norm", "lr"))
        nothing = f"Nothing was learned in all {_count(len(norms), 'step')}"
        if len(rates) > 2 and not any(rates):
            advice = "Raise actor_rollout_ref.actor.optim.lr."
            return Finding("bad", f"{nothing}: the learning rate was 0.", advice, hinders=True)
        if len(norms) > 2 and not any(norms):
            advice = "Check whether responses to a prompt differ in reward, and which tokens the loss mask keeps."
            return Finding("bad", f"{nothing}: the gradient was 0.", advice if role == "actor" else "", hinders=True)
    return None


class LiveFindings:
    """Findings during a run, over its last steps, each reported once."""

    def __init__(self, config: Mapping[str, JSON]) -> None:
        self._config = config
        self._steps, self._reported = deque[tuple[int, Mapping[str, float]]](maxlen=MANY_STEPS), set[str]()

    def step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The findings that are new after a step."""
        self._steps.append((step, metrics))
        recent = dict(self._steps)
        if len(recent) < MANY_STEPS:
            return []
        found = {
            f"steps {min(recent)} to {step}": constant_reward(recent, self._config) or no_update(recent),
            f"after step {step}": truncation(recent, self._config),  # it says itself that it covers the last quarter
        }
        new = {
            when: each
            for when, each in found.items()
            if each and each.tone == "bad" and each.advice not in self._reported
        }
        self._reported |= {each.advice for each in new.values()}
        return [f"{when}: {each.text} {each.advice}".rstrip() for when, each in new.items()]


def accuracy_counts_nothing(steps: Steps) -> Finding | None:
    """A meaningless accuracy of 0: the rewards tell responses apart, but none is a full 1."""
    accuracies, highest = known_values(steps, "val_correct/all/mean"), known_values(steps, "reward/max")
    if not accuracies or max(accuracies) > 0 or not highest or not 0 < max(highest) < RIGHT:
        return None
    return Finding(
        "flat",
        'The accuracy was always 0: no response got "acc": 1, or where the reward function returns no "acc", a reward '
        f"of 1 (the highest was {max(highest):.3g}).",
        'If it misses correct responses, correct "acc", or return {"score": ..., "acc": 0 or 1}.',
    )


def equal_groups(steps: Steps) -> Finding | None:
    """Groups in which no response was better than another; does not repeat `constant_reward`."""
    shares = known_values(steps, "reward/frac_reward_zero_std")
    late = _mean(_last_quarter(shares)) if shares else 0.0
    highest, lowest = known_values(steps, "reward/max"), known_values(steps, "reward/min")
    if late < MANY_EQUAL or not highest or not lowest or max(highest) == min(lowest):
        return None
    reward = _mean(_last_quarter(known_values(steps, REWARD)))
    is_easy = reward > (max(highest) + min(lowest)) / 2
    advice = "harder prompts" if is_easy else "easier prompts, or more responses to each (actor_rollout_ref.rollout.n)"
    return Finding(
        "flat",
        f"In {late:.0%} of the groups all responses got the same reward, {_over(shares)}: they carry no gradient.",
        f"Use {advice}, or let algorithm.filter_groups.enable=true replace them.",
    )


def reward_errors_of(run_dir: Path, timeline: Timeline, steps: Steps) -> Finding | None:
    """Responses with reward errors, with the most frequent messages."""
    errors = {step: n for step, values in steps.items() if (n := _failed(values))}
    validation = {step: n for step, values in steps.items() if (n := _finite(values.get("val/errors", 0.0)))}
    if not errors and not validation:
        return None
    num_calls = sum(known_values(steps, "reward/calls"))
    messages = Counter(_messages(run_dir, timeline, "train", errors))
    for split in sample_splits(run_dir):
        if split != "train":
            messages.update(_messages(run_dir, timeline, split, validation))
    of = f" of {num_calls:,.0f}" if num_calls else ""
    end = "," if validation else ""
    parts = [f"on {sum(errors.values()):,.0f}{of} responses in training, which are left out{end}"] if errors else []
    parts += [f"on {sum(validation.values()):,.0f} validation responses, which count as wrong"] if validation else []
    kinds = [f"“{message}” ({number:,} times in the samples)" for message, number in messages.most_common(2)]
    share = sum(errors.values()) / num_calls if num_calls else 1.0
    return Finding(
        "bad" if share > 0.05 or validation else "flat",
        f"The reward function failed {joined(parts)}." + (f" It said {joined(kinds)}." if kinds else ""),
    )


def greedy_and_sampled(run_dir: Path, timeline: Timeline, steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    """How often sampled responses are correct compared with greedy ones; if none were sampled, training's are used."""
    validated = {step: values for step, values in steps.items() if "val_correct/all/mean" in values}
    if not validated:
        return None
    last = max(validated)
    values = validated[last]
    at_k = {int(name.rpartition("@")[2]): name for name in values if name.startswith("val_correct/all/mean@")}
    if at_k:
        k = max(at_k)
        heat = _temperature(config, "val_kwargs")
        text = f"At step {last}, responses sampled for validation problems{heat} were correct in {values[at_k[k]]:.2f}"
        splits = [split for split in sample_splits(run_dir) if split != "train"]
        rows = [row for split in splits for row in read_samples(run_dir, last, split, timeline)]
        if any(row.get("kind") == "greedy" for row in rows):
            text = (
                f"At step {last}, greedy responses to validation problems were correct in "
                f"{values['val_correct/all/mean']:.2f}, sampled ones{heat} in {values[at_k[k]]:.2f}"
            )
        best = values.get(f"val_correct/all/pass@{k}")
        among = f"; {best:.2f} of the problems had a correct one among {k}" if best is not None and k > 1 else ""
        return Finding("unknown", f"{text}{among}.")
    sampled = [step for step in sample_steps(run_dir) if step <= last][-5:]
    rows = [row for step in sampled for row in read_samples(run_dir, step, "train", timeline) if not row.get("errors")]
    right = [float(accuracy >= RIGHT) for row in rows if isinstance(accuracy := row.get("acc"), int | float)]
    if not right or not max(*right, values["val_correct/all/mean"]):
        return None
    heat = _temperature(config)
    return Finding(
        "unknown",
        f"Responses sampled{heat} in training were correct in {_mean(right):.2f} (the {_count(len(sampled), 'step')} "
        f"up to {last}), greedy responses to validation problems in {values['val_correct/all/mean']:.2f}.",
    )


def _temperature(config: Mapping[str, JSON], *group: str) -> str:
    value = _at(config, "actor_rollout_ref", "rollout", *group, "temperature")
    return f" at temperature {value:g}" if isinstance(value, int | float) else ""


def _messages(run_dir: Path, timeline: Timeline, split: str, steps: Iterable[int]) -> Iterable[str]:
    """The reward errors of some steps."""
    for step in sorted(steps)[:_MAX_FILES]:
        for row in read_samples(run_dir, step, split, timeline):
            errors = row.get("errors")
            for error in errors if isinstance(errors, list) else [errors]:
                if isinstance(error, str) and error:
                    yield error if len(error) <= _MAX_SHOWN else f"{error[:_MAX_SHOWN]}…"


def _failed(values: Mapping[str, float]) -> float:
    """Reward errors of a step, including those on dropped groups if they were recorded."""
    if "reward/error_rate" in values:
        return round(_finite(values["reward/error_rate"] * values.get("reward/calls", 0.0)))
    return _finite(values.get("reward/errors", 0.0)) + _finite(values.get("reward/timeouts", 0.0))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _at(config: Mapping[str, JSON], *names: str) -> JSON:
    """The value of a dotted key; None if the config lacks it."""
    value: JSON | Mapping[str, JSON] = config
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if not isinstance(value, Mapping) else None


def _last_quarter(values: Sequence[float]) -> Sequence[float]:
    return values[-max(len(values) // 4, 1) :]


def _over(values: Sequence[float]) -> str:
    number = len(_last_quarter(values))
    return f"over the last {_count(number, 'step')}" if number > 1 else "in the last step"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def idle_sides(activity: RunActivity, config: Mapping[str, JSON]) -> list[Finding]:
    """Idle sides over the last quarter of the steps, at least four, in which groups still started, since none are left
    at the end of a run. Empty for a synchronous run, where one side always waits."""
    staleness = _at(config, "async", "max_staleness")
    last_start = max((s.start for part in activity.spans.values() for s in part if s.kind == "group"), default=0.0)
    times = sorted(t for t in activity.taken_at.values() if t <= last_start)
    if not isinstance(staleness, int) or staleness < 1 or not activity.decodes or len(times) < MANY_STEPS:
        return []
    part = times[-max(len(times) // 4, MANY_STEPS // 2) - 1 :]
    ran = activity.ran(part[0], part[-1])
    if ran <= 0:
        return []
    waited = min(activity.waited(part[0], part[-1]) / ran, 1.0)
    idle = max(1 - activity.decoded(part[0], part[-1]) / ran, 0.0)
    if waited >= MUCH and idle <= LITTLE:
        slower = "generation is the slower side"
        advice = (
            "Give it more threads (actor_rollout_ref.rollout.num_threads); more staleness would not make it faster."
        )
    elif waited <= LITTLE and idle >= MUCH:
        slower, advice = "training is the slower side", "Give it more threads (trainer.num_threads)"
        lower = f"; a lower async.max_staleness (now {staleness}) may be as fast, with fresher data"
        advice += f"{lower if staleness > 1 else ''}."
    elif waited >= MUCH and idle >= MUCH:
        slower = "both wait for something else"
        advice = (
            "If reward functions take this time, give them more processes (reward.num_workers); or run more groups: "
            f"async.max_staleness (now {staleness}), async.max_concurrent_rollouts."
        )
    else:
        return []
    text = f"The trainer waited for groups {waited:.0%} of the time and the engine was idle {idle:.0%} of it"
    return [Finding("flat", f"{text}, over the last {len(part) - 1} steps: {slower}.", advice)]
