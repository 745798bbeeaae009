"""The samples in the report: long texts cut, thinned by whole groups to fit."""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from distflow.observe import run_reader
from distflow.observe.crash_safe_files import encode
from distflow.observe.reward_remarks import failure, remarks
from distflow.observe.sample_files import DROPPED
from distflow.untrusted_files import read_file

MAX_TEXT = 4000
MAX_STEPS = 40
_MAX_BYTES = 256 * 2**20
_MAX_RESPONSES = 256
_LEAST_TEXT = 100
_MAX_IMAGE_BYTES = 64 * 2**10
_MAX_IMAGES = 8
"""Of a prompt."""
_TEXT_KEYS = ("response", "conversation", "errors", "reward_parts")
_KEYS = (
    "uid",
    "score",
    "reward",
    "acc",
    "advantage",
    "masked",
    "response_length",
    "finish_reason",
    "versions",
    "kind",
    "dropped",
)


def cut_response(row: Mapping[str, object], max_text: int = MAX_TEXT) -> dict[str, object]:
    """The keys that the report shows, with long texts cut in the middle (the end holds the final
    answer).

    The score of a reward error and empty values are omitted.
    """
    shown = {key: cut(row.get(key), max_text) for key in _TEXT_KEYS}
    shown |= {key: cut(row.get(key), 200) for key in _KEYS}
    said = remarks(row)
    said.pop("frames", None)
    shown["remarks"] = cut(said, max_text)
    shown["failure"] = failure(row)

    versions = row.get("versions")
    if isinstance(versions, list):
        known = [version for version in versions if isinstance(version, int) and version >= 0]
        shown["versions"] = sorted({min(known), max(known)}) if known else []

    if row.get("errors"):
        shown["score"] = None
        shown["reward"] = None
        shown["acc"] = None

    if shown["acc"] == shown["score"]:
        shown["acc"] = None

    for key in ("score", "reward", "advantage", "masked"):
        value = shown[key]
        if isinstance(value, float) and math.isfinite(value):
            shown[key] = float(f"{value:.5g}")

    if not shown["masked"]:
        shown["masked"] = None
    return {key: value for key, value in shown.items() if value not in (None, [], {})}


def embedded_size(value: object) -> int:
    """The value's size in the page in bytes, with "<" escaped."""
    text = encode(value)
    return len(text) + 5 * text.count(b"<")


def cut(value: object, max_text: int, max_entries: int = 50) -> object:
    """The value with texts cut to about `max_text` characters, lists and mappings to
    `max_entries`."""
    if isinstance(value, str) and len(value) > max_text:
        half = max_text // 2
        return (
            f"{value[:half]}\n[… {len(value) - 2 * half:,} characters left out …]\n{value[-half:]}"
        )
    if isinstance(value, Mapping):
        kept = list(value.items())[:max_entries]
        return {str(key)[:100]: cut(item, max_text, max_entries) for key, item in kept}
    if isinstance(value, list):
        return [cut(item, max_text, max_entries) for item in value[:max_entries]]

    return value


SampleGroup = dict[str, Any]
"""The responses to one prompt in one step or validation: everything about it in the sample file."""


def thin_samples(
    run_dir: Path,
    timeline: run_reader.Timeline,
    max_bytes: int,
    place: tuple[str, int] | None = None,
) -> dict[str, object]:
    """Whole groups of responses, with the numbers of groups and responses in the files read.

    Takes at most `MAX_STEPS` steps of each split, evenly spaced including the first and the last,
    and of each as many evenly spaced groups as fit into its share of `max_bytes`, cutting the texts
    of large ones. place: a split and a step, of which alone samples are wanted.
    """
    files = _places(run_dir) if place is None else [place]
    chosen = []
    for split in dict.fromkeys(split for split, _ in files):
        chosen += evenly([file for file in files if file[0] == split], MAX_STEPS)
    read_bytes = min(run_reader.MAX_SAMPLE_BYTES, _MAX_BYTES // max(len(chosen), 1))

    for_images = 0
    if (run_dir / "data" / "images").is_dir():
        for_images = max_bytes // 3

    left_bytes = max_bytes - for_images
    shown: list[SampleGroup] = []
    num_groups = 0
    num_responses = 0
    for position, (split, step) in enumerate(chosen):
        rows = run_reader.read_samples(run_dir, step, split, timeline, read_bytes)
        groups = sample_groups(rows, step, split)
        num_groups += len(groups)
        num_responses += len(rows)
        share = max(left_bytes // (len(chosen) - position), 1)

        largest = max(map(embedded_size, groups), default=1)
        if largest > share:
            groups = sample_groups(rows, step, split, max(MAX_TEXT * share // largest, _LEAST_TEXT))
            largest = max(map(embedded_size, groups))

        fitting = evenly(groups, max(share // largest, 1))
        left_bytes -= sum(map(embedded_size, fitting))
        shown += fitting

    return {
        "groups": shown,
        "images": prompt_images(run_dir, shown, for_images),
        "num_groups": num_groups,
        "num_responses": num_responses,
        "num_files": len(chosen),
        "all_files": len(files),
    }


def _places(run_dir: Path) -> list[tuple[str, int]]:
    """The splits and steps that have samples."""
    found = []
    for split in (*run_reader.sample_splits(run_dir), DROPPED):
        found += [(split, step) for step in run_reader.sample_steps(run_dir, split)]
    return found


def prompt_images(run_dir: Path, groups: Sequence[SampleGroup], max_bytes: int) -> dict[str, str]:
    """Small images of these groups' prompts as text in base 64, by their names, as many as fit."""
    folder = run_dir / "data" / "images"
    most = max(_MAX_IMAGE_BYTES, max_bytes // _MAX_IMAGES)
    found: dict[str, str] = {}

    names = chain.from_iterable(group["images"] for group in groups)
    for name in dict.fromkeys(names):
        try:
            content = read_file(folder / name, folder, most)
        except OSError:
            continue

        if content.startswith(b"\x89PNG"):
            text = b64encode(content).decode()
            max_bytes -= len(text) + len(name)
            if max_bytes < 0:
                break
            found[name] = text

    return found


def sample_groups(
    rows: Sequence[Mapping[str, object]], step: int, split: str, max_text: int = MAX_TEXT
) -> list[SampleGroup]:
    """The rows of a file by prompt group according to `uid` ("17-3" is response 3 of group 17),
    else by prompt."""
    groups: dict[tuple[str, ...], list[Mapping[str, object]]] = {}
    for row in rows:
        name, dash, number = str(row.get("uid", "")).rpartition("-")
        if dash and number.isdigit():
            key: tuple[str, ...] = (str(row.get("set")), name)
        else:
            key = ("", str(row.get("prompt")), str(row.get("ground_truth")))
        groups.setdefault(key, []).append(row)

    found = []
    for place, (key, responses) in enumerate(groups.items()):
        first = responses[0]
        shown = responses[:_MAX_RESPONSES]
        images = first.get("images")
        paths = images[:_MAX_IMAGES] if isinstance(images, list) else []
        group = {
            "step": step,
            "split": split,
            "place": place,
            "name": key[1] if len(key) == 2 else "",
            "prompt": cut(first.get("prompt"), max_text),
            "truth": cut(first.get("ground_truth"), max_text),
            "domain": cut(first.get("domain"), 200),
            "prompt_length": cut(first.get("prompt_length"), 200),
            "images": [Path(path).name[:100] for path in paths if isinstance(path, str)],
            "responses": [cut_response(response, max_text) for response in shown],
        }
        found.append(group)

    return found


def evenly(items: Sequence[Any], number: int) -> list[Any]:
    """At most `number` of the items, evenly spaced, including the first and the last."""
    if len(items) <= number:
        return list(items)
    if number == 1:
        return [items[0]]
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]
