"""The few numbers to read first."""

from distflow.observe.report_intervals import wilson
from distflow.observe.report_summary import REWARD, Accuracy, Steps, known_values, readable_s


def tiles(accuracy: Accuracy | None, steps: Steps) -> list[dict[str, str]]:
    """The few numbers to read first: label, value, and a line below."""
    found = _accuracy_tiles(accuracy) if accuracy else []
    for label, name in (("reward", REWARD), ("loss", "sft/loss"), ("held-out loss", "sft/val_loss")):
        values = known_values(steps, name)
        if values:
            found.append(_tile(label, f"{values[-1]:.3g}", f"{values[0]:.3g} at first"))
    speeds = sorted(known_values(steps, "throughput/tokens_per_s"))
    if speeds:
        found.append(_tile("tokens a second", f"{speeds[len(speeds) // 2]:,.0f}", "median of the steps"))
    seconds = known_values(steps, "timing_s/step")
    if seconds:
        found.append(_tile("steps", f"{len(seconds):,}", f"in {readable_s(sum(seconds))}"))
    return found


def _accuracy_tiles(accuracy: Accuracy) -> list[dict[str, str]]:
    (first_step, first), (last_step, last) = accuracy.points[0], accuracy.points[-1]
    where = "before RL" if accuracy.before_training else f"at step {first_step}"
    found = [_tile(f"accuracy {where}", f"{first:.2f}", _likely(accuracy, first))]
    if len(accuracy.points) > 1:
        best_step, best = accuracy.best
        found.append(_tile(f"accuracy at step {last_step}", f"{last:.2f}", _likely(accuracy, last)))
        if best > last:
            found.append(_tile("best accuracy", f"{best:.2f}", f"at step {best_step}"))
    return found


def _likely(accuracy: Accuracy, share: float) -> str:
    """Between what the accuracy lies, where it is a share of a known number."""
    if not accuracy.num_problems or not 0 <= share <= 1:
        return "on held-out problems"
    low, high = wilson(share, accuracy.num_problems)
    return f"95 %: {low:.2f} to {high:.2f}"


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}
