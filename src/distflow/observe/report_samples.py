"""The samples that the report carries: thinned to fit, and matched before and after training."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distflow.observe.jsonlines import JSON, encode
from distflow.observe.run_reader import Timeline, read_samples, sample_splits, sample_steps

MAX_STEPS = 40
MAX_TEXT = 4000
_SHOWN_KEYS = ("uid", "prompt", "response", "ground_truth", "score", "acc", "reward_parts", "errors", "advantage")
_SHORT_KEYS = ("prompt_length", "response_length", "finish_reason", "versions", "domain")


def thin_samples(run_dir: Path, timeline: Timeline, max_bytes: int) -> dict[str, object]:
    """Samples for the table: `{"rows": [...], "num_rows", "num_steps", "all_steps"}`.

    From at most `MAX_STEPS` steps of each split, evenly chosen with the first and the last, as many evenly chosen rows
    of each as fit into its share of `max_bytes`. `num_rows` is the number in the files of the chosen steps.
    """
    chosen = [
        (split, step) for split in sample_splits(run_dir) for step in evenly(sample_steps(run_dir, split), MAX_STEPS)
    ]
    all_steps = sum(len(sample_steps(run_dir, split)) for split in sample_splits(run_dir))
    shown: list[dict[str, object]] = []
    num_rows = 0
    left_bytes = max_bytes
    for position, (split, step) in enumerate(chosen):
        rows = read_samples(run_dir, step, split, timeline)
        num_rows += len(rows)
        share = left_bytes // (len(chosen) - position)
        for row, size in _fitting(rows, share):
            shown.append({"step": step, "split": split, **row})
            left_bytes -= size
    return {"rows": shown, "num_rows": num_rows, "num_steps": len(chosen), "all_steps": all_steps}


def _fitting(rows: Sequence[Mapping[str, object]], max_bytes: int) -> Iterator[tuple[dict[str, object], int]]:
    cut = [cut_row(row) for row in rows]
    sizes = [len(encode(row)) + 40 for row in cut]
    number = len(rows)
    # Halving ends at a number of evenly spread rows that fits; one row of a step is shown whatever its size.
    while number > 1 and sum(sizes[i] for i in evenly(range(len(rows)), number)) > max_bytes:
        number = max(number * 3 // 4, 1)
    for i in evenly(range(len(rows)), number):
        yield cut[i], sizes[i]


def evenly(items: Sequence[int], number: int) -> list[int]:
    """At most `number` of the items, evenly spread, the first and the last among them."""
    if len(items) <= number:
        return list(items)
    if number == 1:
        return [items[0]]
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def cut_row(row: Mapping[str, object], max_text: int = MAX_TEXT) -> dict[str, object]:
    """The keys that the report shows, with long texts cut in their middle (the end holds the answer)."""
    cut: dict[str, object] = {}
    for key in (*_SHOWN_KEYS, *_SHORT_KEYS):
        value = row.get(key)
        if value is None:
            continue
        if key == "versions" and isinstance(value, list):
            known = [v for v in value if isinstance(v, int) and v >= 0]
            value = sorted({min(known), max(known)}) if known else []
        cut[key] = _cut(value, max_text if key in _SHOWN_KEYS else 200)
    return cut


def _cut(value: object, max_text: int) -> object:
    if isinstance(value, str) and len(value) > max_text:
        half = max_text // 2
        return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters left out …]\n{value[-half:]}"
    if isinstance(value, Mapping):
        return {str(key)[:100]: _cut(item, max_text) for key, item in list(value.items())[:50]}
    if isinstance(value, list):
        return [_cut(item, max_text) for item in value[:50]]
    return value


def before_and_after(run_dir: Path, timeline: Timeline, num_examples: int = 6) -> dict[str, object] | None:
    """The same held-out problems at the first and the last validation that kept samples; None without two.

    Problems are matched by prompt and ground truth; a problem with several answers has their mean score. Examples are
    improved ones first, then worse ones, then unchanged ones, so that one of each is among them if there is one.
    """
    splits = [split for split in sample_splits(run_dir) if split.startswith("val")]
    ends = [(split, steps[0], steps[-1]) for split in splits if len(steps := _kept_steps(run_dir, split, timeline)) > 1]
    if not ends:
        return None
    better: list[dict[str, object]] = []
    worse: list[dict[str, object]] = []
    same: list[dict[str, object]] = []
    lengths: tuple[list[float], list[float]] = ([], [])
    for split, first, last in ends:
        old, new = (_by_problem(read_samples(run_dir, step, split, timeline)) for step in (first, last))
        for key in old:
            if key in new:
                pair = {
                    "split": split,
                    "before": _answer(old[key]),
                    "after": _answer(new[key]),
                    **_problem(old[key][0]),
                }
                change = _mean_score(new[key]) - _mean_score(old[key])
                (better if change > 0 else worse if change < 0 else same).append(pair)
                for rows, kept in zip((old[key], new[key]), lengths, strict=True):
                    kept.extend(n for row in rows if isinstance(n := row.get("response_length"), int | float))
    examples = [*better[: num_examples - 2], *worse[:1], *same[:1]]
    return {
        "first": min(first for _, first, _ in ends),
        "last": max(last for _, _, last in ends),
        "num_better": len(better),
        "num_worse": len(worse),
        "num_same": len(same),
        "lengths": [sum(kept) / len(kept) for kept in lengths] if all(lengths) else None,
        "examples": examples,
    }


def num_problems(run_dir: Path, timeline: Timeline) -> int | None:
    """How many different problems the first validation that kept samples had."""
    number = 0
    for split in sample_splits(run_dir):
        steps = sample_steps(run_dir, split) if split.startswith("val") else []
        if steps:
            number += len(_by_problem(read_samples(run_dir, steps[0], split, timeline)))
    return number or None


def _kept_steps(run_dir: Path, split: str, timeline: Timeline) -> list[int]:
    """The first and the last step of a split whose samples survive."""
    steps = sample_steps(run_dir, split)
    first = next((step for step in steps if read_samples(run_dir, step, split, timeline)), None)
    last = next((step for step in reversed(steps) if read_samples(run_dir, step, split, timeline)), None)
    return sorted({step for step in (first, last) if step is not None})


def _by_problem(rows: Sequence[dict[str, JSON]]) -> dict[tuple[str, str], list[dict[str, JSON]]]:
    problems: dict[tuple[str, str], list[dict[str, JSON]]] = {}
    for row in rows:
        problems.setdefault((str(row.get("prompt", "")), str(row.get("ground_truth", ""))), []).append(row)
    return problems


def _mean_score(rows: Sequence[Mapping[str, object]]) -> float:
    """How right the answers are, penalties apart; in a folder without that their scores."""
    scores = [score for row in rows if isinstance(score := row.get("acc", row.get("score")), float)]
    return sum(scores) / len(scores) if scores else 0.0


def _problem(row: Mapping[str, object]) -> dict[str, object]:
    return {key: _cut(row.get(key), 1200) for key in ("prompt", "ground_truth", "domain") if row.get(key) is not None}


def _answer(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {"response": _cut(rows[0].get("response"), 2000), "score": _mean_score(rows), "num_answers": len(rows)}
