"""A check of episodes in simulators, by what their processes received and returned. Only runs with
such episodes import it."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distflow.audit.check import Sample, Wrong
from distflow.audit.recorded_step import RecordedStep, index_of
from distflow.untrusted_files import load_image


def check_simulator(recorded: RecordedStep, sample: Sample, turns: Sequence[Any]) -> None:
    """Each reply is the actions that the simulator executed; each prompt shows its last
    observation; the policy's tokens are those up to the end of the episode; success and steps are
    the simulator's. Raises Wrong."""
    who = f"the simulator of sample {sample['uid']}"
    events = recorded.records[int(sample["group_index"])].events[index_of(sample)]
    called = {
        method: [event[2:] for event in events if event[:2] == ("called", method)]
        for method in ("begin", "act")
    }
    ((begun, first),) = called["begin"]
    _check_start(who, recorded, sample, begun)
    results = [result for _, result in called["act"]]
    options: dict[str, Any] = dict(recorded.config.actor_rollout_ref.rollout.workflow_kwargs)
    size = tokens_of_action(options["actions"])
    head = _head(recorded, options["actions"])
    if sample.get("number_head", head) != head:
        raise Wrong(
            f"sample {sample['uid']} is scored as drawn by {sample['number_head']}, but the config "
            f"sets {head}"
        )
    for number, turn in enumerate(turns):
        if number < len(results):
            values = turn.place.generation.values if "action_values" in sample else ()
            _check_actions(who, options, turn.drawn, called["act"][number], head, values)
        mask = sample["response_mask"][turn.place.start : turn.place.start + len(turn.drawn)] > 0
        steps = len(results[number]["rewards"]) if number < len(results) else 0
        is_cut = sample["finish_reason"] == "no_action" and turn is turns[-1]
        used = min(size * (steps + is_cut), len(turn.drawn))
        if mask.tolist() != [place < used for place in range(len(turn.drawn))]:
            raise Wrong(
                f"decision {number} of sample {sample['uid']} is trained on {int(mask.sum())} "
                f"tokens, not {used}"
            )
    for number, seen in enumerate(
        [first, *(result["observation"] for result in results)][: len(turns)]
    ):
        _check_images(who, seen["images"], sample["images"][number] if sample["images"] else ())
        _check_prompt(who, recorded, turns[number], str(seen["instruction"]), options)
        if "state_tokens" in options:
            _check_state(who, recorded, turns[number], seen["state"], options["state_tokens"])
    if frames := sample["reward_extra"].get("frames"):
        last = results[-1]["observation"] if results else first
        _check_images(who, dict([*last["images"].items()][:1]), frames[-1:])
    returned = [float(event[2]["score"]) for event in events if event[0] == "returned"]
    _check_facts(who, sample, results)
    _check_score(who, sample, results, returned, options.get("score") == "return")


def tokens_of_action(options: Mapping[str, Any]) -> int:
    """Of `actions`: a flow has the noise and each denoising step of all numbers."""
    steps = int(options.get("denoising_steps", 4)) if options.get("head") == "flow_sde" else 0
    return len(bounds_of(options)) * (1 + steps)


def _head(recorded: RecordedStep, options: Mapping[str, Any]) -> dict[str, Any]:
    """The name and the fields of the head of `actions`."""
    dim = len(bounds_of(options))
    fields = {"name": "actions", "first": _first_token(recorded, options), "dim": dim}
    if (steps := tokens_of_action(options) // dim - 1) == 0:
        return {**fields, "steps": 0, "bins": 2, "noise": 0.0}
    bins = options.get("bins", 32)
    noise = options.get("noise", 0.5)
    return {**fields, "steps": steps, "bins": bins, "noise": noise}


def _first_token(recorded: RecordedStep, options: Mapping[str, Any]) -> int:
    """The token of the lowest bin, or of the first number."""
    tokenizer = recorded.run.resources.tokenizer
    first = options.get("first_token")
    if isinstance(first, str):
        return int(tokenizer.get_vocab()[first])
    size = int(options.get("bins") or 256)
    if options.get("head", "action_tokens") != "action_tokens":
        own = int(options.get("bins", 32)) if options["head"] == "flow_sde" else 2
        size = own * tokens_of_action(options) * int(options.get("action_chunks_len", 8))
    return len(tokenizer) - size if first is None else int(first)


def _check_start(
    who: str, recorded: RecordedStep, sample: Sample, begun: Mapping[str, Any]
) -> None:
    """The simulator begins with what the row says, and with the same seed as in the other episodes
    of the group."""
    record = recorded.records[int(sample["group_index"])]
    row = recorded.run.row(record.prompt_group.row)
    seeds = set()
    for events in record.events.values():
        for call in events:
            if call[:2] == ("called", "begin"):
                seeds.add(call[2]["seed"])
    seeds |= {own} if isinstance(own := (row.extra_info or {}).get("seed"), int) else set()
    if len(seeds) > 1 or begun["options"].get("ground_truth") != row.ground_truth:
        raise Wrong(
            f"{who} began with the seeds {sorted(seeds)} in the group, and with "
            f"{begun['options']!r:.200}"
        )


def _check_prompt(
    who: str, recorded: RecordedStep, turn: Any, instruction: str, options: Mapping[str, Any]
) -> None:
    tokenizer: Any = recorded.run.resources.tokenizer
    own = tokenizer(instruction, add_special_tokens=False)["input_ids"]
    shown, wanted = (
        tokenizer.decode(list(ids), skip_special_tokens=True)
        for ids in (turn.place.request.prompt_ids, own)
    )
    is_wanted = "{instruction}" in str(options.get("prompt", "{instruction}"))
    if is_wanted and "".join(wanted.split()) not in "".join(shown.split()):
        raise Wrong(
            f"{who} gives the instruction {instruction!r:.80}, but the policy was shown "
            f"{shown!r:.200}"
        )


def _check_state(
    who: str, recorded: RecordedStep, turn: Any, state: Sequence[float], options: Mapping[str, Any]
) -> None:
    """The prompt ends with the bins of the state's numbers."""
    bounds = bounds_of(options)
    bins = int(options.get("bins", 256))
    first = _first_token(recorded, options)
    shown = turn.place.request.prompt_ids[-len(bounds) :]
    for token, number, (low, high) in zip(shown, state, bounds, strict=True):
        place = (min(max(number, low), high) - low) / (high - low) * bins
        if not place - 1 - 1e-3 <= token - first <= place + 1e-3:
            raise Wrong(
                f"{who} is in the state {list(state)!r:.200}, but the policy was shown "
                f"{list(shown)!r:.200}"
            )


def _check_actions(
    who: str,
    options: Mapping[str, Any],
    drawn: Sequence[int],
    call: tuple[Any, ...],
    head: Mapping[str, Any],
    values: Sequence[float],
) -> None:
    """Each number of an action is the middle of the bin that its token stands for, or its last
    value from −1 to 1 on the scale of the bounds, clipped to them."""
    given, result = call
    bounds = bounds_of(options["actions"])
    bins = int(options["actions"].get("bins") or 256)
    for step, action in enumerate(given["actions"]):
        places = [
            (number - a) / (b - a) * bins - 0.5
            for number, (a, b) in zip(action, bounds, strict=True)
        ]
        tokens = drawn[step * len(bounds) : (step + 1) * len(bounds)]
        drew: Sequence[float] = tokens
        between = [
            token - head["first"] - place for token, place in zip(tokens, places, strict=True)
        ]
        if values:
            numbers = [
                2 * (number - a) / (b - a) - 1
                for number, (a, b) in zip(action, bounds, strict=True)
            ]
            own = slice(step * (size := tokens_of_action(options["actions"])), (step + 1) * size)
            between = _beside_bins(head, own.start, drawn[own], values[own])
            drew = values[own]
            last = [min(max(value, -1.0), 1.0) for value in drew[-len(bounds) :]]
            between += [one - other for one, other in zip(last, numbers, strict=True)]
        if max(map(abs, between), default=0.0) > 1e-3:
            raise Wrong(f"{who} executed {action}, but the policy drew {list(drew)}")
    ends = [a or b for a, b in zip(result["terminated"], result["truncated"], strict=True)]
    if any(ends[:-1]) or not 1 <= len(ends) <= len(given["actions"]):
        raise Wrong(
            f"{who} executed {len(ends)} of {len(given['actions'])} actions, with ends {ends}"
        )


def _beside_bins(
    head: Mapping[str, Any], start: int, tokens: Sequence[int], values: Sequence[float]
) -> list[float]:
    """How far each token of numbers from place `start` on is from the one of its value, in
    tokens."""
    bins = int(head["bins"])
    far = list[float]()
    for place, (token, value) in enumerate(zip(tokens, values, strict=True), start):
        wanted = min(max((value + 2) / 4 * bins, 0.0), bins - 1e-6) if head["steps"] else 0.0
        own = token - head["first"] - bins * place
        far.append(max(own - wanted, wanted - own - 1, 0.0) if head["steps"] else float(own))
    return far


def bounds_of(options: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Of each dimension."""
    if "statistics" in options:
        found = json.loads(Path(options["statistics"]).read_text("utf-8"))
        own = (
            found[options["unnorm_key"]] if "unnorm_key" in options else next(iter(found.values()))
        )
        low = own["action"]["q01"]
        high = own["action"]["q99"]
    else:
        pair = (options["low"], options["high"])
        dim = options.get("action_dim", 1)
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
        raise Wrong(
            f"{who} returned success {won:g} after {steps} steps, but the episode counts {found}"
        )
    is_late = bool(results) and results[-1]["truncated"][-1] and not results[-1]["terminated"][-1]
    if is_late != bool(sample["truncated"]):
        raise Wrong(
            f"{who} says truncated={is_late}, but the episode counts as "
            f"truncated={bool(sample['truncated'])}"
        )


def _check_score(
    who: str,
    sample: Sample,
    results: Sequence[Mapping[str, Any]],
    returned: Sequence[float],
    is_return: bool,
) -> None:
    paid = math.fsum(reward for result in results for reward in result["rewards"])
    told = sample["reward_parts"]
    wanted = paid if is_return else told["success"]
    found = [(told.get("return", math.nan), paid), *((score, wanted) for score in returned)]
    if not all(abs(one - other) <= 1e-6 * max(1.0, abs(other)) for one, other in found):
        raise Wrong(
            f"{who} returned rewards of {paid:g} in all, but the episode counts {found[0][0]:g}: "
            f"{returned}"
        )
