"""Plans a run before it starts, without Ray, devices or weights: its config as the run would
have it, its pipeline bound by the run's own code, the shapes of its models, and the number of its
rows."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from distflow.config import Config, Loaded, RunLimits, fit_to, load_config, with_changes
from distflow.config.compose.fit_defaults_to_data import is_free
from distflow.config.compose.load_config import check_named_files
from distflow.config.derived_settings import CUSTOM, frozen_models, pipeline_name
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.launch.plans.measured_run import MeasuredRun, measured_run
from distflow.launch.plans.unloaded_run import (
    bind_named,
    num_rows,
    shapes_of,
)
from distflow.launch.select_pipeline import without_reference
from distflow.launch.user_code import data_code, pipeline_code
from distflow.planning.allocation_expression import follow_allocation
from distflow.planning.devices import Device, device_here, find_device
from distflow.planning.lengths import assumed_lengths
from distflow.planning.measured_rates import Rates
from distflow.planning.model_shapes import ModelShape
from distflow.planning.predicted_run import PredictedRun, RunFacts, predict
from distflow.planning.search_allocations import (
    AUTO,
    CHECKPOINTING,
    STALENESS,
    STRATEGY,
    Change,
    Choices,
    Search,
    search_allocations,
)

_ON_MACHINE = 8
"""Devices of one machine."""


@dataclass(frozen=True)
class RunPlanner:
    """Properties raise UserError as the run does."""

    preset: str
    """As of `distflow train`."""
    overrides: Sequence[str]
    """As of `distflow train`."""
    device_name: str | None = None
    """None for what this machine has."""
    num_devices: int | None = None
    """Of the run; None for what the config says."""
    prompt_tokens: float | None = None
    """The mean of prompts."""
    response_tokens: float | None = None
    """The mean of responses."""
    reward_seconds: float = 0.0
    """The mean time of a group's scoring, 0 if it is unknown."""
    measured_in: str | None = None
    """A run that calibrates the plan, instead of `trainer.plan_from`."""
    runs_code: bool = True
    """Whether it may import Python code that the config names."""

    @cached_property
    def measured(self) -> MeasuredRun | None:
        named = self.measured_in or self._as_written.trainer.plan_from
        return measured_run(named) if named else None

    @cached_property
    def run(self) -> PredictedRun:
        return self.predict(self.loaded.config)

    @cached_property
    def loaded(self) -> Loaded:
        """The config, fitted to the model and the number of rows."""
        return fit_to(self._load(self.chosen) if self._searches else self._loaded, self.limits)

    @cached_property
    def device(self) -> Device:
        """Of the measured run, if no other is named."""
        if self.measured and self.device_name is None:
            return self.measured.device
        return find_device(self.device_name or device_here())

    @cached_property
    def pipeline(self) -> BoundPipeline:
        return bind_named(self._loaded.config)

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        """Of the measured run, if this one has its models, whose folders may be elsewhere."""
        config = self._loaded.config
        known = self.measured
        has_roles = known is not None and known.shapes.keys() >= self.pipeline.engines
        if known is not None and has_roles and _models(config) == _models(known.config):
            return dict(known.shapes)
        return shapes_of(config, self.pipeline)

    @cached_property
    def limits(self) -> RunLimits:
        policy = self.shapes.get("actor") or self.shapes.get("rollout")
        return RunLimits(num_rows(self._loaded.config), policy.context if policy else None)

    def predict(self, config: Config) -> PredictedRun:
        """The prediction for this or another config with the same pipeline."""
        means = (self.prompt_tokens, self.response_tokens)
        if self.measured and means == (None, None):
            lengths = self.measured.lengths(config)
        else:
            lengths = assumed_lengths(config, *means)

        known = RunFacts(self.limits, lengths, self._rates)
        return predict(config, self.pipeline, self.shapes, self.device, known)

    @cached_property
    def _rates(self) -> Rates:
        rates = Rates()
        if self.measured:
            rates = self.measured.rates(self.pipeline, self.device)
        if self.reward_seconds:
            rates = replace(rates, score=self.reward_seconds)
        return rates

    # A searched allocation, and changes

    @property
    def _searches(self) -> bool:
        return self._as_written.trainer.allocation == AUTO

    @cached_property
    def search(self) -> Search | None:
        """The result of `trainer.allocation=auto`; None for another value."""
        if not self._searches:
            return None

        loaded = self._loaded
        config = fit_to(loaded, self.limits).config
        settings = config.actor_rollout_ref
        staleness = {config.async_.max_staleness}

        # A loss that corrects for staleness.
        if is_free(loaded.origins, STALENESS) and settings.actor.policy_loss == "decoupled":
            staleness |= {0, 1, 2, 4}
        recomputes = settings.model.enable_gradient_checkpointing
        choices = Choices(
            config,
            config.trainer.nnodes * config.trainer.n_gpus_per_node,
            None if is_free(loaded.origins, STRATEGY) else settings.actor.strategy,
            tuple(sorted(staleness)),
            may_recompute=is_free(loaded.origins, CHECKPOINTING) and not recomputes,
        )

        return search_allocations(
            choices, self.predict, lambda change: self._changed(change) is not None
        )

    @property
    def chosen(self) -> list[str]:
        """The overrides that the search adds; empty without one."""
        if self.search:
            return as_overrides(self.search.best[0].change)
        return []

    def _changed(self, change: Change) -> Config | None:
        try:
            return fit_to(self._load(as_overrides(change)), self.limits).config
        except UserError:
            return None

    # The config

    @cached_property
    def _as_written(self) -> Config:
        loaded = self._read([])
        if self.measured_in is None:  # else its files may be elsewhere
            check_named_files(loaded)
        return loaded.config

    @cached_property
    def _loaded(self) -> Loaded:
        """Without the allocation that a search chooses."""
        loaded = self._load(self._unsearched)
        nodes = loaded.config.trainer.nnodes

        size = loaded.config.trainer.n_gpus_per_node
        if self.num_devices and nodes * size != self.num_devices:
            raise UserError(
                f"--devices {self.num_devices} contradicts trainer.nnodes={nodes} × "
                f"trainer.n_gpus_per_node={size}: remove one of them"
            )

        return loaded

    @property
    def _unsearched(self) -> list[str]:
        if self._searches:
            return ["trainer.allocation=null"]
        return []

    def _load(self, more: Sequence[str]) -> Loaded:
        return with_changes(self._composed(more), self._without_reference)

    @cached_property
    def _without_reference(self) -> Sequence[tuple[str, object, str]]:
        """The KL loss switched off, as the run does for a custom pipeline without a reference."""
        loaded = self._composed(self._unsearched)
        if pipeline_name(loaded.config) != CUSTOM:
            return []
        return without_reference(loaded, bind_named)

    def _composed(self, more: Sequence[str]) -> Loaded:
        loaded = follow_allocation(self._read(more))
        if loaded.config.actor_rollout_ref.model.dtype != "auto":
            return loaded
        dtype = "float32" if self.device.is_cpu else "bfloat16"
        reason = f"on a {self.device.name}"
        return with_changes(loaded, [("actor_rollout_ref.model.dtype", dtype, reason)])

    def _read(self, more: Sequence[str]) -> Loaded:
        overrides = [*_on_devices(self.num_devices), *self.overrides, *more]
        loaded = load_config(self.preset, overrides, complete=False, trust_code=self.runs_code)
        code = [*pipeline_code(loaded.config), *data_code(loaded.config)]
        if code and not self.runs_code:
            named = f"{', '.join(code)}; `distflow plan` without --no-code imports it"
            raise UserError(f"the plan would import Python code: {named}")

        return loaded


def searched_allocation(
    preset: str, overrides: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """The overrides that a run adds for `trainer.allocation=auto`."""
    planner = RunPlanner(preset, overrides)
    say(f"trainer.allocation={AUTO}: {planner.search.why() if planner.search else ''}")
    return planner.chosen


def as_overrides(change: Change) -> list[str]:
    """Texts are in quotes, since an allocation has signs that the grammar reserves."""
    found = []
    for key, value in change:
        if key == "trainer.allocation":
            value = f"'{value}'"
        elif not isinstance(value, str):
            value = json.dumps(value).replace('"', "")
        found.append(f"{key}={value}")

    return found


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


def _models(config: Config) -> tuple[object, ...]:
    return (
        config.actor_rollout_ref.model.path,
        config.critic.model.path,
        frozen_models(config),
    )
