"""Held-out problems before and after training, matched."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from distflow.observe.jsonlines import JSON
from distflow.observe.report_answers import cut
from distflow.observe.run_reader import Timeline, read_samples, sample_splits, sample_steps


def before_and_after(run_dir: Path, timeline: Timeline, num_examples: int = 6) -> dict[str, object] | None:
    """The same held-out problems at the first and the last validation that kept samples; None without two.

    Problems are matched by prompt and ground truth; a problem with several answers has the mean score of those with a
    verdict; one without any, then or now, is neither better nor worse (`num_unjudged`). Examples are
    improved ones first, then worse ones, then unchanged ones, so that one of each is among them if there is one.
    """
    splits = [split for split in sample_splits(run_dir) if split.startswith("val")]
    ends = [(split, steps[0], steps[-1]) for split in splits if len(steps := _kept_steps(run_dir, split, timeline)) > 1]
    if not ends:
        return None
    better: list[dict[str, object]] = []
    worse: list[dict[str, object]] = []
    same: list[dict[str, object]] = []
    num_unjudged = 0
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
                then, now = _mean_score(old[key]), _mean_score(new[key])
                if then is None or now is None:
                    num_unjudged += 1
                else:
                    (better if now > then else worse if now < then else same).append(pair)
                for rows, kept in zip((old[key], new[key]), lengths, strict=True):
                    kept.extend(n for row in rows if isinstance(n := row.get("response_length"), int | float))
    examples = [*better[: num_examples - 2], *worse[:1], *same[:1]]
    return {
        "first": min(first for _, first, _ in ends),
        "last": max(last for _, _, last in ends),
        "num_better": len(better),
        "num_worse": len(worse),
        "num_same": len(same),
        "num_unjudged": num_unjudged,
        "lengths": [sum(kept) / len(kept) for kept in lengths] if all(lengths) else None,
        "examples": examples,
    }


def num_problems(run_dir: Path, timeline: Timeline) -> dict[str, int]:
    """How many different problems the first validation that kept samples had: in "all", and of each domain."""
    counts: Counter[str] = Counter()
    for split in sample_splits(run_dir):
        steps = _kept_steps(run_dir, split, timeline) if split.startswith("val") else []
        if steps:
            problems = _by_problem(read_samples(run_dir, steps[0], split, timeline)).values()
            counts.update(str(rows[0].get("domain", "")) for rows in problems)
            counts["all"] += len(problems)
    return dict(counts)


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


def _mean_score(rows: Sequence[Mapping[str, object]]) -> float | None:
    """How right the answers are, penalties apart; in a folder without that their scores. None without a verdict."""
    judged = [row for row in rows if not row.get("errors")]
    scores = [score for row in judged if isinstance(score := row.get("acc", row.get("score")), float)]
    return sum(scores) / len(scores) if scores else None


def _problem(row: Mapping[str, object]) -> dict[str, object]:
    return {key: cut(row.get(key), 1200) for key in ("prompt", "ground_truth", "domain") if row.get(key) is not None}


def _answer(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {"response": cut(rows[0].get("response"), 2000), "score": _mean_score(rows), "num_answers": len(rows)}
