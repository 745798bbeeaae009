"""`distflow plan`: what a run needs and how long it takes, before it starts and without its devices: no torch, no Ray,
no weights."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.commands.arguments_and_run_folders import add_preset_arguments
from distflow.errors import UserError, count_of
from distflow.import_target import placeholders

if TYPE_CHECKING:
    from distflow.config import Config, Loaded
    from distflow.graph import BoundPipeline
    from distflow.planning.known_models_and_devices import ModelShape
    from distflow.planning.predicted_run import Change, Lengths, PredictedRun

_MOST_DEVICES = 8192
_ON_MACHINE = 8
_MOST_ROWS_BYTES = 32 * 2**20
_MOST_LISTED = 12
_UNLOADED = ("torch", "transformers", "ray")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_arguments(parser)
    parser.add_argument("--device", metavar="NAME", help="h100, a100, cpu, ... (default: what this machine has)")
    parser.add_argument(
        "--devices", type=_count, metavar="N", help=f"devices of the run, {_ON_MACHINE} on each machine above that"
    )
    parser.add_argument("--prompt-tokens", type=float, metavar="MEAN", help="default: half of data.max_prompt_length")
    parser.add_argument(
        "--response-tokens", type=float, metavar="MEAN", help="default: half of data.max_response_length"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the time line and memory bars")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of devices from 1 to {_MOST_DEVICES:,}")
    return int(text)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; exit status 2 if it does not fit."""
    planner = _Planner(arguments)
    run = planner.predict(planner.loaded.config)
    if arguments.json:
        print(json.dumps(as_json(run, planner.pipeline), indent=1))
    else:
        for line in (*planner.loaded.notes, *lines(run, planner)):
            print(line)
    if arguments.html:
        from distflow.observe.report.plan_page import write_plan_page

        write_plan_page(arguments.html, as_json(run, planner.pipeline))
    if not run.fits:
        raise UserError(f"it does not fit: {run.excess()}; {planner.advice(run)}")
    return 0


class _Planner:
    """The config, pipeline and models of a command line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from distflow.config.derived_settings import RunLimits
        from distflow.planning.known_models_and_devices import device_here, find_device

        self.arguments = arguments
        self.device = find_device(arguments.device or device_here())
        self.loaded = self._load([])
        self.pipeline = bind_unloaded(self.loaded.config)
        self.shapes = shapes_of(self.loaded.config, self.pipeline)
        self.rows = num_rows(self.loaded.config)
        policy = self.shapes.get("actor") or self.shapes.get("rollout")
        self.limits = RunLimits(self.rows, policy.context if policy else None)
        self.loaded = self._fitted(self.loaded)

    def _load(self, more: Sequence[str]) -> "Loaded":
        """The config as its run would have it on these devices."""
        from distflow.config import load_config, with_changes
        from distflow.planning.allocation_expression import follow_allocation

        number = self.arguments.devices
        overrides = [*_on_devices(number), *self.arguments.overrides, *more]
        loaded = follow_allocation(load_config(self.arguments.preset, overrides, complete=False))
        trainer = loaded.config.trainer
        if number and not more and trainer.nnodes * trainer.n_gpus_per_node != number:
            raise UserError(
                f"--devices {number} contradicts trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node="
                f"{trainer.n_gpus_per_node}: remove one of them"
            )
        if loaded.config.actor_rollout_ref.model.dtype == "auto":
            dtype = "float32" if self.device.is_cpu else "bfloat16"
            loaded = with_changes(loaded, [("actor_rollout_ref.model.dtype", dtype, f"on a {self.device.name}")])
        return loaded

    def _fitted(self, loaded: "Loaded") -> "Loaded":
        from distflow.config import fit_to

        return fit_to(loaded, self.limits)

    @property
    def lengths(self) -> "Callable[[Config], Lengths]":
        from distflow.planning.predicted_run import Lengths

        return partial(Lengths.of, prompt=self.arguments.prompt_tokens, response=self.arguments.response_tokens)

    def predict(self, config: "Config") -> "PredictedRun":
        from distflow.planning.predicted_run import predict

        return predict(config, self.pipeline, self.shapes, self.device, self.limits, self.lengths(config))

    def advice(self, run: "PredictedRun") -> str:
        """The nearest change with which the run fits, after its config was checked as the run checks it."""
        from distflow.planning.predicted_run import nearest_change

        if (change := nearest_change(run, self.predict, self._changed)) is None:
            return "no setting here makes it fit: use a smaller model, shorter sequences, or devices with more memory"
        return f"it fits with {' '.join(_written(change))}"

    def _changed(self, change: "Change") -> "Config | None":
        from distflow.config import UserError as Refused

        try:
            return self._fitted(self._load(_written(change))).config
        except Refused:
            return None


def _written(change: "Change") -> list[str]:
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change]


def _on_devices(number: int | None) -> list[str]:
    """Overrides for so many devices."""
    if number is None:
        return []
    size = min(number, _ON_MACHINE)
    if number % size:
        raise UserError(f"--devices {number}: above {_ON_MACHINE} it must be a multiple of {_ON_MACHINE}, a machine's")
    launcher = ["trainer.launcher=ray"] if number > 1 else []
    return [f"trainer.nnodes={number // size}", f"trainer.n_gpus_per_node={size}", *launcher]


def bind_unloaded(config: "Config") -> "BoundPipeline":
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


def shapes_of(config: "Config", pipeline: "BoundPipeline") -> dict[str, "ModelShape"]:
    """The shape of each role's model; raises UserError with the key of a model without a config."""
    from distflow.config.keys.reward import scoring_models
    from distflow.hugging_face_hub import is_local_model
    from distflow.models.paths import BUILTIN_PREFIX, PACKAGE_PREFIX, resolve_path
    from distflow.planning.known_models_and_devices import find_shape

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


def num_rows(config: "Config") -> int | None:
    """Rows to train on, before any are left out; None if counting them takes long."""
    from distflow.config.derived_settings import train_files
    from distflow.data.sources import BUILTIN_FOLDER, read_file

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


def lines(run: "PredictedRun", planner: _Planner) -> Iterator[str]:
    """The plan as text."""
    yield f"{run.plan.pipeline} on {count_of(len(run.plan.ranks), 'device')} ({run.device.name})"
    yield from (f"made to fit: {fitted}" for fitted in planner.loaded.fitted)
    yield "\ngraph"
    yield from (f"  {line}" for line in _graph(run, planner.pipeline))
    if run.plan.groups:
        yield "\nprocess groups"
        shown = run.plan.groups[:_MOST_LISTED]
        for group in shown:
            uses = ", ".join(f"{role} {axis}" for role, axis in group.uses)
            yield f"  {group.name}: ranks {_ranks(group.ranks)} ({uses})"
        if len(shown) < len(run.plan.groups):
            yield f"  and {len(run.plan.groups) - len(shown):,} more (--json lists them)"
    yield "\nchannels, bytes of a step"
    for channel, num_bytes in zip(run.plan.channels, run.channel_bytes, strict=True):
        if num_bytes:
            yield f"  {channel.source} → {channel.target}: {channel.kind}, {_bytes(num_bytes)}"
    yield f"  weight sync: {_bytes(run.sync_bytes) if run.sync_bytes else 'none, the engine uses the trained weights'}"
    yield from _memory(run)
    yield f"\ntime line of a step of {run.step_seconds:.3g} s"
    for bar in run.bars:
        what = f"waits for {bar.why}" if bar.why else bar.what
        yield f"  {bar.start:9.2f} to {bar.end:9.2f} s  ranks {_ranks(bar.ranks)}: {what}"
    for ranks in dict.fromkeys(bar.ranks for bar in run.bars if bar.why):
        yield f"  ranks {_ranks(ranks)} are idle for {run.idle(ranks):.0%} of it"
    yield from _whole_run(run)


def _graph(run: "PredictedRun", pipeline: "BoundPipeline") -> Iterator[str]:
    for node in pipeline.nodes:
        ranks = tuple(r.rank for r in run.plan.ranks if node.node_id in (*r.rollout_nodes, *r.training_nodes))
        engines = f", {' and '.join(node.engines)}" if node.engines else ""
        after = f" after {', '.join(node.deps)}" if node.deps else ""
        yield f"{node.node_id} ({node.plane}{engines}) on ranks {_ranks(ranks)}{after}"


def _memory(run: "PredictedRun") -> Iterator[str]:
    from distflow.planning.memory import PHASES

    for worker in run.workers:
        share = worker.peak / run.device.memory
        fullest = f"{_bytes(worker.peak)} in '{worker.peak_phase}', {share:.0%} of a {run.device.name}"
        yield f"\nmemory of ranks {_ranks(worker.ranks)}: {fullest}"
        for item in sorted(worker.items, key=lambda item: -item.num_bytes):
            when = "always" if len(item.phases) == len(PHASES) else ", ".join(item.phases)
            where = ", in host memory" if item.on_host else ""
            yield f"  {_bytes(item.num_bytes):>9}  {item.role} {item.what} ({when}{where})"


def _whole_run(run: "PredictedRun") -> Iterator[str]:
    lengths = run.lengths
    yield (
        f"\nassumed: {lengths.prompt:g} tokens of a prompt and {lengths.response:g} of a response on average; no time "
        "for rewards, validation and checkpoints"
    )
    if run.steps is None or run.hours is None:
        yield "the run: unknown length, as the number of rows is unknown; set trainer.total_training_steps"
        return
    money = "" if run.cost is None else f", costs {run.cost:,.2f} (cost.gpu_hour={run.config.cost.gpu_hour:g})"
    yield (
        f"the run: {count_of(run.steps, 'step')}, {run.steps * run.step_tokens / 1e6:,.1f} million tokens, "
        f"{run.hours:.3g} hours{money}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks[:_MOST_LISTED])) + (", ..." if len(ranks) > _MOST_LISTED else "")


def _bytes(number: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} B"


def as_json(run: "PredictedRun", pipeline: "BoundPipeline") -> Mapping[str, Any]:
    """The plan as plain data; bytes and seconds."""
    plan = asdict(run.plan)
    for channel, num_bytes in zip(plan["channels"], run.channel_bytes, strict=True):
        channel["bytes"] = num_bytes
    memory = [
        {"ranks": w.ranks, "peak_bytes": w.peak, "peak_phase": w.peak_phase, "items": [asdict(i) for i in w.items]}
        for w in run.workers
    ]
    return {
        "fits": run.fits,
        "device": asdict(run.device),
        "plan": {**plan, "nodes": pipeline.to_json()},
        "memory": memory,
        "step": {
            "seconds": run.step_seconds,
            "tokens": run.step_tokens,
            "weight_sync_bytes": run.sync_bytes,
            "bars": [asdict(bar) for bar in run.bars],
        },
        "assumed": asdict(run.lengths),
        "run": {"steps": run.steps, "hours": run.hours, "cost": run.cost},
    }
