"""What stands at the top of a run's page: the most important sentences, and a few numbers."""

from collections.abc import Sequence

from distflow.observe.findings.finding import REWARD, Finding, Steps, known_values, readable_s
from distflow.observe.findings.summary import (
    Accuracy,
    EventGroup,
    checked,
    count_problems,
    describe_accuracy,
    describe_checks,
    describe_learning,
    status,
)
from distflow.observe.report.chart_data import wilson
from distflow.observe.run_reader import Event

MAX_SENTENCE = 2000
_MAX_SENTENCES = 100


def judgements(
    end: Finding,
    found: Sequence[Finding],
    accuracy: Accuracy | None,
    groups: Sequence[EventGroup],
    steps: Steps,
) -> list[Finding]:
    """The findings, most important first: how it ended, obstacles to learning, whether it learned,
    others, problems."""
    if not steps:
        judged = [end, Finding("unknown", "No step has been recorded yet.")]
    elif not max(steps) and accuracy:  # an evaluation, or a run that has only validated so far
        judged = [end, *found, describe_accuracy(accuracy), count_problems(groups, steps)]
    else:
        hindered = [finding for finding in found if finding.hinders]
        judged = [end, *hindered]

        # For a reward that never moved, `hindered` says more than "no clear change"; only
        # validation problems add to it.
        if accuracy or not hindered:
            outcome = describe_learning(accuracy, steps)
            # After a failure, checks that passed or did not run do not matter.
            if end.tone != "bad" or outcome.tone != "unknown":
                judged.append(outcome)

        judged += [finding for finding in found if not finding.hinders]
        if end.tone != "bad" or groups:
            judged.append(count_problems(groups, steps))

    return [finding for finding in judged if finding.text]


def sentences(
    judged: Sequence[Finding], steps: Steps, events: Sequence[Event], last: Sequence[Finding]
) -> list[dict[str, str]]:
    """The findings, then the checks, then the last ones: what was predicted, and lost lines."""
    ordered = list(judged)
    is_checked = status(events)["word"] != "failed" or checked(events)
    if steps and max(steps) and is_checked:
        ordered.append(describe_checks(events))
    ordered += last

    shown = []
    for found in ordered[:_MAX_SENTENCES]:
        if found.text:
            text = found.text[:MAX_SENTENCE]
            advice = found.advice[:MAX_SENTENCE]
            shown.append({"tone": found.tone, "text": text, "advice": advice})

    return shown


def tiles(accuracy: Accuracy | None, steps: Steps) -> list[dict[str, str]]:
    """The few numbers to read first: label, value, and a line below."""
    found = _accuracy_tiles(accuracy) if accuracy else []
    for label, name in (
        ("reward", REWARD),
        ("loss", "sft/loss"),
        ("validation loss", "sft/val_loss"),
    ):
        if values := known_values(steps, name):
            found.append((label, f"{values[-1]:.3g}", f"{values[0]:.3g} at first"))

    if speeds := sorted(known_values(steps, "throughput/tokens_per_s")):
        found.append(("tokens a second", f"{speeds[len(speeds) // 2]:,.0f}", "median of the steps"))
    if seconds := known_values(steps, "timing_s/step"):
        found.append(("steps", f"{len(seconds):,}", f"in {readable_s(sum(seconds))}"))
    return [{"label": label, "value": value, "note": note} for label, value, note in found]


def _accuracy_tiles(accuracy: Accuracy) -> list[tuple[str, str, str]]:
    first_step, first = accuracy.points[0]
    last_step, last = accuracy.points[-1]
    where = "before RL"
    if not accuracy.before_training:
        where = f"at step {first_step}"

    found = [(f"accuracy {where}", f"{first:.2f}", _likely(accuracy, first))]
    if len(accuracy.points) > 1:
        best_step, best = accuracy.best
        found.append((f"accuracy at step {last_step}", f"{last:.2f}", _likely(accuracy, last)))
        if best > last:
            found.append(("best accuracy", f"{best:.2f}", f"at step {best_step}"))

    return found


def _likely(accuracy: Accuracy, share: float) -> str:
    """The confidence interval of the accuracy, if it is a share of a known number."""
    if not accuracy.num_problems or not 0 <= share <= 1:
        return "on validation problems"
    low, high = wilson(share, accuracy.num_problems)
    return f"95 %: {low:.2f} to {high:.2f}"
