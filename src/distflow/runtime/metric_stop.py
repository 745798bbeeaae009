"""Ends a run before its last step by a metric's value."""

from collections.abc import Callable, Mapping


class MetricStop:
    """Ends a run at a metric's value, on the rank that has the metrics of all ranks. condition:
    None for never."""

    def __init__(self, condition: str | None, warn: Callable[[str], None]) -> None:
        # not at every command's start
        from distflow.config.keys.trainer import StopCondition

        self.condition = None if condition is None else StopCondition.of(condition)

        self._warn = warn
        self._seen = set[str]()

    def reason(self, metrics: Mapping[str, float]) -> str:
        """Why the run ends after a step; empty if it continues. metrics: of the step and of its
        validation."""
        condition = self.condition
        self._seen |= metrics.keys()
        if condition is None or condition.metric not in metrics:
            return ""

        value = metrics[condition.metric]
        if not condition.holds(value):
            return ""
        return f"{condition.metric} is {value:g} (trainer.stop_when={condition})"

    def report_missing(self) -> None:
        """Warn at the end of the run if there never was such a metric."""
        from distflow.errors import hint  # not at every command's start

        if self.condition is not None and self.condition.metric not in self._seen:
            self._warn(
                f"trainer.stop_when={self.condition}: the run ended without a metric of that "
                f"name{hint(self.condition.metric, self._seen)}"
            )
