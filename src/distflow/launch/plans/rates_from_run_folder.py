"""Calibrates plans by a run: the rates that the run's folder shows, read without torch and without
running code that its config names."""

import statistics
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
from distflow.observe.report.doctor_run_rules import UNPLANNED
from distflow.observe.report.graph_and_timelines import RunActivity, read_activity
from distflow.observe.run_reader import MetricsRecord
from distflow.planning.known_models_and_devices import Device, ModelShape
from distflow.planning.measured_rates import MeasuredSteps, Rates, fit, lengths_under, quantiles
from distflow.planning.memory import PROCESS_BYTES, sizes_of, worker_memory
from distflow.planning.plan_of_ranks_and_layouts import Layout, Plan, RankPlan, Sizes
from distflow.planning.predicted_run import (
    Lengths,
    PredictedRun,
    RunFacts,
    StepTimes,
    share_of_device,
)

_MOST_STEPS = 100
_MOST_FILES = 10
_FEWEST = 2
_QUANTILES = {"scores": 50, "lengths": 1000}


@dataclass(frozen=True)
class MeasuredRun:
    """What a run shows. pipeline: its name. device, shapes: of its plan. prompt: mean tokens.
    responses: lengths, with `limit` as the most; empty if it generated nothing. step_seconds: the
    median, without validation and checkpoints."""

    config: Config
    pipeline: str
    device: Device
    shapes: Mapping[str, ModelShape]
    rates: Rates
    prompt: float
    responses: tuple[float, ...]
    step_seconds: float

    def lengths(self, config: Config) -> Lengths:
        """As a run of this config would have them."""
        if not self.responses:
            return Lengths.of(config)
        limit = config.data.max_response_length
        values = lengths_under(limit, self.responses, self.config.data.max_response_length)
        return Lengths(
            min(self.prompt, config.data.max_prompt_length), fmean(values), limit, values
        )


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
            "prediction "
            "(it is older than these, or a plan does not know its model or device)"
        )
    config = config_of_run(values)
    try:
        return _measured_run(folder, config, plan_json)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"{folder} cannot calibrate a plan: its plan.json is damaged: {error!r}"
        ) from error


def _measured_run(folder: Path, config: Config, plan_json: Mapping[str, Any]) -> MeasuredRun:
    device = Device(**plan_json["predicted"]["device"])
    shapes = {role: ModelShape(**shape) for role, shape in plan_json["predicted"]["shapes"].items()}
    plan = _plan_of(plan_json)
    nodes = _engine_nodes(plan_json)
    records = run_reader.read_metrics(folder)
    activity = read_activity(folder)
    steps = _steady(records, activity, plan.generates, folder)
    prompt, responses = _lengths(folder, [record.step for record, _ in steps])
    timed = _Timed(config, nodes, steps, activity)
    found = MeasuredRun(
        config, plan.pipeline, device, shapes, Rates(), prompt, responses, timed.step
    )
    own = share_of_device(config, plan, device)
    libraries = PROCESS_BYTES["cpu" if device.is_cpu else "gpu"]
    peak = max(worker.peak for worker in worker_memory(plan, config, shapes, own))
    times = StepTimes(config, plan, shapes, own, found.lengths(config), Rates(scores=timed.scores))
    rates = fit(
        timed.measured(times, device.is_cpu), _planned(times, nodes), peak, libraries, str(folder)
    )
    return replace(found, rates=rates)


def given_by(
    measured: MeasuredRun | None, config: Config, pipeline: str, device: Device, limits: RunLimits
) -> RunFacts:
    """What is known of a run. Raises UserError if the measured run had another pipeline or
    device."""
    if measured is None:
        return RunFacts(limits)
    pairs = ("pipeline", measured.pipeline, pipeline), ("device", measured.device.name, device.name)
    for what, theirs, ours in pairs:
        if theirs != ours:
            run = measured.rates.source
            raise UserError(
                f"{run} cannot calibrate this plan: its {what} is '{theirs}', and this run's is "
                f"'{ours}'"
            )
    most = longest_scoring(config)
    rates = replace(
        measured.rates, scores=tuple(min(seconds, most) for seconds in measured.rates.scores)
    )
    return RunFacts(limits, measured.lengths(config), rates)


def longest_scoring(config: Config) -> float:
    """Seconds after which all calls for a group have ended, by their timeout."""
    return config.reward.timeout_s * ceil(
        config.actor_rollout_ref.rollout.n / config.reward.num_workers
    )


def _plan_of(plan_json: Mapping[str, Any]) -> Plan:
    """The placement alone."""
    names = ("rollout_nodes", "training_nodes", "engines", "services", "rollout_group")
    ranks = [
        RankPlan(**{**rank, **{name: tuple(rank[name]) for name in names}})
        for rank in plan_json["ranks"]
    ]
    layouts = [
        Layout(
            each["role"],
            each["engine"],
            tuple(each["ranks"]),
            Sizes(**each["sizes"]),
            each["shard"],
        )
        for each in plan_json["layouts"]
    ]
    return Plan(str(plan_json["pipeline"]), tuple(ranks), (), tuple(layouts))


def _engine_nodes(plan_json: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """The phase and the engines of each node of the training loop that has some."""
    nodes = (node for node in plan_json["nodes"] if node["plane"] == "training" and node["engines"])
    return [(str(node["phase"]), tuple(node["engines"])) for node in nodes]


def _planned(times: StepTimes, nodes: Sequence[tuple[str, tuple[str, ...]]]) -> dict[str, float]:
    """Seconds by the parts of `Rates`."""
    found = {"sync": times.sync(), "forward": 0.0, "update": 0.0}
    if times.plan.generates:
        found |= {
            "generate": times.generate(),
            "rewards": 0.0 if times.overlaps else times.rewards(),
        }
    for phase, engines in nodes:
        updates = phase.startswith("train")
        found["update" if updates else "forward"] += sum(
            times.engine(role, updates) for role in engines
        )
    return found


def _steady(
    records: Sequence[MetricsRecord], activity: RunActivity, generates: bool, folder: Path
) -> list[tuple[MetricsRecord, float]]:
    """The last steps whose spans are there, without the first quarter of all, each with when it
    began."""
    trained = [
        record for record in records if record.kind == "train" and "timing_s/step" in record.values
    ]
    first = max(1, len(trained) // 4)
    steps = [
        (after, before.t)
        for before, after in pairwise(trained[first - 1 :])
        if after.restart == before.restart
    ]
    steps = [
        (each, began) for each, began in steps if not generates or activity.decoded(began, each.t)
    ][-_MOST_STEPS:]
    if len(steps) < _FEWEST:
        raise UserError(
            f"{folder} has {count_of(len(trained), 'step')}, of which {len(steps)} can be used: a "
            "calibration needs "
            f"{_FEWEST} behind the first quarter, with their spans"
        )
    return steps


def _lengths(folder: Path, steps: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """Mean tokens of prompts, and the lengths of responses."""
    timeline = run_reader.read_timeline(folder)
    rows = [
        row
        for step in steps[-_MOST_FILES:]
        for row in run_reader.read_samples(folder, step, timeline=timeline)
    ]
    prompts, responses = (
        [
            float(value)
            for row in rows
            if isinstance(value := row.get(f"{name}_length"), int) and value > 0
        ]
        for name in ("prompt", "response")
    )
    return fmean(prompts) if prompts else 1.0, quantiles(responses, _QUANTILES["lengths"])


@dataclass(frozen=True)
class _Timed:
    """The counted steps of a run. nodes: see `_engine_nodes`."""

    config: Config
    nodes: Sequence[tuple[str, tuple[str, ...]]]
    steps: Sequence[tuple[MetricsRecord, float]]
    activity: RunActivity

    @property
    def step(self) -> float:
        return median(self._steps())

    @property
    def scores(self) -> tuple[float, ...]:
        """Waits of groups for their scores, as long as one scoring takes: a group waits for others
        too if the workers are busy."""
        begin = self.steps[0][1]
        end = self.steps[-1][0].t
        spans = [
            span for part in self.activity.spans.values() for span in part if span.what == "scores"
        ]
        waits = [span.end - span.start for span in spans if begin <= span.start and span.end <= end]
        if not waits:
            return ()
        busy = self.activity.scored(begin, end)
        workers = self.config.reward.num_workers
        alone = min(1.0, busy * workers / sum(waits))
        return quantiles([wait * alone for wait in waits], _QUANTILES["scores"])

    def measured(self, times: StepTimes, on_cpu: bool) -> MeasuredSteps:
        seconds = {"sync": self._median("update_weights"), "forward": 0.0, "update": 0.0}
        for phase in dict.fromkeys(phase for phase, _ in self.nodes):
            seconds["update" if phase.startswith("train") else "forward"] += self._median(phase)
        waits = self._median("rollout")
        if times.plan.generates:
            seconds["generate"] = median(
                self.activity.decoded(began, record.t) for record, began in self.steps
            )
            waits = waits if times.overlaps else seconds["generate"]
        rest = self.step - sum(seconds[name] for name in ("sync", "forward", "update")) - waits
        low, _, high = (
            each / self.step
            for each in statistics.quantiles(self._steps(), n=4, method="inclusive")
        )
        peaks = (
            [record.values.get("memory/process/peak", 0.0) for record, _ in self.steps]
            if on_cpu
            else [0.0]
        )
        samples = times.samples // sizes_of(times.plan, "actor").data
        return MeasuredSteps(
            {**seconds, "rest": max(0.0, rest)},
            self.scores,
            samples,
            (low, high),
            max(peaks) or None,
        )

    def _steps(self) -> list[float]:
        return [
            record.values["timing_s/step"]
            - sum(record.values.get(f"timing_s/{name}", 0.0) for name in UNPLANNED)
            for record, _ in self.steps
        ]

    def _median(self, phase: str) -> float:
        return median(record.values.get(f"timing_s/{phase}", 0.0) for record, _ in self.steps)
