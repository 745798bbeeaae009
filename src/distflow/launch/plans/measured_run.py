"""Calibrates plans by a run: the rates that its folder shows, read without running code that its
config names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from distflow.config import Config, RunLimits
from distflow.config.compose.load_config import config_of_run
from distflow.errors import UserError, count_of
from distflow.graph import BoundPipeline
from distflow.launch.select_pipeline import bind
from distflow.launch.user_code import pipeline_code
from distflow.observe import run_reader
from distflow.observe.crash_safe_files import read_object
from distflow.observe.report.activity import RunActivity, read_activity
from distflow.observe.run_reader import MetricsRecord
from distflow.planning.devices import Device
from distflow.planning.lengths import Lengths, assumed_lengths, lengths_under, quantiles
from distflow.planning.measured_rates import MeasuredSteps, Rates, fit
from distflow.planning.memory import PROCESS_BYTES
from distflow.planning.model_memory import sizes_of
from distflow.planning.model_shapes import ModelShape
from distflow.planning.predicted_run import PredictedRun, RunFacts, predict

_UNPLANNED = ("eval", "save", "save_wait", "start")
"""Phases that a plan leaves out."""
_MOST_STEPS = 100
_MOST_FILES = 10
_FEWEST = 2
_NUM_LENGTHS = 1000


def as_predicted(
    run: PredictedRun, device: Device, shapes: Mapping[str, ModelShape]
) -> dict[str, Any]:
    """What a run's plan.json has of its prediction. device: the whole one."""
    return {
        "device": asdict(device),
        "shapes": {role: asdict(shape) for role, shape in shapes.items()},
        "phases": {} if run.why_untimed else dict(run.phases),
        "peak_bytes": run.fullest.peak,
        "calibrated_by": run.times.rates.source,
    }


def measured_run(named: str) -> "MeasuredRun":
    """Raises UserError for a folder that does not show enough."""
    folder = Path(named).expanduser()
    values = run_reader.read_config(folder)
    plan_json: dict[str, Any] = read_object(folder / "plan.json", folder)
    predicted: Any = plan_json.get("predicted")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the folder of a run")
    if not values or not predicted or not isinstance(predicted, dict):
        raise UserError(
            f"{folder} cannot calibrate a plan: it has no config.yaml, or its plan.json has no "
            "prediction (it is older than these, or a plan does not know its model or device)"
        )

    config = config_of_run(values)
    with _blaming_plan(folder):
        device = Device(**predicted["device"])
        shapes = {role: ModelShape(**shape) for role, shape in predicted["shapes"].items()}

    activity = read_activity(folder)
    steps = _steady_steps(folder, activity, "rollout" in shapes)
    pipeline = str(plan_json.get("pipeline"))
    prompt, responses = _lengths(folder, steps)

    return MeasuredRun(
        folder, config, pipeline, device, shapes, prompt, responses, tuple(steps), activity
    )


@contextmanager
def _blaming_plan(folder: Path) -> Iterator[None]:
    """Turns what a damaged plan.json raises into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"{folder} cannot calibrate a plan: its plan.json is damaged: {error!r}"
        ) from error


@dataclass(frozen=True)
class _Step:
    record: MetricsRecord
    began: float

    def seconds(self, phase: str) -> float:
        return self.record.values.get(f"timing_s/{phase}", 0.0)


def _steady_steps(folder: Path, activity: RunActivity, generates: bool) -> list[_Step]:
    """The last steps whose spans are there, without the first quarter of all."""
    trained = []
    for record in run_reader.read_metrics(folder):
        if record.kind == "train" and "timing_s/step" in record.values:
            trained.append(record)

    first = max(1, len(trained) // 4)
    steps = []
    for before, after in pairwise(trained[first - 1 :]):
        has_spans = not generates or activity.decoded(before.t, after.t)
        if after.restart == before.restart and has_spans:
            steps.append(_Step(after, before.t))

    steps = steps[-_MOST_STEPS:]
    if len(steps) < _FEWEST:
        raise UserError(
            f"{folder} has {count_of(len(trained), 'step')}, of which {len(steps)} can be used: a "
            f"calibration needs {_FEWEST} after the first quarter, with their spans"
        )

    return steps


def _lengths(folder: Path, steps: list[_Step]) -> tuple[float, tuple[float, ...]]:
    """Mean tokens of prompts, and the lengths of responses."""
    timeline = run_reader.read_timeline(folder)
    found: dict[str, list[float]] = {"prompt_length": [], "response_length": []}

    for step in steps[-_MOST_FILES:]:
        for row in run_reader.read_samples(folder, step.record.step, timeline=timeline):
            for name, lengths in found.items():
                length = row.get(name)
                if isinstance(length, int) and length > 0:
                    lengths.append(float(length))

    prompts = found["prompt_length"]
    responses = quantiles(found["response_length"], _NUM_LENGTHS)
    return fmean(prompts) if prompts else 1.0, responses


@dataclass(frozen=True)
class MeasuredRun:
    """What a run shows."""

    folder: Path
    config: Config
    pipeline: str
    """Its name."""
    device: Device
    """Of its plan."""
    shapes: Mapping[str, ModelShape]
    """Of its plan."""
    prompt: float
    """Mean tokens."""
    responses: tuple[float, ...]
    """Tokens, ascending; empty if it generated nothing."""
    steps: tuple[_Step, ...]
    activity: RunActivity

    def lengths(self, config: Config) -> Lengths:
        """As a run of this config would have them."""
        if not self.responses:
            return assumed_lengths(config)
        limit = config.data.max_response_length
        responses = lengths_under(limit, self.responses, self.config.data.max_response_length)
        return Lengths(min(self.prompt, config.data.max_prompt_length), responses, limit)

    def rates(self, pipeline: BoundPipeline, device: Device) -> Rates:
        """For another run, with this pipeline on this device. Raises UserError if this run had
        others."""
        if (self.pipeline, self.device.name) != (pipeline.graph_id, device.name):
            raise UserError(
                f"{self.folder} cannot calibrate this plan: it ran '{self.pipeline}' on "
                f"'{self.device.name}', and this run is '{pipeline.graph_id}' on '{device.name}'"
            )

        if not pipeline_code(self.config):  # else its code would have to run
            pipeline = bind(self.config)
        with _blaming_plan(self.folder):
            return self._fitted(pipeline)

    def _fitted(self, pipeline: BoundPipeline) -> Rates:
        """pipeline: of this run."""
        score = self._score()
        known = RunFacts(RunLimits(), self.lengths(self.config), Rates(score=score))
        run = predict(self.config, pipeline, self.shapes, self.device, known)
        seconds, planned = self._seconds(run, pipeline)

        peak = None
        if run.device.is_cpu:
            peaks = [step.record.values.get("memory/process/peak", 0.0) for step in self.steps]
            peak = max(peaks) or None

        samples = run.times.samples // sizes_of(run.plan, "actor").data
        return fit(
            MeasuredSteps(seconds, score, samples, peak),
            planned,
            run.fullest.peak,
            libraries=PROCESS_BYTES[self.device.kind],
            source=str(self.folder),
        )

    def _score(self) -> float:
        """Mean seconds of a group's scoring; 0 if no group waited for scores. If the workers are
        busy, a group waits for others too, so it is at most their time for each group."""
        begin = self.steps[0].began
        end = self.steps[-1].record.t

        waits = []
        for spans in self.activity.spans.values():
            for span in spans:
                if span.what == "scores" and begin <= span.start and span.end <= end:
                    waits.append(span.end - span.start)

        if not waits:
            return 0.0
        busy = self.activity.scored(begin, end) * self.config.reward.num_workers
        return min(fmean(waits), busy / len(waits))

    def _seconds(
        self, run: PredictedRun, pipeline: BoundPipeline
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The measured medians of the parts of `Rates` and of `rest`, and the planned seconds of
        the parts and of the rewards that are left after the last token."""
        times = run.times
        seconds = {"sync": self._median("update_weights"), "forward": 0.0, "update": 0.0}
        planned = {"sync": times.sync(), "forward": 0.0, "update": 0.0}
        phases = set[str]()
        for node in pipeline.training_nodes:
            if not node.engines:
                continue

            part = "forward"
            if node.phase.startswith("train"):
                part = "update"

            planned[part] += times.node(node)
            if node.phase not in phases:
                phases.add(node.phase)
                seconds[part] += self._median(node.phase)

        waits = self._median("rollout")
        whole = []
        for step in self.steps:
            left_out = sum(step.seconds(name) for name in _UNPLANNED)
            whole.append(step.seconds("step") - left_out)

        rest = median(whole) - sum(seconds.values())
        if run.plan.generates:
            decoded = [self.activity.decoded(step.began, step.record.t) for step in self.steps]
            seconds["generate"] = median(decoded)
            waits = waits if times.overlaps else seconds["generate"]
            planned["generate"] = times.generate()

            planned["rewards"] = 0.0 if times.overlaps else times.rewards()

        seconds["rest"] = max(0.0, rest - waits)
        return seconds, planned

    def _median(self, phase: str) -> float:
        return median(step.seconds(phase) for step in self.steps)
