"""The doctor of a run: all rules, those over the metrics of steps and those over the whole run, and
what they found."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from distflow.observe.crash_safe_files import JSON, to_number
from distflow.observe.report.chart_data import tabulate
from distflow.observe.report.doctor_run_rules import (
    MAX_SHOWN,
    MAX_UIDS,
    PLANNED,
    RunRecords,
    accuracy_counts_nothing,
    broken_policy,
    constant_reward,
    equal_groups,
    idle_workers,
    no_update,
    predicted_and_measured,
    reward_errors,
    starved_prompts,
    truncation,
)
from distflow.observe.report.doctor_step_rules import (
    MANY_STEPS,
    STEP_RULES,
    Check,
    History,
    register_doctor_rule,
    rules_over,
)
from distflow.observe.report.summary_sentences import (
    NO_END,
    Finding,
    Steps,
    failure,
    group_events,
    known_values,
    readable_s,
    status,
)
from distflow.observe.run_reader import comparable_validations
from distflow.observe.sample_files import SAMPLES, sample_file_name

BROKEN = "policy-broken"
_MOST_WARNINGS = 5
OF_ENTROPY = {"entropy-collapse", "entropy-explosion"}


class RunRule(NamedTuple):
    """needs: a metric, or "groups" or "spans". check: over the whole run. A finding whose tone is
    good or unknown is no problem."""

    name: str
    needs: str
    level: str
    check: Callable[[RunRecords], Finding | None]

    def can_look(self, run: RunRecords) -> bool:
        there = {"groups": bool(run.activity.groups), "spans": bool(run.times.windows), "": True}
        return there.get(self.needs, self.needs in run.metrics)


@dataclass(frozen=True)
class Examination:
    """findings: most important first. clean: the rules that found nothing. lacking: those without
    data, and what they need."""

    findings: list[Finding]
    clean: list[str]
    lacking: dict[str, str]

    def problems(self) -> list[Finding]:
        """Errors, then warnings, the earliest first."""
        return sorted(
            (f for f in self.findings if f.level), key=lambda f: (f.level != "error", f.first or 0)
        )


def examine(run: RunRecords) -> Examination:
    """The findings of all rules, those on the metrics of steps included."""
    comparable, _ = comparable_validations(run.records, run.events)
    rules = rules_over(tabulate(comparable), run.config)
    found: list[Finding] = []
    lacking = rules.lacking()
    for rule in RUN_RULES:
        if not rule.can_look(run):
            lacking[rule.name] = f"needs {rule.needs}"
            continue
        each = rule.check(run)
        if len(run.steps) < MANY_STEPS:
            lacking[rule.name] = f"needs {MANY_STEPS} steps"
        if each is not None:
            is_problem = each.tone in ("bad", "flat") and rule.name not in lacking
            found.append(
                each._replace(
                    rule=rule.name, level=(each.level or rule.level) if is_problem else ""
                )
            )
    known = {each.rule for each in found if each.level}
    if BROKEN in known:
        known |= OF_ENTROPY  # the same, without its cause
    found += [each for each in rules.findings() if each.rule not in known]
    names = {rule.name for rule in RUN_RULES} | {*STEP_RULES}
    clean = sorted(names - {*lacking} - {each.rule for each in found if each.level})
    return Examination([_with_samples(run, each) for each in found], clean, lacking)


def _with_samples(run: RunRecords, found: Finding) -> Finding:
    """The finding with the samples of its first step that show it."""
    if found.first is None or not found.level:
        return found
    rows = run.samples(found.first)
    sizes = {str(row.get("uid")): to_number(row.get(found.worst)) for row in rows}
    known = {uid: abs(size) for uid, size in sizes.items() if size is not None}
    uids = found.uids or tuple(sorted(known, key=lambda uid: -known[uid])[:MAX_UIDS])
    name = f"{SAMPLES}/{sample_file_name(found.first, 'train')}"
    return found._replace(uids=uids, files=("metrics.jsonl", *([name] if rows else [])))


def problems(run: RunRecords, found: Examination, is_running: bool) -> list[Finding]:
    """What ended the run, or why it does not go on, then what was found, and what the run itself
    warned of."""
    end = filter(None, (_failed_run(run), _unfinished(run, is_running)))
    return [*end, *found.problems(), *islice(_warned(run), _MOST_WARNINGS)]


def _warned(run: RunRecords) -> Iterator[Finding]:
    for group in group_events(run.events):
        if group["kind"] == "warning" and not group["rolled_back"]:
            yield Finding(
                "flat",
                group["message"][:MAX_SHOWN],
                rule="warned",
                level="warning",
                first=group["first"],
                last=group["last"],
                files=("events.jsonl",),
            )


def _unfinished(run: RunRecords, is_running: bool) -> Finding | None:
    """A run without an end that nobody writes to, or that has done no step for far longer than
    steps take."""
    if status(run.events)["word"] != NO_END["word"]:
        return None
    if not is_running:
        text = (
            "The run has no end, and no process on this machine writes to it: it was killed, or "
            "runs elsewhere."
        )
        advice = "The same command resumes it."
        return Finding(
            "flat", text, advice, rule="run-killed", level="warning", files=("events.jsonl",)
        )
    seconds = known_values(run.steps, "timing_s/step")
    if not seconds or not run.records:
        return None
    limit = max(5 * statistics.median(seconds), 60.0)
    quiet = time.time() - run.records[-1].t
    if quiet <= limit:
        return None
    last = max(
        (s for part in run.activity.spans.values() for s in part), key=lambda s: s.end, default=None
    )
    where = f" Its last span is {last.what}{f', on {last.on}' if last.on else ''}." if last else ""
    text = (
        f"No step ended for {readable_s(quiet)}; a step takes "
        f"{readable_s(statistics.median(seconds))}.{where}"
    )
    numbers = {"seconds without a step": quiet, "limit": limit}
    advice = "Look at stacks.txt and events.jsonl."
    return Finding(
        "bad",
        text,
        advice,
        rule="stuck",
        level="error",
        first=run.records[-1].step,
        numbers=numbers,
    )


def _failed_run(run: RunRecords) -> Finding | None:
    error = failure(run.events)
    if error is None:
        return None
    text = f"The run failed: {error.message[:MAX_SHOWN]}"
    advice = "Its traceback is in events.jsonl."
    files = ("events.jsonl",)
    return Finding(
        "bad", text, advice, rule="run-failed", level="error", first=error.step, files=files
    )


def _no_update(steps: Steps, config: Mapping[str, JSON]) -> Finding | None:
    # which is the reason
    return None if constant_reward(steps, config) else no_update(steps, config)


OnSteps = Callable[[Steps, Mapping[str, JSON]], Finding | None]


def _unless_broken(
    check: OnSteps, steps: Steps, whole: Steps, config: Mapping[str, JSON]
) -> Finding | None:
    """What a rule finds in some steps, unless it follows from a policy that came apart. whole: with
    the first steps."""
    found = check(steps, config)
    if (
        found is None
        or check is broken_policy
        or broken_policy(whole, config, abruptly=False) is None
    ):
        return found
    return found if check is constant_reward and check(whole, config) is not None else None


def _truncation(run: RunRecords) -> Finding | None:
    return _unless_broken(truncation, run.steps, run.steps, run.config)


def _equal_groups(run: RunRecords) -> Finding | None:
    return _unless_broken(equal_groups, run.steps, run.steps, run.config)


def _over_window(check: OnSteps) -> Check:
    def look(history: History) -> Finding | None:
        whole = {**history.begin, **history.window}
        found = _unless_broken(
            check, whole if check is broken_policy else history.window, whole, history.config
        )
        return found if found and found.tone in ("bad", "flat") else None

    return look


# While a run goes on, its last steps count; afterwards the run as a whole takes precedence.
for _name, _need, _level, _check in (
    ("reward-constant", "reward/max", "error", constant_reward),
    ("nothing-moves", "*/grad_norm", "error", _no_update),
    ("length-runaway", "rollout/truncated", "warning", truncation),
    ("no-signal", "reward/frac_reward_zero_std", "warning", equal_groups),
    (BROKEN, "actor/entropy", "error", broken_policy),
):
    register_doctor_rule(_name, [_need], _level, enough=MANY_STEPS)(_over_window(_check))  # type: ignore[arg-type]


RUN_RULES: tuple[RunRule, ...] = (
    RunRule(BROKEN, "actor/entropy", "error", lambda run: broken_policy(run.steps, run.config)),
    RunRule(
        "reward-constant", "reward/max", "error", lambda run: constant_reward(run.steps, run.config)
    ),
    RunRule("nothing-moves", "", "error", lambda run: _no_update(run.steps, run.config)),
    RunRule(
        "accuracy-counts-nothing",
        "reward/max",
        "warning",
        lambda run: accuracy_counts_nothing(run.steps),
    ),
    RunRule("length-runaway", "rollout/truncated", "warning", _truncation),
    RunRule("no-signal", "reward/frac_reward_zero_std", "warning", _equal_groups),
    RunRule("reward-errors", "", "", reward_errors),
    RunRule("idle-workers", "spans", "warning", idle_workers),
    RunRule("slow-prompts-starved", "groups", "warning", starved_prompts),
    RunRule(PLANNED, "timing_s/step", "warning", predicted_and_measured),
)
"""In the order in which a report shows their findings."""
