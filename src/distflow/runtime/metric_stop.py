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
        self._has_warned = False

    def reason(self, step: int, metrics: Mapping[str, float], was_validated: bool) -> str:
        """Why the run ends after the step; empty if it continues. metrics: of the step and of its
        validation."""
        condition = self.condition
        self._seen |= metrics.keys()
        if condition is None:
            return ""
        if condition.metric in metrics and condition.holds(metrics[condition.metric]):
            return (
                f"{condition.metric} is {metrics[condition.metric]:g} "
                f"(trainer.stop_when={condition})"
            )
        from distflow.observe.metrics import find_metric  # not at every command's start

        # a part that has no metric at first has none later
        parts = {name.split("/")[0] for name in self._seen}
        known = (
            find_metric(condition.metric) is not None and condition.metric.split("/")[0] in parts
        )
        may_come = known and not condition.is_of_validation  # in a later step
        if (
            not self._has_warned
            and not may_come
            and (was_validated or not condition.is_of_validation)
        ):
            self._has_warned = True
            self.report_missing(
                "no metric of that name so "
                f"far{', with a validation done' if was_validated else ''}"
            )
        return ""

    def report_missing(self, what: str = "the run ended without a metric of that name") -> None:
        """Warn if the metric has not been seen yet."""
        from distflow.errors import nearest  # not at every command's start

        if self.condition is not None and self.condition.metric not in self._seen:
            near = nearest(self.condition.metric, self._seen)
            self._warn(
                f"trainer.stop_when={self.condition}: "
                f"{what}{f'; did you mean {near}?' if near else ''}"
            )
