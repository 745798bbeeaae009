"""`distflow plan`: whether a run fits, how long it takes and which split of its devices is best,
before it starts and without its devices: no Ray, no weights."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.commands.arguments import a_time, add_preset_arguments, at_least
from distflow.errors import UserError, count_of, duration_text

if TYPE_CHECKING:
    from distflow.launch.plans.run_planner import PredictedRun, RunPlanner

_MOST_DEVICES = 8192
_MOST_LISTED = 12
_CALIBRATE = "calibrate the plan by a short run of it (--from RUN)"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_arguments(
        parser, default="", what="a preset's name, or a YAML file; with --from, that run's config"
    )
    parser.add_argument(
        "--from", dest="measured", metavar="RUN", help="a run whose times and lengths the plan uses"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="h100, a100, cpu, ...; default: this machine's device"
    )
    parser.add_argument(
        "--devices",
        type=partial(at_least, 1, most=_MOST_DEVICES),
        metavar="N",
        help="number of devices, 8 on each machine",
    )

    for name in ("prompt", "response"):
        parser.add_argument(
            f"--{name}-tokens",
            type=float,
            metavar="MEAN",
            help=f"mean {name} length; default: half of the maximum",
        )

    parser.add_argument(
        "--reward-seconds",
        type=a_time,
        default=0.0,
        metavar="MEAN",
        help="mean time to score a group",
    )
    parser.add_argument(
        "--no-code", action="store_true", help="refuse a config that names Python code to import"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises UserError if it does not fit."""
    from distflow.launch.plans.run_planner import RunPlanner

    preset, overrides = _preset_of(arguments)
    planner = RunPlanner(
        preset,
        overrides,
        arguments.device,
        arguments.devices,
        arguments.prompt_tokens,
        arguments.response_tokens,
        arguments.reward_seconds,
        measured_in=arguments.measured,
        runs_code=not arguments.no_code,
    )
    run = planner.run

    if arguments.json:
        print(json.dumps(as_json(planner), indent=1))
    else:
        for line in (*planner.loaded.notes, *lines(planner)):
            print(line)

    if not (arguments.measured or arguments.device or arguments.devices):
        _check(planner)
    if not run.fits:
        raise UserError(f"it does not fit: {run.excess()}; {run.advice()}")

    return 0


def _check(planner: "RunPlanner") -> None:
    """Raises UserError for what a run on this machine would refuse before it loads weights."""
    from distflow.commands.config import why_not_from_files
    from distflow.config.compose.check_paths import is_incomplete

    config = planner.loaded.config
    if not is_incomplete(config) and not why_not_from_files(config, planner.runs_code):
        from distflow.launch.make_spec import check_run

        check_run(planner.loaded)


def _preset_of(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Without a preset, the config of the measured run."""
    if arguments.preset and "=" not in arguments.preset:
        return arguments.preset, arguments.overrides
    if not arguments.measured:
        raise UserError("name a preset or a YAML file, or a run (--from RUN)")

    overrides = arguments.overrides
    if arguments.preset:
        overrides = [arguments.preset, *overrides]
    file = Path(arguments.measured).expanduser() / "config.yaml"
    if not file.is_file():
        raise UserError(f"--from {arguments.measured}: there is no run: {file} does not exist")

    return str(file), overrides


def lines(planner: "RunPlanner") -> Iterator[str]:
    """The plan as text."""
    run = planner.run
    yield f"{run.plan.pipeline} on {count_of(len(run.plan.ranks), 'device')} ({run.device.name})"
    for fitted in planner.loaded.fitted:
        yield f"made to fit: {fitted}"

    if planner.search:
        yield f"\nallocation: {planner.search.why()}"
        for candidate in planner.search.best:
            yield f"  {candidate.line()}"

    yield "\ngraph"
    yield from _graph(planner)
    synced = "none, the engine uses the trained weights"
    if run.times.sync_bytes:
        synced = _bytes(run.times.sync_bytes)
    yield f"\nweight sync, bytes of a step: {synced}"
    yield from _memory(run)
    if not run.why_untimed:
        yield from _time_line(run)
    yield from _whole_run(run)


def _graph(planner: "RunPlanner") -> Iterator[str]:
    for node in planner.pipeline.nodes:
        ranks = [rank.rank for rank in planner.run.plan.ranks if node.node_id in rank.nodes]
        engines = ""
        if node.engines:
            engines = f", {' and '.join(node.engines)}"

        after = f" after {', '.join(node.deps)}" if node.deps else ""
        yield f"  {node.node_id} ({node.plane}{engines}) on {_ranks(ranks)}{after}"


def _memory(run: "PredictedRun") -> Iterator[str]:
    for worker in run.workers:
        share = worker.peak / run.device.memory
        yield (
            f"\nmemory of {_ranks(worker.ranks)}: {_bytes(worker.peak)} in '{worker.peak_phase}', "
            f"{share:.0%} of each {run.device.name}"
        )

        for item in sorted(worker.items, key=lambda item: -item.num_bytes):
            where = ", in host memory" if item.on_host else ""
            yield f"  {_bytes(item.num_bytes):>9}  {item.role} {item.what} ({item.when}{where})"


def _time_line(run: "PredictedRun") -> Iterator[str]:
    yield f"\ntime line of a step of {run.step_seconds:.3g} s"
    for bar in run.bars:
        yield f"  {bar.start:9.2f} to {bar.end:9.2f} s  {_ranks(bar.ranks)}: {bar.what}"
    for ranks in dict.fromkeys(bar.ranks for bar in run.bars):
        yield f"  {_ranks(ranks)}: idle for {run.idle(ranks):.0%} of it"


def _whole_run(run: "PredictedRun") -> Iterator[str]:
    lengths = run.lengths
    rates = run.times.rates
    if rates.source:
        yield f"\nmeasured in {rates.source}: {rates.sentence()}"

    if run.why_untimed:
        known = "unknown"
        if run.steps is not None:
            known = count_of(run.steps, "step")

        yield (
            f"\nthe run: {known}; its time is not predicted, because {run.why_untimed}; "
            f"{_CALIBRATE}"
        )
        return

    untimed = "rewards, validation and checkpoints"
    if rates.source or rates.score:
        untimed = "validation and checkpoints"
    yield (
        f"\nassumed: {lengths.prompt:.4g} tokens of a prompt and {lengths.response:.4g} of a "
        f"response on average; no time for {untimed}"
    )

    if run.steps is None or run.hours is None:
        yield (
            "the run: unknown length, as the number of rows is unknown; set "
            "trainer.total_training_steps"
        )
        return

    money = ""
    if run.cost is not None:
        money = f", costs {run.cost:,.2f} (cost.gpu_hour={run.config.cost.gpu_hour:g})"
    tokens = run.steps * run.step_tokens / 1e6
    yield (
        f"the run: {count_of(run.steps, 'step')}, {tokens:,.1f} million tokens, "
        f"{duration_text(3600 * run.hours)}{money}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_MOST_LISTED]))
    return f"ranks {shown}{', ...' if len(ranks) > _MOST_LISTED else ''}"


def _bytes(number: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} B"


def as_json(planner: "RunPlanner") -> Mapping[str, Any]:
    """The plan as plain data; bytes and seconds."""
    run = planner.run
    rates = run.times.rates

    memory = []
    for worker in run.workers:
        facts = {"peak_bytes": worker.peak, "peak_phase": worker.peak_phase}
        memory.append({**asdict(worker), **facts})

    allocations = []
    if planner.search:
        for candidate in planner.search.best:
            allocations.append(
                {
                    "allocation": candidate.text,
                    "max_staleness": candidate.staleness,
                    "step_seconds": candidate.run.step_seconds,
                }
            )

    step: dict[str, Any] = {"seconds": None, "bars": []}
    if not run.why_untimed:
        step = {"seconds": run.step_seconds, "bars": [asdict(bar) for bar in run.bars]}
    lengths = run.lengths

    return {
        "fits": run.fits,
        "allocations": allocations,
        "device": asdict(run.device),
        "plan": {**asdict(run.plan), "nodes": planner.pipeline.to_json()},
        "memory": memory,
        "step": {
            **step,
            "tokens": run.step_tokens,
            "weight_sync_bytes": run.times.sync_bytes,
        },
        "assumed": {
            "prompt": lengths.prompt,
            "response": lengths.response,
            "longest": lengths.longest,
        },
        "phases": {} if run.why_untimed else run.phases,
        "why_untimed": run.why_untimed,
        "measured": asdict(rates) if rates.source else None,
        "run": {"steps": run.steps, "hours": run.hours, "cost": run.cost},
    }
