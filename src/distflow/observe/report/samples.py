"""The samples in the report: responses with long texts cut, thinned by whole groups to fit;
validations compared."""

import io
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.errors import UserError
from distflow.observe import run_reader
from distflow.observe.crash_safe_files import JSON, encode, to_number
from distflow.observe.reward_remarks import failure, remarks
from distflow.observe.sample_files import DROPPED
from distflow.untrusted_files import load_image, read_file

MAX_TEXT = 4000
MAX_STEPS = 40
_MAX_FILES = 120
_MAX_BYTES = 256 * 2**20
_MAX_RESPONSES = 256
_MAX_ENDS = 100
_LEAST_TEXT = 100
_FAILED_FIRST = 2
_MAX_IMAGE_BYTES = 64 * 2**10
_MAX_IMAGES = 8
"""Of a prompt."""
_MAX_VIDEOS = 32
_MAX_FRAMES = 64
_VIDEO_SIDE = 160
_FRAME_MS = 400
_LAST_MS = 1600
_TEXT_KEYS = ("response", "conversation", "errors", "reward_parts")
_KEYS = (
    "uid",
    "score",
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
    if isinstance(versions := row.get("versions"), list):
        known = [v for v in versions if isinstance(v, int) and v >= 0]
        shown["versions"] = sorted({min(known), max(known)}) if known else []
    if row.get("errors"):
        shown["score"] = shown["acc"] = None
    if shown["acc"] == shown["score"]:
        shown["acc"] = None
    for key in ("score", "advantage", "masked"):
        if isinstance(value := shown[key], float) and math.isfinite(value):
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


def thin_samples(run_dir: Path, timeline: run_reader.Timeline, max_bytes: int) -> dict[str, object]:
    """Whole groups of responses, with the numbers of groups and responses in the files read.

    Takes at most `MAX_STEPS` steps of each split, evenly spaced including the first and the last,
    and of each as many groups as fit into its share of `max_bytes`, cutting the texts of large
    ones: a few with reward errors, then evenly spaced ones of each domain.
    """
    splits = (*run_reader.sample_splits(run_dir), DROPPED)
    files = {split: run_reader.sample_steps(run_dir, split) for split in splits}
    most = min(MAX_STEPS, max(_MAX_FILES // len(files), 1))
    chosen = [(split, step) for split, steps in files.items() for step in evenly(steps, most)]
    return _shown_samples(run_dir, timeline, chosen, sum(map(len, files.values())), max_bytes)


def samples_of_step(
    run_dir: Path, timeline: run_reader.Timeline, split: str, step: int, max_bytes: int
) -> dict[str, object]:
    """As `thin_samples`, of one step."""
    return _shown_samples(run_dir, timeline, [(split, step)], 1, max_bytes)


def _shown_samples(
    run_dir: Path,
    timeline: run_reader.Timeline,
    chosen: Sequence[tuple[str, int]],
    num_all: int,
    max_bytes: int,
) -> dict[str, object]:
    """chosen: splits and steps. num_all: sample files that there are to choose from."""
    read_bytes = min(run_reader.MAX_SAMPLE_BYTES, _MAX_BYTES // max(len(chosen), 1))
    for_images = max_bytes // 3 if (run_dir / "data" / "images").is_dir() else 0
    max_bytes -= for_images
    left_bytes = max_bytes
    shown: list[SampleGroup] = []
    num_groups = 0
    num_responses = 0
    for position, (split, step) in enumerate(chosen):
        rows = run_reader.read_samples(run_dir, step, split, timeline, read_bytes)
        share = left_bytes // (len(chosen) - position)
        groups = sample_groups(rows, step, split)
        num_groups += len(groups)
        num_responses += len(rows)
        sizes = [embedded_size(group) for group in groups]
        if max(sizes, default=0) > share:
            most_text = max(MAX_TEXT * share // max(sizes), _LEAST_TEXT)
            groups = sample_groups(rows, step, split, most_text)
            sizes = [embedded_size(group) for group in groups]
        for place in _chosen(groups, sizes, share):
            if sizes[place] <= left_bytes + max_bytes:
                shown.append(groups[place])
                left_bytes -= sizes[place]
    return {
        "groups": shown,
        "images": add_pictures(run_dir, shown, for_images),
        "num_groups": num_groups,
        "num_responses": num_responses,
        "num_files": len(chosen),
        "all_files": num_all,
    }


def add_pictures(run_dir: Path, groups: Sequence[SampleGroup], max_bytes: int) -> dict[str, str]:
    """Put animations into the groups, and return the images of their prompts, as texts in base 64
    by their names. Each kind takes at most half of the bytes."""
    store = run_dir / "data" / "images"
    _videos(store, groups, max_bytes // 2)
    return _images(store, groups, max_bytes // 2)


def sample_groups(
    rows: Sequence[Mapping[str, object]], step: int, split: str, max_text: int = MAX_TEXT
) -> list[SampleGroup]:
    """The rows of a file by prompt group according to `uid` ("17-3" is response 3 of group 17),
    else by prompt."""
    groups: dict[tuple[str, ...], list[Mapping[str, object]]] = {}
    for row in rows:
        name, dash, number = str(row.get("uid", "")).rpartition("-")
        in_group = dash and number.isdigit()
        key = (
            (str(row.get("set")), name)
            if in_group
            else ("", str(row.get("prompt")), str(row.get("ground_truth")))
        )
        groups.setdefault(key, []).append(row)
    return [
        {
            "step": step,
            "split": split,
            "place": place,
            "name": key[1] if len(key) == 2 else "",
            "prompt": cut(responses[0].get("prompt"), max_text),
            "truth": cut(responses[0].get("ground_truth"), max_text),
            "domain": cut(responses[0].get("domain"), 200),
            "prompt_length": cut(responses[0].get("prompt_length"), 200),
            "images": _names_of_images(responses[0].get("images")),
            "responses": [
                cut_response(response, max_text) for response in responses[:_MAX_RESPONSES]
            ],
            "videos": _acted(responses[:_MAX_RESPONSES]),
        }
        for place, (key, responses) in enumerate(groups.items())
    ]


def _acted(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The frames and the instruction of an episode with frames that succeeded, and of one that
    did not."""
    found = dict[bool, dict[str, Any]]()
    for place, row in enumerate(rows):
        extra = row.get("extra")
        parts = row.get("reward_parts")
        if not isinstance(extra, Mapping) or not isinstance(parts, Mapping):
            continue
        frames = extra.get("frames")
        if not isinstance(frames, list):
            continue
        names = [Path(path).name[:100] for path in frames[:_MAX_FRAMES] if isinstance(path, str)]
        instruction = cut(str(extra.get("instruction", "")), 200)
        kept = {"response": place, "frames": names, "instruction": instruction}
        found.setdefault(parts.get("success") == 1.0, kept)
    return [*found.values()]


def _videos(folder: Path, groups: Sequence[SampleGroup], max_bytes: int) -> None:
    """Animations of these groups' episodes in place of their frames, WebP as text in base 64, as
    many as fit: of the last steps first."""
    left = _MAX_VIDEOS
    for group in sorted(groups, key=lambda group: -int(group["step"])):
        group["videos"], left = group["videos"][:left], left - len(group["videos"][:left])
        for video in group["videos"]:
            content = b""
            with suppress(OSError, UserError, ImportError):
                content = (
                    _animated([folder / name for name in video.pop("frames")])
                    if max_bytes > 0
                    else b""
                )
            max_bytes -= len(content) * 4 // 3
            video["webp"] = b64encode(content).decode() if max_bytes >= 0 else ""
        group["videos"] = [video for video in group["videos"] if video.get("webp")]


def _animated(paths: Sequence[Path]) -> bytes:
    """The images one after another, at most `_VIDEO_SIDE` pixels wide and high, small ones
    enlarged. Raises OSError, UserError, ImportError."""
    if not paths:
        return b""
    from PIL import Image

    frames = [load_image(str(path)) for path in paths]
    times = _VIDEO_SIDE // max(frames[0].size)
    most = (_VIDEO_SIDE, _VIDEO_SIDE)
    for place, frame in enumerate(frames):
        if times > 1:
            frames[place] = frame.resize(
                [times * side for side in frame.size], Image.Resampling.NEAREST
            )
        else:
            frame.thumbnail(most)
    durations = [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS]
    memory = io.BytesIO()
    more = {"save_all": True, "append_images": frames[1:], "duration": durations, "loop": 0}
    frames[0].save(memory, format="WEBP", lossless=True, **more)
    return memory.getvalue()


def _names_of_images(paths: object) -> list[str]:
    found = paths if isinstance(paths, list) else []
    return [Path(path).name[:100] for path in found[:_MAX_IMAGES] if isinstance(path, str)]


def _images(folder: Path, groups: Sequence[SampleGroup], max_bytes: int) -> dict[str, str]:
    """Small images of these groups' prompts as text in base 64, by their names, as many as fit."""
    found: dict[str, str] = {}
    most = max(_MAX_IMAGE_BYTES, max_bytes // _MAX_IMAGES)
    for name in dict.fromkeys(name for group in groups for name in group["images"]):
        with suppress(OSError):
            content = read_file(folder / name, folder, most)
            max_bytes -= len(content) * 4 // 3 + len(name)
            if max_bytes < 0:
                break
            if content.startswith(b"\x89PNG"):
                found[name] = b64encode(content).decode()
    return found


def _chosen(groups: Sequence[SampleGroup], sizes: Sequence[int], max_bytes: int) -> list[int]:
    """Positions of groups that fit together, ascending: first failures, which are rare, then evenly
    spaced ones."""
    by_domain = sorted(range(len(groups)), key=lambda i: str(groups[i]["domain"]))
    failed = []
    for i in by_domain:
        if any("failure" in response for response in groups[i]["responses"]):
            failed.append(i)
    failed = failed[:_FAILED_FIRST]
    if sum(sizes[i] for i in failed) > max_bytes // 2:
        failed = []
    others = [i for i in by_domain if i not in failed]
    room = max_bytes - sum(sizes[i] for i in failed)
    chosen = _fitting([sizes[i] for i in others], room)
    return sorted([*failed, *(others[i] for i in chosen)])


def _fitting(sizes: Sequence[int], max_bytes: int) -> list[int]:
    """Evenly spaced positions of parts that fit together, at least one."""
    number = len(sizes)
    while number > 1 and sum(sizes[i] for i in evenly(range(len(sizes)), number)) > max_bytes:
        number = max(number * 3 // 4, 1)
    return evenly(range(len(sizes)), number) if sizes else []


def evenly(items: Sequence[int], number: int) -> list[int]:
    """At most `number` of the items, evenly spaced, including the first and the last."""
    if len(items) <= number:
        return list(items)
    if number == 1:
        return [items[0]]
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def before_and_after(run_dir: Path, timeline: run_reader.Timeline) -> dict[str, object] | None:
    """The same validation problems at the first and the last validation that kept samples; None
    without two.

    Problems are matched by prompt and ground truth, without a ground truth by their rows; a problem
    with several responses has the mean of their scores; one without a score at either time is
    neither better nor worse (`num_unscored`). Examples: improved ones first, then worse and
    unchanged ones, at least one of each if possible."""
    compared = _Compared()
    for split in run_reader.sample_splits(run_dir):
        steps = _end_steps(run_dir, split, timeline) if split.startswith("val") else []
        if len(steps) < 2:
            continue
        compared.first.append(steps[0])
        compared.last.append(steps[-1])
        old = _by_problem(run_reader.read_samples(run_dir, steps[0], split, timeline))
        new = _by_problem(run_reader.read_samples(run_dir, steps[-1], split, timeline))
        for key, rows in old.items():
            if key in new:
                compared.add(split, rows, new[key])
    return compared.as_json() if compared.first else None


@dataclass
class _Compared:
    """Validation problems at two validations."""

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    pairs: dict[str, list[dict[str, object]]] = field(
        default_factory=lambda: {"better": [], "worse": [], "same": [], "unscored": []}
    )
    lengths: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Tokens of each response, at either."""

    def add(
        self, split: str, old: Sequence[dict[str, JSON]], new: Sequence[dict[str, JSON]]
    ) -> None:
        then = _mean_score(old)
        now = _mean_score(new)
        if then is None or now is None:
            kind = "unscored"
        elif now == then:
            kind = "same"
        else:
            kind = "better" if now > then else "worse"
        pair: dict[str, object] = {
            "split": split,
            "before": _response(old, then),
            "after": _response(new, now),
        }
        for name in ("prompt", "ground_truth", "domain"):
            value = cut(old[0].get(name), 1200)
            if value is not None:
                pair[name] = value
        self.pairs[kind].append(pair)
        for rows, kept in zip((old, new), self.lengths, strict=True):
            for row in rows:
                length = to_number(row.get("response_length"))
                if length is not None:
                    kept.append(length)

    def as_json(self) -> dict[str, object]:
        pairs = self.pairs
        numbers = {f"num_{kind}": len(found) for kind, found in pairs.items()}
        means = None
        if all(self.lengths):
            means = [sum(kept) / len(kept) for kept in self.lengths]
        return {
            "first": min(self.first),
            "last": max(self.last),
            **numbers,
            "lengths": means,
            "examples": [*pairs["better"][:4], *pairs["worse"][:1], *pairs["same"][:1]],
        }


def num_problems(run_dir: Path, timeline: run_reader.Timeline) -> dict[str, int]:
    """The number of distinct problems in the first validation that kept samples: of "all", and of
    each domain."""
    counts: Counter[str] = Counter()
    for split in run_reader.sample_splits(run_dir):
        steps = _end_steps(run_dir, split, timeline) if split.startswith("val") else []
        if steps:
            problems = _by_problem(
                run_reader.read_samples(run_dir, steps[0], split, timeline)
            ).values()
            counts.update(str(rows[0].get("domain") or "") for rows in problems)
            counts["all"] += len(problems)
    return dict(counts)


def _end_steps(run_dir: Path, split: str, timeline: run_reader.Timeline) -> list[int]:
    """The first and the last step of a split whose samples survive."""
    steps = run_reader.sample_steps(run_dir, split)

    def is_there(step: int) -> bool:
        return bool(run_reader.read_samples(run_dir, step, split, timeline))

    first = next(filter(is_there, steps[:_MAX_ENDS]), None)
    last = next(filter(is_there, steps[: -_MAX_ENDS - 1 : -1]), None)
    return sorted({step for step in (first, last) if step is not None})


def _by_problem(rows: Sequence[dict[str, JSON]]) -> dict[tuple[str, ...], list[dict[str, JSON]]]:
    problems: dict[tuple[str, ...], list[dict[str, JSON]]] = {}
    for row in rows:
        key = tuple(str(row.get(name, "")) for name in ("prompt", "ground_truth", "images"))
        if not row.get("ground_truth"):  # as in a simulator, whose tasks differ by their seeds
            key = (*key, str(row.get("uid")).rpartition("-")[0])
        problems.setdefault(key, []).append(row)
    return problems


def _mean_score(rows: Sequence[Mapping[str, object]]) -> float | None:
    """The mean correctness of the responses, without penalties (`acc`), else the mean score. None
    without a score."""
    scores = []
    for row in rows:
        score = row.get("score") if row.get("acc") is None else row.get("acc")
        if isinstance(score, float) and not row.get("errors"):
            scores.append(score)
    return sum(scores) / len(scores) if scores else None


def _response(rows: Sequence[Mapping[str, object]], score: float | None) -> dict[str, object]:
    return {
        "response": cut(rows[0].get("response"), 2000),
        "score": score,
        "num_responses": len(rows),
    }
