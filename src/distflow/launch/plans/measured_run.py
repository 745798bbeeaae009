"""Calibrates plans by a run: the rates that the run's folder shows, read without torch and without
running code that its config names."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from distflow.config import Config, RunLimits
from distflow.config.compose.load_config import config_of_run
from distflow.errors import UserError, count_of
from distflow.observe import run_reader
from distflow.observe.crash_safe_files import read_object
from distflow.observe.report.activity import RunActivity, read_activity
from distflow.observe.run_reader import MetricsRecord
from distflow.planning.devices import Device
from distflow.planning.layouts import Layout, Sizes
from distflow.planning.lengths import Lengths, assumed_lengths, lengths_under, quantiles
from distflow.planning.measured_rates import MeasuredSteps, Rates, fit
from distflow.planning.memory import PROCESS_BYTES, worker_memory
from distflow.planning.model_memory import sizes_of
from distflow.planning.model_shapes import ModelShape
from distflow.planning.plan import Plan, RankPlan
from distflow.planning.predicted_run import PredictedRun, RunFacts, share_of_device
from distflow.planning.step_times import StepTimes

_UNPLANNED = ("eval", "save", "save_wait", "start")
"""Phases that a plan leaves out."""
_MOST_STEPS = 100
_MOST_FILES = 10
_FEWEST = 2
_NUM_SCORES = 50
_NUM_LENGTHS = 1000


@dataclass(frozen=True)
class MeasuredRun:
    """What a run shows."""

    config: Config
    pipeline: str
    """Its name."""
    device: Device
    """Of its plan."""
    shapes: Mapping[str, ModelShape]
    """Of its plan."""
    rates: Rates
    prompt: float
    """Mean tokens."""
    responses: tuple[float, ...]
    """Tokens, ascending; empty if it generated nothing."""
    step_seconds: float
    """The median, without validation and checkpoints."""

    def lengths(self, config: Config) -> Lengths:
        """As a run of this config would have them."""
        if not self.responses:
            return assumed_lengths(config)
        limit = config.data.max_response_length
        responses = lengths_under(limit, self.responses, self.config.data.max_response_length)
        return Lengths(min(self.prompt, config.data.max_prompt_length), responses, limit)


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


def facts_of(
    measured: MeasuredRun | None, config: Config, pipeline: str, device: Device, limits: RunLimits
) -> RunFacts:
    """What is known of a run. Raises UserError if the measured run had another pipeline or
    device."""
    if measured is None:
        return RunFacts(limits)
    _check_same(measured, "pipeline", measured.pipeline, pipeline)
    _check_same(measured, "device", measured.device.name, device.name)
    scores = cut_by_timeout(measured.rates.scores, config)
    return RunFacts(limits, measured.lengths(config), replace(measured.rates, scores=scores))


def _check_same(measured: MeasuredRun, what: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise UserError(
            f"{measured.rates.source} cannot calibrate this plan: its {what} is '{theirs}', and "
            f"this run's is '{ours}'"
        )


def cut_by_timeout(scores: Sequence[float], config: Config) -> tuple[float, ...]:
    """Seconds of the scoring of groups, at most those after which all calls for a group have
    ended."""
    calls = ceil(config.actor_rollout_ref.rollout.n / config.reward.num_workers)
    longest = config.reward.timeout_s * calls
    return tuple(min(seconds, longest) for seconds in scores)


def measured_run(named: str) -> MeasuredRun:
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
    try:
        return _read_run(folder, config, plan_json)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"{folder} cannot calibrate a plan: its plan.json is damaged: {error!r}"
        ) from error


def _read_run(folder: Path, config: Config, plan_json: Mapping[str, Any]) -> MeasuredRun:
    device = Device(**plan_json["predicted"]["device"])
    shapes = {role: ModelShape(**shape) for role, shape in plan_json["predicted"]["shapes"].items()}
    plan = _plan_of(plan_json)
    activity = read_activity(folder)
    steps = _steady_steps(folder, activity, plan.generates)
    prompt, responses = _lengths(folder, steps)
    timed = _TimedSteps(steps, activity, _engine_nodes(plan_json))
    seconds = median(timed.seconds())
    found = MeasuredRun(config, plan.pipeline, device, shapes, Rates(), prompt, responses, seconds)
    own = share_of_device(config, plan, device)
    rates = Rates(scores=timed.scores(config.reward.num_workers))
    times = StepTimes(config, plan, shapes, own, found.lengths(config), rates)
    peak = max(worker.peak for worker in worker_memory(plan, config, shapes, own))
    libraries = PROCESS_BYTES[device.kind]
    measured = timed.measured(times)
    return replace(
        found, rates=fit(measured, timed.planned(times), peak, libraries, source=str(folder))
    )


def _plan_of(plan_json: Mapping[str, Any]) -> Plan:
    """The placement alone."""
    names = ("rollout_nodes", "training_nodes", "engines", "services", "rollout_group")
    ranks = []
    for rank in plan_json["ranks"]:
        lists = {name: tuple(rank[name]) for name in names}
        ranks.append(RankPlan(**{**rank, **lists}))
    layouts = []
    for layout in plan_json["layouts"]:
        sizes = Sizes(**layout["sizes"])
        layouts.append(Layout(**{**layout, "ranks": tuple(layout["ranks"]), "sizes": sizes}))
    return Plan(str(plan_json["pipeline"]), tuple(ranks), (), tuple(layouts))


EngineNode = tuple[str, tuple[str, ...]]
"""The phase and the engines of a node of the training loop that has some."""


def _engine_nodes(plan_json: Mapping[str, Any]) -> list[EngineNode]:
    found = []
    for node in plan_json["nodes"]:
        if node["plane"] == "training" and node["engines"]:
            found.append((str(node["phase"]), tuple(node["engines"])))
    return found


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


def _lengths(folder: Path, steps: Sequence[_Step]) -> tuple[float, tuple[float, ...]]:
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
class _TimedSteps:
    steps: Sequence[_Step]
    activity: RunActivity
    nodes: Sequence[EngineNode]

    def seconds(self) -> list[float]:
        """Of each step, without what a plan leaves out."""
        found = []
        for step in self.steps:
            left_out = sum(step.seconds(name) for name in _UNPLANNED)
            found.append(step.seconds("step") - left_out)
        return found

    def scores(self, workers: int) -> tuple[float, ...]:
        """Waits of groups for their scores, as long as one scoring takes: a group waits for others
        too if the workers are busy."""
        begin = self.steps[0].began
        end = self.steps[-1].record.t
        waits = []
        for spans in self.activity.spans.values():
            for span in spans:
                if span.what == "scores" and begin <= span.start and span.end <= end:
                    waits.append(span.end - span.start)
        if not waits:
            return ()
        busy = self.activity.scored(begin, end)
        alone = min(1.0, busy * workers / sum(waits))
        return quantiles([wait * alone for wait in waits], _NUM_SCORES)

    def measured(self, times: StepTimes) -> MeasuredSteps:
        seconds = {"sync": self._median("update_weights"), "forward": 0.0, "update": 0.0}
        for phase in dict.fromkeys(phase for phase, _ in self.nodes):
            seconds[_pass_of(phase)] += self._median(phase)
        own = self.seconds()
        rest = median(own) - sum(seconds.values())
        waits = self._median("rollout")
        if times.plan.generates:
            decoded = [self.activity.decoded(step.began, step.record.t) for step in self.steps]
            seconds["generate"] = median(decoded)
            waits = waits if times.overlaps else seconds["generate"]
        seconds["rest"] = max(0.0, rest - waits)
        peak = 0.0
        if times.device.is_cpu:
            for step in self.steps:
                peak = max(peak, step.record.values.get("memory/process/peak", 0.0))
        return MeasuredSteps(
            seconds,
            times.rates.scores,
            samples=times.samples // sizes_of(times.plan, "actor").data,
            peak=peak or None,
        )

    def planned(self, times: StepTimes) -> dict[str, float]:
        """Seconds by the parts of `Rates`, and of the rewards that are left after the last
        token."""
        found = {"sync": times.sync(), "forward": 0.0, "update": 0.0}
        if times.plan.generates:
            found["generate"] = times.generate()
            found["rewards"] = 0.0 if times.overlaps else times.rewards()
        for phase, engines in self.nodes:
            part = _pass_of(phase)
            for role in engines:
                found[part] += times.engine(role, updates=part == "update")
        return found

    def _median(self, phase: str) -> float:
        return median(step.seconds(phase) for step in self.steps)


def _pass_of(phase: str) -> str:
    return "update" if phase.startswith("train") else "forward"
