"""Several runs side by side, before any is started: each is checked, and the scheduler divides the devices over all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distflow.config import Config, Loaded, flatten, load_config, with_changes
from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
from distflow.config.derived_settings import with_own_policies
from distflow.errors import UserError
from distflow.launch.configured_models import model_sizes
from distflow.launch.device_and_threads import follow_machines
from distflow.launch.fit_config_to_files import follow_pipeline, read_config
from distflow.launch.select_pipeline import bind
from distflow.launch.spec_settings import spec_settings
from distflow.planning.independent_parts import Part, pipeline_parts
from distflow.planning.multi_device import share_devices
from distflow.planning.plan import Plan
from distflow.runtime.spec import WorkerNeeds

_SHARED = (
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.worker_cpus", "trainer.worker_memory_mb"),
    *("trainer.worker_roles", "trainer.device"),
    *("dag.apportion_strategy", "dag.consider_node_cohesion", "dag.consider_node_load"),
)


@dataclass(frozen=True)
class PlannedRun:
    """A run that may start. words: its preset and overrides, with its devices."""

    name: str
    words: tuple[str, ...]
    plan: Plan
    needs: WorkerNeeds


def plan_runs(commands: Mapping[str, Sequence[str]], say: Callable[[str], None]) -> list[PlannedRun]:
    """The runs with their devices, which are divided as over the parts of one pipeline. commands: a preset and its
    overrides for each name. say: called with where each is.

    Raises UserError that names the config that is wrong, and for fewer devices than parts.
    """
    runs, parts = dict[str, Loaded](), list[list[Part]]()
    commands = {own: words for name in commands for own, words in _by_policy(name, commands[name]).items()}
    for name, (preset, *overrides) in commands.items():
        with _naming(name):
            runs[name] = load_config(preset, overrides, needed=NEEDED_TO_TRAIN)
    _check_side_by_side({name: loaded.config for name, loaded in runs.items()})
    for name in runs:
        with _naming(name):
            runs[name] = follow_pipeline(follow_machines(runs[name]))
            pipeline = bind(runs[name].config)
            parts.append(pipeline_parts(pipeline, model_sizes(runs[name].config, pipeline.engines)))
    devices = share_devices(parts, runs[name].config)
    planned = []
    for name, own_parts, own in zip(runs, parts, devices, strict=True):
        with _naming(name):
            loaded = with_changes(runs[name], [("trainer.devices", own, "several runs share the devices")])
            planned.append(_planned(name, commands[name], loaded))
        machines = ", ".join(map(str, sorted({rank.node for rank in planned[-1].plan.ranks})))
        what = f"models of {sum(part.size for part in own_parts):,} parameters, in {loaded.config.trainer.run_dir}"
        say(f"{name}: {planned[-1].words[-1]} (machine {machines}), {what}")
    return planned


def _by_policy(name: str, words: Sequence[str]) -> dict[str, Sequence[str]]:
    """The command, or one for each of its policies."""
    with _naming(name):
        overrides = with_own_policies(load_config(words[0], words[1:]).config)
    return {f"{name}-{policy}": (*words, *own) for policy, own in overrides.items()} or {name: words}


def _planned(name: str, words: Sequence[str], loaded: Loaded) -> PlannedRun:
    """Raises UserError if the run cannot be on its devices, or if a key does nothing."""
    reading = read_config(loaded)
    settings = spec_settings(loaded.config, reading.pipeline, {source.domain: 1 for source in reading.train}).keywords
    devices = f"trainer.devices={[list(own) for own in loaded.config.trainer.devices]}"
    return PlannedRun(name, (*words, devices), settings["plan"], settings["options"].worker)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _check_side_by_side(configs: Mapping[str, Config]) -> None:
    """Raises UserError for runs in one folder, without Ray, or with other ideas of the devices."""
    folders: dict[Path, str] = {}
    first, of_first = next((name, flatten(config)) for name, config in configs.items())
    for name, config in configs.items():
        trainer, values = config.trainer, flatten(config)
        if trainer.launcher != "ray" or trainer.allocation or trainer.devices:
            raise UserError(
                f"{name}: several configs share the devices of one Ray: set trainer.launcher=ray, and remove "
                "trainer.allocation and trainer.devices"
            )
        for key in (key for key in _SHARED if values[key] != of_first[key]):
            both = f"{of_first[key]} in {first} and {values[key]} in {name}"
            raise UserError(f"{key} is {both}, which share the devices: set it once for all, as {key}=VALUE")
        if (other := folders.setdefault(trainer.run_dir.resolve(), name)) != name:
            advice = f"give one of them another name, e.g. {name}:trainer.experiment_name={name}"
            raise UserError(f"{other} and {name} have the same folder, {trainer.run_dir}: {advice}")
