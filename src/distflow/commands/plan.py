"""`distflow plan`: what a run needs and how long it takes, before it starts and without its
devices: no torch, no Ray, no weights."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.commands.arguments_and_run_folders import a_time, add_preset_arguments, at_least
from distflow.errors import UserError, count_of, duration_text
from distflow.observe.crash_safe_files import write_atomically
from distflow.observe.report.build import fill
from distflow.observe.report.graph_and_timelines import drawn_nodes

if TYPE_CHECKING:
    from distflow.launch.plans.plan_before_run import PredictedRun, RunPlanner, SimulatedRun

_MOST_LISTED = 12
_CALIBRATE = "calibrate the plan by a short run of it (--from RUN)"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    devices, steps = (partial(at_least, 1, most=most) for most in (8192, 10_000))
    add_preset_arguments(
        parser, default="", what="a preset's name, or a YAML file; with --from, that run's config"
    )
    parser.add_argument(
        "--from", dest="measured", metavar="RUN", help="a run whose times and lengths the plan uses"
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGE",
        help=(
            "rollout+1, rollout-1, staleness+1, rewards*2, response/2, or key=value; may be "
            "repeated"
        ),
    )
    parser.add_argument(
        "--device", metavar="NAME", help="h100, a100, cpu, ...; default: this machine's device"
    )
    parser.add_argument(
        "--devices", type=devices, metavar="N", help="number of devices, 8 on each machine"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="MEAN",
        help="mean prompt length; default: half of the maximum",
    )
    parser.add_argument(
        "--response-tokens",
        type=float,
        metavar="MEAN",
        help="mean response length; default: half of the maximum",
    )
    parser.add_argument(
        "--lengths",
        metavar="SPREAD",
        help="response lengths: lognormal:SIGMA, TOKENS:SHARE,..., or a file",
    )
    parser.add_argument(
        "--simulate",
        type=steps,
        metavar="STEPS",
        help="simulate the first steps with the scheduler",
    )
    for name, what in (
        ("reward", "to score a group"),
        ("tool", "that the tools of a response take"),
    ):
        parser.add_argument(
            f"--{name}-seconds", type=a_time, default=0.0, metavar="MEAN", help=f"mean time {what}"
        )
    parser.add_argument(
        "--mtbf-hours",
        type=a_time,
        default=0.0,
        metavar="MEAN",
        help="mean time between failures of a device",
    )
    parser.add_argument(
        "--no-code", action="store_true", help="refuse a config that names Python code to import"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with the time line and memory bars"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises UserError if it does not fit."""
    from distflow.launch.plans.plan_before_run import RunPlanner, outcomes

    preset, overrides = _preset_of(arguments)
    planner = RunPlanner(
        preset,
        overrides,
        arguments.device,
        arguments.devices,
        arguments.prompt_tokens,
        arguments.response_tokens,
        arguments.lengths,
        {
            "reward": arguments.reward_seconds,
            "tool": arguments.tool_seconds,
            "mtbf": 3600 * arguments.mtbf_hours,
        },
        arguments.measured,
        not arguments.no_code,
    )
    run = planner.run
    wants_times = arguments.what_if or (arguments.simulate and not arguments.tool_seconds)
    if wants_times and run.why_untimed:
        raise UserError(
            f"the times of this run cannot be predicted: {run.why_untimed}; {_CALIBRATE}"
        )
    simulated = planner.simulate(run, arguments.simulate) if arguments.simulate else None
    changed = outcomes(planner, arguments.what_if) if arguments.what_if else []
    if arguments.json:
        print(
            json.dumps(
                {**as_json(planner, simulated), "what_if": [asdict(each) for each in changed]},
                indent=1,
            )
        )
    else:
        for line in (*planner.loaded.notes, *lines(planner, simulated)):
            print(line)
        for line in (
            ("\nwhat if", *(f"  {each.line(changed[0])}" for each in changed)) if changed else ()
        ):
            print(line)
    if arguments.html:
        write_plan_page(arguments.html, as_json(planner, simulated))
    if not (arguments.measured or arguments.device or arguments.devices):
        _check(planner)
    if not run.fits:
        change = planner.change_that_fits(run)
        advice = (
            "use a smaller model, shorter sequences, or devices with more memory: no setting here "
            "makes it fit"
        )
        advice = advice if change is None else f"it fits with {' '.join(change)}"
        raise UserError(f"it does not fit: {run.excess()}; {advice}")
    return 0


def _check(planner: "RunPlanner") -> None:
    """Raises UserError for what a run on this machine would refuse before it loads weights."""
    from distflow.commands.config_and_data import why_not_from_files
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
    overrides = [*([arguments.preset] if arguments.preset else []), *arguments.overrides]
    file = Path(arguments.measured).expanduser() / "config.yaml"
    if not file.is_file():
        raise UserError(f"--from {arguments.measured}: there is no run: {file} does not exist")
    return str(file), overrides


def lines(planner: "RunPlanner", simulated: "SimulatedRun | None") -> Iterator[str]:
    """The plan as text."""
    run = planner.run
    yield f"{run.plan.pipeline} on {count_of(len(run.plan.ranks), 'device')} ({run.device.name})"
    yield from (f"made to fit: {fitted}" for fitted in planner.loaded.fitted)
    if planner.search:
        yield f"\nallocation: {planner.search.why()}"
        yield from (f"  {each.line()}" for each in planner.search.best)
    yield "\ngraph"
    yield from (f"  {line}" for line in _graph(planner))
    if run.plan.groups:
        yield "\nprocess groups"
        shown = run.plan.groups[:_MOST_LISTED]
        for group in shown:
            uses = ", ".join(f"{role} {axis}" for role, axis in group.uses)
            yield f"  {group.name}: {_ranks(group.ranks)} ({uses})"
        if len(shown) < len(run.plan.groups):
            yield f"  and {len(run.plan.groups) - len(shown):,} more (--json lists them)"
    yield "\nchannels, bytes of a step"
    for channel, num_bytes in zip(run.plan.channels, run.channel_bytes, strict=True):
        if num_bytes:
            yield f"  {channel.source} → {channel.target}: {channel.kind}, {_bytes(num_bytes)}"
    yield (
        "  weight sync: "
        f"{_bytes(run.sync_bytes) if run.sync_bytes else 'none, the engine uses the trained weights'}"  # noqa: E501
    )
    yield from _memory(planner)
    yield from () if run.why_untimed else _time_line(run)
    if simulated is not None:
        yield "\nsimulated run"
        yield from (f"  {line}" for line in simulated.lines(run.shares_devices))
    yield from _whole_run(planner)


def _time_line(run: "PredictedRun") -> Iterator[str]:
    yield f"\ntime line of a step of {run.step_seconds:.3g} s"
    for bar in run.bars:
        what = f"waits for {bar.why}" if bar.why else bar.what
        yield f"  {bar.start:9.2f} to {bar.end:9.2f} s  {_ranks(bar.ranks)}: {what}"
    for ranks in dict.fromkeys(bar.ranks for bar in run.bars if bar.why):
        yield f"  {_ranks(ranks)}: idle for {run.idle(ranks):.0%} of it"


def _graph(planner: "RunPlanner") -> Iterator[str]:
    for node in planner.pipeline.nodes:
        ranks = tuple(
            r.rank
            for r in planner.run.plan.ranks
            if node.node_id in (*r.rollout_nodes, *r.training_nodes)
        )
        engines = f", {' and '.join(node.engines)}" if node.engines else ""
        after = f" after {', '.join(node.deps)}" if node.deps else ""
        yield f"{node.node_id} ({node.plane}{engines}) on {_ranks(ranks)}{after}"


def _memory(planner: "RunPlanner") -> Iterator[str]:
    run = planner.run
    for worker in run.workers:
        share = worker.peak / run.device.memory
        fullest = (
            f"{_bytes(worker.peak)} in '{worker.peak_phase}', {share:.0%} of each {run.device.name}"
        )
        yield f"\nmemory of {_ranks(worker.ranks)}: {fullest}"
        for item in sorted(worker.items, key=lambda item: -item.num_bytes):
            where = ", in host memory" if item.on_host else ""
            yield f"  {_bytes(item.num_bytes):>9}  {item.role} {item.what} ({item.when}{where})"


def _whole_run(planner: "RunPlanner") -> Iterator[str]:
    run = planner.run
    lengths = run.lengths
    rates = run.times.rates
    means = (
        f"{lengths.prompt:.4g} tokens of a prompt and {lengths.response:.4g} of a response on "
        "average"
    )
    if rates.source:
        yield f"\nmeasured in {rates.source}: {rates.sentence()}"
    if run.why_untimed:
        known = "unknown" if run.steps is None else count_of(run.steps, "step")
        yield (
            f"\nthe run: {known}; its time is not predicted, because {run.why_untimed}; "
            f"{_CALIBRATE}"
        )
        return
    untimed = (
        "validation and checkpoints" if rates.source else "rewards, validation and checkpoints"
    )
    yield f"\nassumed: {means}; no time for {untimed}"
    if run.steps is None or run.hours is None:
        yield (
            "the run: unknown length, as the number of rows is unknown; set "
            "trainer.total_training_steps"
        )
        return
    money = (
        ""
        if run.cost is None
        else f", costs {run.cost:,.2f} (cost.gpu_hour={run.config.cost.gpu_hour:g})"
    )
    yield (
        f"the run: {count_of(run.steps, 'step')}, {run.steps * run.step_tokens / 1e6:,.1f} million "
        "tokens, "
        f"{duration_text(3600 * run.hours)}{money}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return (
        "ranks "
        + ", ".join(map(str, ranks[:_MOST_LISTED]))
        + (", ..." if len(ranks) > _MOST_LISTED else "")
    )


def _bytes(number: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} B"


def as_json(planner: "RunPlanner", simulated: "SimulatedRun | None") -> Mapping[str, Any]:
    """The plan as plain data; bytes and seconds."""
    run = planner.run
    plan = asdict(run.plan)
    for channel, num_bytes in zip(plan["channels"], run.channel_bytes, strict=True):
        channel["bytes"] = num_bytes
    memory = [
        {
            "ranks": w.ranks,
            "peak_bytes": w.peak,
            "peak_phase": w.peak_phase,
            "items": [asdict(i) for i in w.items],
        }
        for w in run.workers
    ]
    found = planner.search.best if planner.search else ()
    return {
        "fits": run.fits,
        "allocations": [
            {
                "allocation": each.text,
                "max_staleness": each.staleness,
                "step_seconds": each.step_seconds,
            }
            for each in found
        ],
        "simulated": simulated and {"step_seconds": simulated.step_seconds, **asdict(simulated)},
        "device": asdict(run.device),
        "plan": {**plan, "nodes": planner.pipeline.to_json()},
        "memory": memory,
        "step": {
            "seconds": None if run.why_untimed else run.step_seconds,
            "tokens": run.step_tokens,
            "weight_sync_bytes": run.sync_bytes,
            "bars": [] if run.why_untimed else [asdict(bar) for bar in run.bars],
        },
        "assumed": {**asdict(run.lengths), "values": len(run.lengths.values)},
        "phases": {} if run.why_untimed else run.phases,
        "why_untimed": run.why_untimed,
        "measured": asdict(run.times.rates) if run.times.rates.source else None,
        "run": {"steps": run.steps, "hours": run.hours, "cost": run.cost},
    }


_SCRIPTS = ("dom", "pipeline_graph", "timeline", "plan_page")


def write_plan_page(path: Path, plan: Mapping[str, Any]) -> None:
    """plan: as `distflow plan --json` prints it. Raises UserError if the file cannot be written."""
    fits = bool(plan["fits"])
    words = {
        "title": plan["plan"]["pipeline"],
        "kind": "plan",
        "status": "fits" if fits else "does not fit",
    }
    content = fill(
        "plan_page.html", _SCRIPTS, _page_data(plan), {**words, "tone": "good" if fits else "bad"}
    )
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written: {error.strerror or error}") from error


def _page_data(plan: Mapping[str, Any]) -> dict[str, Any]:
    step = plan["step"]
    run = plan["run"]
    facts = [
        ("devices", f"{len(plan['plan']['ranks'])} {plan['device']['name']}"),
        ("step", "not predicted" if step["seconds"] is None else f"{step['seconds']:.3g} s"),
        *(
            [("simulated step", f"{plan['simulated']['step_seconds']:.3g} s")]
            if plan["simulated"]
            else []
        ),
        ("tokens of a step", f"{step['tokens']:,.0f}"),
        ("steps", "unknown" if run["steps"] is None else f"{run['steps']:,}"),
        (
            "time of the run",
            "unknown" if run["hours"] is None else duration_text(3600 * run["hours"]),
        ),
        *([("cost (by cost.gpu_hour)", f"{run['cost']:,.2f}")] if run["cost"] is not None else []),
    ]
    timed = [bar["what"] for bar in step["bars"] if not bar["why"]]
    return {
        "facts": facts,
        "pipeline": drawn_nodes(plan["plan"]["nodes"], {}),
        "timelines": [_timeline(step)] if step["seconds"] else [],
        "memory": [_memory_bars(worker, plan["device"]) for worker in plan["memory"]],
        # by which phases get their colours
        "series": {"y": {f"timing_s/{name}": None for name in timed}},
    }


def _timeline(step: Mapping[str, Any]) -> dict[str, Any]:
    """One lane of work and one of waits for each set of ranks."""
    lanes: dict[tuple[str, str], list[Any]] = {}
    for bar in step["bars"]:
        ranks = bar["ranks"]
        name = (
            f"rank {ranks[0]}"
            if len(ranks) == 1
            else f"ranks {ranks[0]} to {ranks[-1]} ({len(ranks)})"
        )
        kind, what = ("wait", bar["why"]) if bar["why"] else ("phase", bar["what"])
        span = (round(bar["start"], 4), round(bar["end"], 4), what, None, None)
        lanes.setdefault((kind, f"{name} waits for" if bar["why"] else name), []).append(span)
    drawn = [{"name": name, "kind": kind, "spans": spans} for (kind, name), spans in lanes.items()]
    rest = {"steps": [], "synced": [], "paused": [], "notes": ["Predicted, not measured."]}
    return {
        "first": None,
        "last": None,
        "why": "a step",
        "seconds": step["seconds"],
        "lanes": drawn,
        **rest,
    }


def _memory_bars(worker: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    ranks = worker["ranks"]
    items = [item for item in worker["items"] if not item["on_host"]]
    phases = ("generate", "forward", "update", "optimizer", "sync")
    parts: dict[str, list[float]] = {}
    for item in items:
        own = parts.setdefault(f"{item['role']} {item['what']}", [0.0] * len(phases))
        for place, phase in enumerate(phases):
            own[place] += item["num_bytes"] * (phase in item["phases"])
    title = _ranks(ranks)
    named = [{"name": name, "bytes": values} for name, values in parts.items()]
    return {"title": title, "room": device["memory"], "phases": phases, "parts": named}
