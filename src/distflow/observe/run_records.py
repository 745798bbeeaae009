"""What is read of one run's folder, once: by the report, the dashboard, the doctor and `diff`."""

from functools import cached_property
from pathlib import Path

from distflow.observe.crash_safe_files import JSON
from distflow.observe.findings.finding import Steps
from distflow.observe.report.activity import RunActivity, read_activity
from distflow.observe.report.chart_data import tabulate
from distflow.observe.report.step_times import StepTimes, step_times
from distflow.observe.run_reader import (
    Event,
    MetricsRecord,
    Timeline,
    read_config,
    read_events,
    read_metrics,
    read_samples,
    read_timeline,
)


class RunRecords:
    """The records of one run, each read when it is first asked for."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @cached_property
    def timeline(self) -> Timeline:
        return read_timeline(self.run_dir)

    @cached_property
    def records(self) -> list[MetricsRecord]:
        return read_metrics(self.run_dir, self.timeline)

    @cached_property
    def events(self) -> list[Event]:
        return read_events(self.run_dir, self.timeline)

    @cached_property
    def steps(self) -> Steps:
        return tabulate(self.records)

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
