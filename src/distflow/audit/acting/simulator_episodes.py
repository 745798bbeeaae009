"""A check of episodes in simulators, by what their processes received and returned. Only runs with such episodes import
it."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distflow.audit.recorded_step import RecordedStep, Sample, Wrong, index_of
from distflow.untrusted_files import load_image


def check_simulator(recorded: RecordedStep, sample: Sample, turns: Sequence[Any]) -> None:
    """Each reply is the actions that the simulator executed; each prompt shows its last observation; the policy's
    tokens are those up to the end of the episode; success and steps are the simulator's. Raises Wrong."""
    who = f"the simulator of sample {sample['uid']}"
    events = recorded.records[int(sample["group_index"])].events[index_of(sample)]
    called = {method: [event[2:] for event in events if event[:2] == ("called", method)] for method in ("begin", "act")}
    ((_, first),) = called["begin"]
    results = [result for _, result in called["act"]]
    options: dict[str, Any] = dict(recorded.config.actor_rollout_ref.rollout.workflow_kwargs)
    dim = len(bounds_of(options["actions"]))
    for number, turn in enumerate(turns):
        if number < len(results):
            _check_actions(who, options, turn.drawn, called["act"][number], dim)
        mask = sample["response_mask"][turn.place.start : turn.place.start + len(turn.drawn)] > 0
        steps = len(results[number]["rewards"]) if number < len(results) else 0
        is_cut = sample["finish_reason"] == "no_action" and turn is turns[-1]
        used = min(dim * (steps + is_cut), len(turn.drawn))
        if mask.tolist() != [place < used for place in range(len(turn.drawn))]:
            raise Wrong(
                f"decision {number} of sample {sample['uid']} is trained on {int(mask.sum())} tokens, not {used}"
            )
    for number, seen in enumerate([first, *(result["observation"] for result in results)][: len(turns)]):
        _check_images(who, seen["images"], sample["images"][number] if sample["images"] else ())
    _check_facts(who, sample, results)


def _check_actions(who: str, options: Mapping[str, Any], drawn: Sequence[int], call: tuple[Any, ...], dim: int) -> None:
    """The numbers of the actions, by the distance of their tokens from the first one."""
    given, result = call
    bounds, bins = bounds_of(options["actions"]), int(options["actions"].get("bins", 256))
    for step, action in enumerate(given["actions"]):
        places = [(number - a) / (b - a) * bins - 0.5 for number, (a, b) in zip(action, bounds, strict=True)]
        tokens = drawn[step * dim : (step + 1) * dim]
        between = [token - tokens[0] - (place - places[0]) for token, place in zip(tokens, places, strict=True)]
        if max(map(abs, between), default=0.0) > 1e-3 or any(abs(place - round(place)) > 1e-3 for place in places):
            raise Wrong(f"{who} executed {action}, but the policy drew {list(tokens)}")
    ends = [a or b for a, b in zip(result["terminated"], result["truncated"], strict=True)]
    if any(ends[:-1]) or not 1 <= len(ends) <= len(given["actions"]):
        raise Wrong(f"{who} executed {len(ends)} of {len(given['actions'])} actions, with ends {ends}")


def bounds_of(options: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Of each dimension."""
    if "statistics" in options:
        found = json.loads(Path(options["statistics"]).read_text("utf-8"))
        own = found[options["unnorm_key"]] if "unnorm_key" in options else next(iter(found.values()))
        low, high = own["action"]["q01"], own["action"]["q99"]
    else:
        pair, dim = (options["low"], options["high"]), options.get("action_dim", 1)
        low, high = ([each] * dim if isinstance(each, int | float) else each for each in pair)
    return list(zip(low, high, strict=True))


def _check_images(who: str, images: Mapping[str, Any], paths: Sequence[str]) -> None:
    if len(images) != len(paths):
        raise Wrong(f"{who} showed {len(images)} images, but a prompt has {len(paths)}")
    for (shape, content), path in zip(images.values(), paths, strict=True):
        found = np.asarray(load_image(path))
        if list(found.shape) != shape or found.tobytes() != base64.b64decode(content):
            raise Wrong(f"{who} showed another image than the prompt has ({path})")


def _check_facts(who: str, sample: Sample, results: Sequence[Mapping[str, Any]]) -> None:
    won = float(any(any(result["success"]) for result in results))
    steps = sum(len(result["rewards"]) for result in results)
    found = {name: sample["reward_parts"].get(name) for name in ("success", "env_steps")}
    if found != {"success": won, "env_steps": steps}:
        raise Wrong(f"{who} returned success {won:g} after {steps} steps, but the episode counts {found}")
    is_late = bool(results) and results[-1]["truncated"][-1] and not results[-1]["terminated"][-1]
    if is_late != bool(sample["truncated"]):
        raise Wrong(f"{who} says truncated={is_late}, but the episode counts as truncated={bool(sample['truncated'])}")
