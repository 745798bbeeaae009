"""Plans a run before it starts, without torch, Ray, devices or weights: its config as the run would
have it, its pipeline bound by the run's own code, the shapes of its models, and the number of its
rows. Also what it would take with one change."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

from distflow.config import Config, Loaded, RunLimits, fit_to, load_config, with_changes
from distflow.config.compose.fit_defaults_to_data import is_free
from distflow.config.compose.load_config import check_named_files
from distflow.config.derived_settings import CUSTOM, model_of, pipeline_name
from distflow.config.keys.reward import scoring_models
from distflow.config.keys.schema import with_values
from distflow.data.sources import BUILTIN_FOLDER, read_file
from distflow.errors import UserError, blaming
from distflow.graph import BoundPipeline
from distflow.hub_id_or_local_path import is_local_model
from distflow.import_target import placeholders
from distflow.launch.plans.rates_from_run_folder import (
    MeasuredRun,
    given_by,
    longest_scoring,
    measured_run,
)
from distflow.models.model_paths_and_folder_checks import (
    BUILTIN_PREFIX,
    PACKAGE_PREFIX,
    resolve_path,
)
from distflow.planning.allocation_expression import (
    AllocatedPart,
    follow_allocation,
    parse_allocation,
)
from distflow.planning.known_models_and_devices import (
    Device,
    ModelShape,
    device_here,
    find_device,
    find_shape,
)
from distflow.planning.predicted_run import Lengths, PredictedRun, predict
from distflow.planning.search_allocations import (
    AUTO,
    CHECKPOINTING,
    STALENESS,
    STRATEGY,
    Change,
    Choices,
    Search,
    nearest_change,
    search_allocations,
    simulated_steps,
)
from distflow.planning.simulate import SimulatedRun, setup_of, simulate

_ON_MACHINE = 8  # devices
_MANY_ROWS = 10**5  # of a data set whose rows are not counted
_MOST_ROWS_BYTES = 32 * 2**20
_UNLOADED = ("torch", "transformers", "ray")
_SEEDS = 5
_STEPS = 16
_OF_REWARDS = ("reward.timeout_s", "reward.num_workers")
_FORMS = "rollout+1, rollout-1, staleness+1, rewards*2, response/2, or key=value"


@dataclass(frozen=True)
class RunPlanner:
    """preset, overrides: as of `distflow train`. device_name: None for what this machine has.
    num_devices: of the run; None for what the config says. prompt_tokens, response_tokens: mean
    lengths. spread: of responses, see `length_values`. seconds: means of what takes an exponential
    time in a simulation: "reward" of a group, "tool" of a response, "mtbf" between failures of one
    device. measured_in: a run that calibrates the plan, instead of `trainer.plan_from`. runs_code:
    whether it may import Python code that the config names. Properties raise UserError as the run
    does."""

    preset: str
    overrides: Sequence[str]
    device_name: str | None = None
    num_devices: int | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    spread: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured_in: str | None = None
    runs_code: bool = True

    @cached_property
    def measured(self) -> MeasuredRun | None:
        named = self.measured_in or self._as_written.trainer.plan_from
        return measured_run(named) if named else None

    @cached_property
    def search(self) -> Search | None:
        """The result of `trainer.allocation=auto`; None for another value."""
        if not self._searches:
            return None
        loaded = self._loaded
        trainer = self._loaded.config.trainer
        chosen = (
            None
            if is_free(loaded.origins, STRATEGY)
            else loaded.config.actor_rollout_ref.actor.strategy
        )
        config = fit_to(loaded, self._limits).config
        staleness = {config.async_.max_staleness}
        if (
            is_free(loaded.origins, STALENESS)
            and config.actor_rollout_ref.actor.policy_loss == "decoupled"
        ):
            staleness |= {0, 1, 2, 4}  # a loss that corrects for it
        model = config.actor_rollout_ref.model
        may_recompute = (
            is_free(loaded.origins, CHECKPOINTING) and not model.enable_gradient_checkpointing
        )
        number = trainer.nnodes * trainer.n_gpus_per_node
        return search_allocations(
            Choices(config, number, chosen, tuple(sorted(staleness)), may_recompute),
            self.predict,
            self.simulate,
            lambda change: self._changed(change) is not None,
        )

    @property
    def chosen(self) -> list[str]:
        """The overrides that the search adds; empty without one."""
        return _written(self.search.best[0].change) if self.search else []

    @cached_property
    def run(self) -> PredictedRun:
        return self.predict(self.loaded.config)

    @cached_property
    def device(self) -> Device:
        """Of the measured run, if no other is named."""
        if self.measured and self.device_name is None:
            return self.measured.device
        return find_device(self.device_name or device_here())

    @cached_property
    def loaded(self) -> Loaded:
        """The config, fitted to the model and the number of rows."""
        return fit_to(self._load(self.chosen) if self._searches else self._loaded, self._limits)

    @property
    def _searches(self) -> bool:
        return self._as_written.trainer.allocation == AUTO

    @cached_property
    def _as_written(self) -> Config:
        loaded = self._read([*_on_devices(self.num_devices), *self.overrides])
        if self.measured_in is None:  # else its files may be elsewhere
            check_named_files(loaded)
        return loaded.config

    def _read(self, overrides: Sequence[str]) -> Loaded:
        loaded = load_config(self.preset, overrides, complete=False, trust_code=self.runs_code)
        if not self.runs_code:
            with placeholders(*_UNLOADED):
                from distflow.launch.user_code_trust_and_importability import (
                    data_code,
                    pipeline_code,
                )
            if code := [*pipeline_code(loaded.config), *data_code(loaded.config)]:
                named = f"{', '.join(code)}; `distflow plan` without --no-code imports it"
                raise UserError(f"the plan would import Python code: {named}")
        return loaded

    @cached_property
    def _loaded(self) -> Loaded:
        loaded = self._load(["trainer.allocation=null"] if self._searches else [])
        number = self.num_devices
        nodes = loaded.config.trainer.nnodes
        size = loaded.config.trainer.n_gpus_per_node
        if number and nodes * size != number:
            contradicts = f"contradicts trainer.nnodes={nodes} × trainer.n_gpus_per_node={size}"
            raise UserError(f"--devices {number} {contradicts}: remove one of them")
        return loaded

    @cached_property
    def pipeline(self) -> BoundPipeline:
        return bind_unloaded(self._loaded.config)

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        """Of the measured run, if this one has its models, whose folders may be elsewhere."""
        config = self._loaded.config
        known = self.measured
        if (
            known
            and known.shapes.keys() >= self.pipeline.engines
            and _models(config) == _models(known.config)
        ):
            return dict(known.shapes)
        return shapes_of(config, self.pipeline)

    @cached_property
    def _limits(self) -> RunLimits:
        policy = self.shapes.get("actor") or self.shapes.get("rollout")
        return RunLimits(num_rows(self._loaded.config), policy.context if policy else None)

    def predict(self, config: Config) -> PredictedRun:
        """The prediction for this or another config with the same pipeline."""
        given = given_by(self.measured, config, self.pipeline.graph_id, self.device, self._limits)
        if given.lengths is None or (self.prompt_tokens, self.response_tokens, self.spread) != (
            None,
            None,
            None,
        ):
            own = Lengths.of(config, self.prompt_tokens, self.response_tokens, self.spread)
            given = replace(given, lengths=own)
        return predict(config, self.pipeline, self.shapes, self.device, given)

    def simulate(self, run: PredictedRun, steps: int | None = None, seed: int = 0) -> SimulatedRun:
        """The first steps of a predicted run, with the scheduler and the data plan of the run."""
        with placeholders(*_UNLOADED):
            from distflow.launch.data_sets import data_plan
        steps = steps or simulated_steps(run.config)
        config = with_values(run.config, {"trainer.total_training_steps": steps})
        rows = self._limits.rows or _MANY_ROWS
        domains = [n for n, own in run.config.data.domains.items() if own.weight]
        plan = data_plan(
            config, dict.fromkeys(domains, max(1, rows // len(domains))) if domains else {"": rows}
        )
        setup = setup_of(run, plan)
        draws: dict[str, Any] = {
            name: partial(Random.expovariate, lambd=1 / mean)
            for name, mean in self.seconds.items()
            if mean
        }
        if scores := run.times.rates.scores:
            draws = {"reward": lambda random: random.choice(scores)} | draws
        if draw := draws.get("reward"):
            most = longest_scoring(run.config)
            draws["reward"] = lambda random: min(draw(random), most)
        drawn: Any = {name: draw for name, draw in draws.items() if name != "mtbf"}
        costs = replace(setup.costs, **drawn)
        setup = replace(setup, costs=costs, reward_workers=run.config.reward.num_workers, seed=seed)
        if mtbf := self.seconds.get("mtbf"):
            own = [rank for rank in run.plan.ranks if setup.shared or rank.training_nodes]
            of_engine = (
                mtbf * setup.engines / (len(run.plan.ranks) - len(own))
                if not setup.shared
                else None
            )
            setup = replace(setup, engine_mtbf=of_engine, training_mtbf=mtbf / len(own))
        return simulate(setup)

    def change_that_fits(self, run: PredictedRun) -> list[str] | None:
        """The overrides of the nearest change with which the run fits, checked as the run checks
        its config."""
        change = nearest_change(run, self.predict, self._changed)
        return None if change is None else _written(change)

    def _changed(self, change: Change) -> Config | None:
        try:
            return fit_to(self._load(_written(change)), self._limits).config
        except UserError:
            return None

    def _load(self, more: Sequence[str]) -> Loaded:
        return with_changes(self._composed(more), self._without_reference)

    @cached_property
    def _without_reference(self) -> Sequence[tuple[str, object, str]]:
        """The KL loss switched off, as the run does for a custom pipeline without a reference."""
        loaded = self._composed(["trainer.allocation=null"] if self._searches else [])
        if pipeline_name(loaded.config) != CUSTOM:
            return []
        with placeholders(*_UNLOADED):
            from distflow.launch.select_pipeline import without_reference
        return without_reference(loaded, bind_unloaded)

    def _composed(self, more: Sequence[str]) -> Loaded:
        overrides = [*_on_devices(self.num_devices), *self.overrides, *more]
        loaded = follow_allocation(self._read(overrides))
        if loaded.config.actor_rollout_ref.model.dtype == "auto":
            dtype = "float32" if self.device.is_cpu else "bfloat16"
            loaded = with_changes(
                loaded, [("actor_rollout_ref.model.dtype", dtype, f"on a {self.device.name}")]
            )
        return loaded


def _models(config: Config) -> tuple[object, ...]:
    return (
        config.actor_rollout_ref.model.path,
        config.critic.model.path,
        scoring_models(config.reward_model),
    )


def searched_allocation(
    preset: str, overrides: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """The overrides that a run adds for `trainer.allocation=auto`."""
    planner = RunPlanner(preset, overrides)
    say(f"trainer.allocation={AUTO}: {planner.search.why() if planner.search else ''}")
    return planner.chosen


def _written(change: Change) -> list[str]:
    """As overrides; texts in quotes, since an allocation has signs that the grammar reserves."""
    shown = (
        (key, value if isinstance(value, str) else json.dumps(value).replace('"', ""))
        for key, value in change
    )
    return [
        f"{key}='{value}'" if key == "trainer.allocation" else f"{key}={value}"
        for key, value in shown
    ]


def _on_devices(number: int | None) -> list[str]:
    """Overrides for so many devices."""
    if number is None:
        return []
    size = min(number, _ON_MACHINE)
    if number % size:
        raise UserError(
            f"--devices {number}: above {_ON_MACHINE} it must be a multiple of {_ON_MACHINE}, a "
            "machine's"
        )
    launcher = ["trainer.launcher=ray"] if number > 1 else []
    return [f"trainer.nnodes={number // size}", f"trainer.n_gpus_per_node={size}", *launcher]


def bind_unloaded(config: Config) -> BoundPipeline:
    """The pipeline of a config, bound by the code that binds it for a run, without loading torch;
    if it names Python code of the user, with torch. Its functions must not be called."""
    with placeholders(*_UNLOADED):
        from distflow.launch.select_pipeline import bind
        from distflow.launch.user_code_trust_and_importability import pipeline_code

        if not pipeline_code(config):
            return bind(config)
    from distflow.launch.select_pipeline import bind as bind_loaded
    from distflow.launch.select_pipeline import import_user_modules

    import_user_modules(config)
    return bind_loaded(config)


def shapes_of(config: Config, pipeline: BoundPipeline) -> dict[str, ModelShape]:
    """The shape of each role's model; raises UserError with the key of a model without a config."""
    if not pipeline.engines:
        raise UserError(
            f"no node of the pipeline '{pipeline.graph_id}' uses a model: there is nothing to plan"
        )
    found = {}
    for role in sorted(pipeline.engines):
        key, path = model_of(config, role)
        if path is None:
            raise UserError(f"{key} is not set: a plan needs a model, e.g. {key}=qwen2.5-7b")
        with blaming(key):
            named = (
                path.startswith((BUILTIN_PREFIX, PACKAGE_PREFIX))
                or Path(path).expanduser().is_dir()
            )
            found[role] = find_shape(
                path, Path(resolve_path(path)) if named or is_local_model(path) else None
            )
    return found


def num_rows(config: Config) -> int | None:
    """Rows to train on, before any are left out; None if counting them takes long."""
    total = 0
    domains = [domain for domain in config.data.domains.values() if domain.weight]
    sources: list[Any] = [config.data, *domains]
    for source in sources:
        rows = 0
        most = source.train_max_samples
        for name in source.train_files:
            builtin = (
                BUILTIN_FOLDER.glob(f"{name.removeprefix('builtin:')}.*")
                if name.startswith("builtin:")
                else ()
            )
            file = next(iter(sorted(builtin)), Path(name).expanduser())
            if not file.is_file() or file.stat().st_size > _MOST_ROWS_BYTES:
                return None
            rows += sum(1 for _ in read_file(file, "data.train_files"))
        total += rows if most < 0 else min(rows, most)
    return total or None


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step. low, high: over the seeds of the simulation, and between the quartiles of
    the steps that the measured run had. peak: bytes of the fullest device. why: what does not work
    with the change, or empty."""

    change: str
    keys: tuple[str, ...]
    seconds: float
    low: float
    high: float
    peak: float
    why: str = ""

    def line(self, before: "Outcome") -> str:
        if self.why:
            return f"{self.change}: {self.why}"
        took = f"a step of {self.seconds:.3g} s ({self.low:.3g} to {self.high:.3g})"
        gain = f", {self.seconds / before.seconds - 1:+.0%}" if self is not before else ""
        return f"{self.change}: {took}{gain}, at most {self.peak / 1e9:.2f} GB on a device"


def outcomes(planner: RunPlanner, changes: Sequence[str]) -> list[Outcome]:
    """The run as it is, then with each change. Raises UserError for one that is none."""
    keys = [(change, keys_of(change, planner.loaded.config)) for change in changes]
    found = [_outcome(planner, "as it is", ())]
    if not (planner.run.times.rates.scores or planner.seconds.get("reward")):
        for change in (
            change for change, own in keys if any(each.startswith(_OF_REWARDS) for each in own)
        ):
            raise UserError(
                f"--what-if {change}: this plan takes no time for rewards, so the change would do "
                "nothing: calibrate "
                "it by a run (--from RUN), or set --reward-seconds"
            )
    for change, own in keys:
        try:
            found.append(
                _outcome(replace(planner, overrides=(*planner.overrides, *own)), change, own)
            )
        except UserError as error:
            why = f"it cannot run: {' '.join(str(error).split())}"
            found.append(replace(found[0], change=change, keys=own, why=why))
    return found


def keys_of(change: str, config: Config) -> tuple[str, ...]:
    """The overrides that a change stands for."""
    match = re.fullmatch(r"(rollout[+-]|staleness\+|rewards\*|response/)([1-9]\d{0,3})", change)
    if match is None:
        if re.fullmatch(r"[+~]*\w+(\.\w+)+=.*", change):
            return (change,)
        raise UserError(f"--what-if {change}: write {_FORMS}")
    what = match[1]
    number = int(match[2])
    if what == "staleness+":
        return (f"async.max_staleness={config.async_.max_staleness + number}",)
    if what == "rewards*":
        return (f"reward.num_workers={config.reward.num_workers * number}",)
    if what == "response/":
        return (f"data.max_response_length={max(1, config.data.max_response_length // number)}",)
    return (
        f"trainer.allocation='{_moved(change, config, -number if what == 'rollout-' else number)}'",
    )


def _moved(change: str, config: Config, number: int) -> str:
    """The allocation after so many devices moved from training to generation."""
    text = config.trainer.allocation
    groups = parse_allocation(text).groups if text else ()
    apart = [group for group in groups if [part.role for part in group] == ["rollout"]]
    trains = [group for group in groups if any(part.role == "actor" for part in group)]
    if not apart or not trains:
        raise UserError(
            f"--what-if {change}: generation and training have the same devices, and none can be "
            "moved"
        )
    more = {apart[0]: number, trains[0]: -number}
    return "+".join(
        "|".join(_resized(part, more.get(group, 0), change) for part in group) for group in groups
    )


def _resized(part: AllocatedPart, more: int, change: str) -> str:
    sizes = part.sizes
    others = sizes.num_devices // sizes.data
    devices = sizes.num_devices + more
    if devices < 1 or devices % others:
        kept = (
            f"{part.role} would have {devices} devices, and each copy of its model takes {others}"
        )
        raise UserError(f"--what-if {change}: the {kept}")
    axes = (
        ("d", devices // others),
        ("t", sizes.tensor),
        ("p", sizes.pipeline),
        ("c", sizes.context),
    )
    letters = "".join(f"{letter}{size}" for letter, size in axes if size > 1 or letter == "d")
    return f"{part.engine}[{part.role}]:{letters}"


def _outcome(planner: RunPlanner, change: str, keys: tuple[str, ...]) -> Outcome:
    run: PredictedRun = planner.run
    low, high = run.times.rates.spread
    steps = [run.step_seconds]
    if run.plan.generates:
        steps = [planner.simulate(run, _STEPS, seed).step_seconds for seed in range(_SEEDS)]
    seconds = sorted(steps)[len(steps) // 2]
    peak = run.fullest.peak
    why = "" if run.fits else f"it does not fit: {run.excess()}"
    return Outcome(change, keys, seconds, min(steps) * low, max(steps) * high, peak, why)
