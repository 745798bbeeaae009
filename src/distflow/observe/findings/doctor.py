"""The doctor of a run: what all rules found, and what ended the run."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from distflow.observe.findings.finding import MANY_STEPS, Finding, known_values, readable_s
from distflow.observe.findings.learning_rules import LEARNING_RULES, accuracy_counts_nothing
from distflow.observe.findings.run_rules import (
    MAX_SHOWN,
    idle_workers,
    reward_errors,
)
from distflow.observe.findings.step_rules import rules_over
from distflow.observe.findings.summary import NO_END, failure, group_events, status
from distflow.observe.report.chart_data import tabulate
from distflow.observe.run_reader import comparable_validations
from distflow.observe.run_records import RunRecords

BROKEN = "policy-broken"
_MOST_WARNINGS = 5


@dataclass(frozen=True)
class Examination:
    """What the rules found."""

    findings: list[Finding]
    """The most important first."""

    lacking: dict[str, str]
    """The rules without data, with what they need."""

    def problems(self) -> list[Finding]:
        """Errors, then warnings, the earliest first."""
        problems = [found for found in self.findings if found.level]
        return sorted(problems, key=lambda found: (found.level != "error", found.first or 0))


def examine(run: RunRecords) -> Examination:
    """The findings of all rules, those on the metrics of steps included."""
    comparable, _ = comparable_validations(run.records, run.events)
    step_rules = rules_over(tabulate(comparable), run.config)
    lacking = step_rules.lacking()
    if not run.times.windows:
        lacking["idle-workers"] = "needs spans"
    over_run = [rule.find(run.steps, run.steps, run.config) for rule in LEARNING_RULES]
    over_run += [accuracy_counts_nothing(run.steps), reward_errors(run), idle_workers(run)]

    is_long = len(run.steps) >= MANY_STEPS
    ends = [event.kind for event in run.events if event.kind in ("start", "end")]
    has_ended = ends[-1:] == ["end"]
    findings: list[Finding] = []
    for found in over_run:
        if found is None:
            continue
        # nothing can follow what kept a short run from learning
        is_judged = is_long or (has_ended and found.hinders)
        is_problem = is_judged and found.tone in ("bad", "flat")
        findings.append(found if is_problem else found._replace(level=""))

    known = {found.rule for found in findings if found.level}
    if BROKEN in known:
        known.add("entropy-collapse")  # the same, without its cause
    findings += [found for found in step_rules.findings() if found.rule not in known]

    return Examination(findings, lacking)


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
        return Finding("flat", text, advice, rule="run-killed", level="warning")

    seconds = known_values(run.steps, "timing_s/step")
    if not seconds or not run.records:
        return None

    limit = max(5 * statistics.median(seconds), 60.0)
    quiet = time.time() - run.records[-1].t
    if quiet <= limit:
        return None

    text = (
        f"No step ended for {readable_s(quiet)}; a step takes "
        f"{readable_s(statistics.median(seconds))}."
    )
    spans = chain.from_iterable(run.activity.spans.values())
    last = max(spans, key=lambda span: span.end, default=None)
    if last:
        text += f" Its last span is {last.what}{f', on {last.on}' if last.on else ''}."

    return Finding(
        "bad",
        text,
        "Look at stacks.txt and events.jsonl.",
        rule="stuck",
        level="error",
        first=run.records[-1].step,
        numbers={"seconds without a step": quiet, "limit": limit},
    )


def _failed_run(run: RunRecords) -> Finding | None:
    error = failure(run.events)
    if error is None:
        return None
    text = f"The run failed: {error.message[:MAX_SHOWN]}"
    advice = "Its traceback is in events.jsonl."
    return Finding("bad", text, advice, rule="run-failed", level="error", first=error.step)
