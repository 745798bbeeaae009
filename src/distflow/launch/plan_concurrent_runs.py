"""Plans several concurrent runs before any starts: each is checked, and the scheduler divides the
devices among all."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from distflow.builtin_names import SEVERAL_RUNS
from distflow.config import Config, Loaded, flatten, load_config, with_changes
from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
from distflow.config.derived_settings import with_own_policies
from distflow.errors import UserError, blaming
from distflow.import_target import load
from distflow.launch.configured_models import model_sizes
from distflow.launch.devices import follow_machines
from distflow.launch.read_config import follow_pipeline, read_config
from distflow.launch.run_settings import settle_run
from distflow.launch.select_pipeline import bind
from distflow.planning.assign_ranks import share_devices
from distflow.planning.independent_parts import Part, pipeline_parts
from distflow.planning.plan import Plan
from distflow.runtime.spec import WorkerNeeds

_SHARED = (
    *("trainer.launcher", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.worker_cpus"),
    *("trainer.worker_memory_mb", "trainer.worker_roles", "trainer.device"),
    *("dag.apportion_strategy", "dag.consider_node_cohesion", "dag.consider_node_load"),
)


@dataclass(frozen=True)
class PlannedRun:
    """A run that is ready to start."""

    name: str
    run_dir: Path
    words: tuple[str, ...]
    """Its preset and overrides, with its devices."""
    launcher: str
    devices: tuple[int, ...]
    plan: Plan
    needs: WorkerNeeds


@dataclass(frozen=True)
class SeveralOptions:
    """How several runs are launched."""

    words: tuple[str, ...] = ()
    """Options of each command."""
    say: Callable[[str], None] = lambda line: None
    """As in `LaunchOptions`."""
    embedded: bool = False
    """As in `LaunchOptions`."""


class Ended(NamedTuple):
    """How runs ended: the exit status for all, and the names of those that failed."""

    status: int
    failed: tuple[str, ...]


def run_several(
    commands: Mapping[str, Sequence[str]], options: SeveralOptions
) -> tuple[list[PlannedRun], Ended]:
    """Plan the runs of these commands, and run all to the end. Raises as `plan_runs` does."""
    planned = plan_runs(commands, options.say)
    launch = cast(
        Callable[[Sequence[PlannedRun], SeveralOptions], Ended],
        load(SEVERAL_RUNS[planned[0].launcher]),
    )
    return planned, launch(planned, options)


def plan_runs(
    commands: Mapping[str, Sequence[str]], say: Callable[[str], None]
) -> list[PlannedRun]:
    """The runs with their devices, which are divided as among the parts of one pipeline. commands:
    a preset and its overrides for each name. say: called with the devices of each.

    Raises UserError that names a wrong config, or for fewer devices than parts.
    """
    words = dict[str, Sequence[str]]()
    for name, command in commands.items():
        words |= _by_policy(name, command)

    runs = dict[str, Loaded]()
    for name, (preset, *overrides) in words.items():
        with blaming(name):
            runs[name] = load_config(preset, overrides, needed=NEEDED_TO_TRAIN)

    check_side_by_side({name: loaded.config for name, loaded in runs.items()})
    parts = list[list[Part]]()
    for name, loaded in runs.items():
        with blaming(name):
            runs[name] = follow_pipeline(follow_machines(loaded))
            parts.append(_parts_of(runs[name].config))

    devices = share_devices(parts, runs[name].config)
    planned = []
    for name, parts_of_run, devices_of_run in zip(runs, parts, devices, strict=True):
        with blaming(name):
            run = _planned(name, words[name], runs[name], devices_of_run)
        planned.append(run)

        nodes = sorted({rank.node for rank in run.plan.ranks})
        machines = ", ".join(map(str, nodes))
        size = sum(part.size for part in parts_of_run)
        say(
            f"{name}: {run.words[-1]} (machine {machines}), models of {size:,} parameters, in "
            f"{run.run_dir}"
        )

    return planned


def _parts_of(config: Config) -> list[Part]:
    """The parts of a run's pipeline. The processes of a local run all do the same."""
    pipeline = bind(config)
    most = 1 if config.trainer.launcher == "local" else None
    return pipeline_parts(pipeline, model_sizes(config, pipeline.engines), most)


def _by_policy(name: str, words: Sequence[str]) -> dict[str, Sequence[str]]:
    """The command, or one for each of its policies."""
    with blaming(name):
        policies = with_own_policies(load_config(words[0], words[1:]).config)
    if not policies:
        return {name: words}
    return {f"{name}-{policy}": (*words, *own) for policy, own in policies.items()}


def _planned(
    name: str, words: Sequence[str], loaded: Loaded, devices: tuple[tuple[int, ...], ...]
) -> PlannedRun:
    """Raises UserError if the run cannot be on its devices, or a key has no effect."""
    own = tuple(sorted(chain.from_iterable(devices)))
    change: tuple[str, Any] = ("trainer.devices", devices)
    if loaded.config.trainer.launcher == "local":  # each run sees only its own devices
        change = ("trainer.n_gpus_per_node", len(own))
    loaded = with_changes(loaded, [(*change, "several runs share the devices")])
    reading = read_config(loaded)
    rows = {source.domain: 1 for source in reading.train}
    settings = settle_run(loaded.config, reading.pipeline, rows)
    trainer = loaded.config.trainer
    change_word = f"{change[0]}={json.dumps(change[1])}"

    return PlannedRun(
        name,
        trainer.run_dir,
        (*words, change_word),
        trainer.launcher,
        own,
        settings.plan,
        settings.needs,
    )


def check_side_by_side(configs: Mapping[str, Config]) -> None:
    """Raises UserError for runs in the same folder, under Slurm, or with different settings of the
    devices."""
    folders: dict[Path, str] = {}
    first, *_ = configs
    of_first = flatten(configs[first])

    for name, config in configs.items():
        trainer = config.trainer
        if trainer.launcher == "slurm" or trainer.allocation or trainer.devices:
            raise UserError(
                f"{name}: several configs share the devices of one machine or one Ray: set "
                "trainer.launcher=local or ray, and remove trainer.allocation and trainer.devices"
            )

        values = flatten(config)
        for key in _SHARED:
            if values[key] != of_first[key]:
                raise UserError(
                    f"{key} is {of_first[key]} in {first} and {values[key]} in {name}, which share "
                    f"the devices: set it once for all, as {key}=VALUE"
                )

        other = folders.setdefault(trainer.run_dir.resolve(), name)
        if other != name:
            raise UserError(
                f"{other} and {name} have the same folder, {trainer.run_dir}: give one of them "
                f"another name, e.g. {name}:trainer.experiment_name={name}"
            )
