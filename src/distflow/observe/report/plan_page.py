"""The page of a plan: a self-contained file with the drawings of a run's report, which opens offline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distflow.errors import UserError
from distflow.observe.crash_safe_files import write_atomically
from distflow.observe.report.build import fill
from distflow.observe.report.graph_and_timelines import drawn_nodes

_SCRIPTS = ("text", "step", "timeline", "plan")


def write_plan_page(path: Path, plan: Mapping[str, Any]) -> None:
    """plan: as `distflow plan --json` prints it. Raises UserError if the file cannot be written."""
    fits = bool(plan["fits"])
    words = {"title": plan["plan"]["pipeline"], "kind": "plan", "status": "fits" if fits else "does not fit"}
    content = fill("plan.html", _SCRIPTS, _page_data(plan), {**words, "tone": "good" if fits else "bad"})
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written: {error.strerror or error}") from error


def _page_data(plan: Mapping[str, Any]) -> dict[str, Any]:
    step, run = plan["step"], plan["run"]
    facts = [
        ("devices", f"{len(plan['plan']['ranks'])} {plan['device']['name']}"),
        ("step", f"{step['seconds']:.3g} s"),
        *([("simulated step", f"{plan['simulated']['step_seconds']:.3g} s")] if plan["simulated"] else []),
        ("tokens of a step", f"{step['tokens']:,.0f}"),
        ("steps", "unknown" if run["steps"] is None else f"{run['steps']:,}"),
        ("hours", "unknown" if run["hours"] is None else f"{run['hours']:.3g}"),
        *([("cost", f"{run['cost']:,.2f}")] if run["cost"] is not None else []),
    ]
    timed = [bar["what"] for bar in step["bars"] if not bar["why"]]
    return {
        "facts": facts,
        "pipeline": drawn_nodes(plan["plan"]["nodes"], {}),
        "timelines": [_timeline(step)] if step["seconds"] else [],
        "memory": [_memory(worker, plan["device"]) for worker in plan["memory"]],
        "series": {"y": {f"timing_s/{name}": None for name in timed}},  # by which phases get their colours
    }


def _timeline(step: Mapping[str, Any]) -> dict[str, Any]:
    """One lane of work and one of waits for each set of ranks."""
    lanes: dict[tuple[str, str], list[Any]] = {}
    for bar in step["bars"]:
        ranks = bar["ranks"]
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} ({len(ranks)})"
        kind, what = ("wait", bar["why"]) if bar["why"] else ("phase", bar["what"])
        span = (round(bar["start"], 4), round(bar["end"], 4), what, None, None)
        lanes.setdefault((kind, f"{name} waits for" if bar["why"] else name), []).append(span)
    drawn = [{"name": name, "kind": kind, "spans": spans} for (kind, name), spans in lanes.items()]
    rest = {"steps": [], "synced": [], "paused": [], "notes": ["Predicted, not measured."]}
    return {"first": 1, "last": 1, "why": "a step", "seconds": step["seconds"], "lanes": drawn, **rest}


def _memory(worker: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    ranks, items = worker["ranks"], [item for item in worker["items"] if not item["on_host"]]
    phases = ("generate", "forward", "update", "optimizer", "sync")
    parts: dict[str, list[float]] = {}
    for item in items:
        own = parts.setdefault(f"{item['role']} {item['what']}", [0.0] * len(phases))
        for place, phase in enumerate(phases):
            own[place] += item["num_bytes"] * (phase in item["phases"])
    title = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks from {ranks[0]}"
    named = [{"name": name, "bytes": values} for name, values in parts.items()]
    return {"title": title, "room": device["memory"], "phases": phases, "parts": named}
