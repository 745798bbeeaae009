"""Plans a run before it starts, without torch, Ray, devices or weights: its config as the run would have it, its
pipeline bound by the run's own code, the shapes of its models, and the number of its rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

from distflow.config import Config, Loaded, RunLimits, fit_to, load_config, with_changes
from distflow.config.compose.fit_defaults import is_free
from distflow.config.derived_settings import CUSTOM, pipeline_name, train_files
from distflow.config.keys.reward import scoring_models
from distflow.config.keys.schema import with_values
from distflow.data.sources import BUILTIN_FOLDER, read_file
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.hugging_face_hub import is_local_model
from distflow.import_target import placeholders
from distflow.models.paths import BUILTIN_PREFIX, PACKAGE_PREFIX, resolve_path
from distflow.planning.allocation_expression import follow_allocation
from distflow.planning.known_models_and_devices import Device, ModelShape, device_here, find_device, find_shape
from distflow.planning.predicted_run import Lengths, PredictedRun, predict
from distflow.planning.search_allocations import (
    AUTO,
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


@dataclass(frozen=True)
class RunPlanner:
    """preset, overrides: as of `distflow train`. device_name: None for what this machine has. num_devices: of the run;
    None for what the config says. prompt_tokens, response_tokens: mean lengths. spread: of responses, see
    `length_values`. seconds: means of what takes an exponential time in a simulation: "reward" of a group, "tool" of a
    response, "mtbf" between failures of one device. Properties raise UserError as the run does."""

    preset: str
    overrides: Sequence[str]
    device_name: str | None = None
    num_devices: int | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    spread: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def search(self) -> Search | None:
        """The result of `trainer.allocation=auto`; None for another value."""
        if not self._searches:
            return None
        loaded, trainer = self._loaded, self._loaded.config.trainer
        chosen = None if is_free(loaded.origins, STRATEGY) else loaded.config.actor_rollout_ref.actor.strategy
        config = fit_to(loaded, self._limits).config
        staleness = {config.async_.max_staleness}
        if is_free(loaded.origins, STALENESS) and config.actor_rollout_ref.actor.policy_loss == "decoupled":
            staleness |= {0, 1, 2, 4}  # a loss that corrects for it
        return search_allocations(
            Choices(config, trainer.nnodes * trainer.n_gpus_per_node, chosen, tuple(sorted(staleness))),
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
        return find_device(self.device_name or device_here())

    @cached_property
    def loaded(self) -> Loaded:
        """The config, fitted to the model and the number of rows."""
        return fit_to(self._load(self.chosen) if self._searches else self._loaded, self._limits)

    @cached_property
    def _searches(self) -> bool:
        overrides = [*_on_devices(self.num_devices), *self.overrides]
        return load_config(self.preset, overrides, complete=False).config.trainer.allocation == AUTO

    @cached_property
    def _loaded(self) -> Loaded:
        loaded, number = self._load(["trainer.allocation=null"] if self._searches else []), self.num_devices
        nodes, size = loaded.config.trainer.nnodes, loaded.config.trainer.n_gpus_per_node
        if number and nodes * size != number:
            contradicts = f"contradicts trainer.nnodes={nodes} × trainer.n_gpus_per_node={size}"
            raise UserError(f"--devices {number} {contradicts}: remove one of them")
        return loaded

    @cached_property
    def pipeline(self) -> BoundPipeline:
        return bind_unloaded(self._loaded.config)

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        return shapes_of(self._loaded.config, self.pipeline)

    @cached_property
    def _limits(self) -> RunLimits:
        policy = self.shapes.get("actor") or self.shapes.get("rollout")
        return RunLimits(num_rows(self._loaded.config), policy.context if policy else None)

    def predict(self, config: Config) -> PredictedRun:
        """The prediction for this or another config with the same pipeline."""
        lengths = Lengths.of(config, self.prompt_tokens, self.response_tokens, self.spread)
        return predict(config, self.pipeline, self.shapes, self.device, self._limits, lengths)

    def simulate(self, run: PredictedRun, steps: int | None = None) -> SimulatedRun:
        """The first steps of a predicted run, with the scheduler and the data plan of the run."""
        with placeholders(*_UNLOADED):
            from distflow.launch.data_sets import data_plan
        steps = steps or simulated_steps(run.config)
        config = with_values(run.config, {"trainer.total_training_steps": steps})
        rows, domains = self._limits.rows or _MANY_ROWS, run.config.data.domains
        plan = data_plan(config, dict.fromkeys(domains, max(1, rows // len(domains))) if domains else {"": rows})
        setup = setup_of(run, plan)
        draws = {name: partial(Random.expovariate, lambd=1 / mean) for name, mean in self.seconds.items() if mean}
        drawn: Any = {name: draw for name, draw in draws.items() if name != "mtbf"}
        costs = replace(setup.costs, **drawn)
        setup = replace(setup, costs=costs, reward_workers=run.config.reward.num_workers)
        if mtbf := self.seconds.get("mtbf"):
            own = [rank for rank in run.plan.ranks if setup.shared or rank.training_nodes]
            of_engine = mtbf * setup.engines / (len(run.plan.ranks) - len(own)) if not setup.shared else None
            setup = replace(setup, engine_mtbf=of_engine, training_mtbf=mtbf / len(own))
        return simulate(setup)

    def change_that_fits(self, run: PredictedRun) -> list[str] | None:
        """The overrides of the nearest change with which the run fits, checked as the run checks its config."""
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
        loaded = follow_allocation(load_config(self.preset, overrides, complete=False))
        if loaded.config.actor_rollout_ref.model.dtype == "auto":
            dtype = "float32" if self.device.is_cpu else "bfloat16"
            loaded = with_changes(loaded, [("actor_rollout_ref.model.dtype", dtype, f"on a {self.device.name}")])
        return loaded


def searched_allocation(preset: str, overrides: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """The overrides that a run adds for `trainer.allocation=auto`."""
    planner = RunPlanner(preset, overrides)
    say(f"trainer.allocation={AUTO}: {planner.search.why() if planner.search else ''}")
    return planner.chosen


def _written(change: Change) -> list[str]:
    """As overrides; texts in quotes, since an allocation has signs that the grammar reserves."""
    shown = ((key, str(value).lower() if isinstance(value, bool) else value) for key, value in change)
    return [f"{key}='{value}'" if key == "trainer.allocation" else f"{key}={value}" for key, value in shown]


def _on_devices(number: int | None) -> list[str]:
    """Overrides for so many devices."""
    if number is None:
        return []
    size = min(number, _ON_MACHINE)
    if number % size:
        raise UserError(f"--devices {number}: above {_ON_MACHINE} it must be a multiple of {_ON_MACHINE}, a machine's")
    launcher = ["trainer.launcher=ray"] if number > 1 else []
    return [f"trainer.nnodes={number // size}", f"trainer.n_gpus_per_node={size}", *launcher]


def bind_unloaded(config: Config) -> BoundPipeline:
    """The pipeline of a config, bound by the code that binds it for a run, without loading torch; if it names Python
    code of the user, with torch. Its functions must not be called."""
    with placeholders(*_UNLOADED):
        from distflow.launch.select_pipeline import bind
        from distflow.launch.user_code_trust import pipeline_code

        if not pipeline_code(config):
            return bind(config)
    from distflow.launch.select_pipeline import bind as bind_loaded
    from distflow.launch.select_pipeline import import_user_modules

    import_user_modules(config)
    return bind_loaded(config)


def shapes_of(config: Config, pipeline: BoundPipeline) -> dict[str, ModelShape]:
    """The shape of each role's model; raises UserError with the key of a model without a config."""
    policy = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    paths = dict.fromkeys(pipeline.engines, policy)
    if config.critic.model.path:
        paths["critic"] = "critic.model.path", config.critic.model.path
    for name, model in scoring_models(config.reward_model).items():
        paths[name] = f"reward_model.models.{name}.path", model.path
    found = {}
    for role in sorted(pipeline.engines):
        key, path = paths[role]
        if path is None:
            raise UserError(f"{key} is not set: a plan needs a model, e.g. {key}=qwen2.5-7b")
        try:
            named = path.startswith((BUILTIN_PREFIX, PACKAGE_PREFIX)) or Path(path).expanduser().is_dir()
            found[role] = find_shape(path, Path(resolve_path(path)) if named or is_local_model(path) else None)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
    return found


def num_rows(config: Config) -> int | None:
    """Rows to train on, before any are left out; None if counting them takes long."""
    total = 0
    for name in (file for files in train_files(config).values() for file in files):
        builtin = (
            sorted(BUILTIN_FOLDER.glob(f"{name.removeprefix('builtin:')}.*")) if name.startswith("builtin:") else []
        )
        file = builtin[0] if builtin else Path(name).expanduser()
        if not file.is_file() or file.stat().st_size > _MOST_ROWS_BYTES:
            return None
        total += sum(1 for _ in read_file(file, "data.train_files"))
    return total or None
