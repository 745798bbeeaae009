"""The first and the last validation of a run, as their samples tell of them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distflow.observe.crash_safe_files import JSON
from distflow.observe.report.samples import cut
from distflow.observe.run_reader import Timeline, read_samples, sample_splits, sample_steps

Row = Mapping[str, JSON]
_MAX_PROMPT = 1200
_MAX_RESPONSE = 2000


class Validation(NamedTuple):
    step: int

    problems: dict[tuple[str, ...], list[Row]]
    """The responses to each."""


Ends = tuple[Validation, Validation]
"""The first and the last validation; the same one if there is only one."""


def read_validations(run_dir: Path, timeline: Timeline) -> list[Ends]:
    """Of each split of validations, the ends of those whose samples survive."""
    found = []
    for split in sample_splits(run_dir):
        steps = sample_steps(run_dir, split)
        first = None
        if split.startswith("val"):
            first = _first_there(run_dir, split, steps, timeline)

        if first is None:
            continue
        last = _first_there(run_dir, split, steps[::-1], timeline)
        found.append((first, last or first))

    return found


def _first_there(
    run_dir: Path, split: str, steps: Iterable[int], timeline: Timeline
) -> Validation | None:
    for step in steps:
        rows = read_samples(run_dir, step, split, timeline)
        if rows:
            return Validation(step, _by_problem(rows))
    return None


def _by_problem(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """By prompt and ground truth; without a ground truth by their rows, as in a simulator, whose
    tasks differ by their seeds."""
    problems: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = [str(row.get(name, "")) for name in ("prompt", "ground_truth", "images")]
        if not row.get("ground_truth"):
            key.append(str(row.get("uid")).rpartition("-")[0])
        problems.setdefault(tuple(key), []).append(row)

    return problems


def num_problems(validations: Sequence[Ends]) -> dict[str, int]:
    """The number of distinct problems in the first validation: of "all", and of each domain."""
    counts: Counter[str] = Counter()
    for first, _ in validations:
        for rows in first.problems.values():
            counts[str(rows[0].get("domain") or "")] += 1
        counts["all"] += len(first.problems)

    return dict(counts)


def before_and_after(validations: Sequence[Ends]) -> dict[str, object] | None:
    """The same problems at the first and the last validation; None without two.

    A problem with several responses has the mean of their scores; one without a score at either
    time is left out. Examples: improved ones first, then worse and unchanged ones, at least one of
    each if possible."""
    pairs: dict[str, list[dict[str, object]]] = {"better": [], "worse": [], "same": []}
    steps: list[int] = []
    for first, last in validations:
        if first.step == last.step:
            continue

        steps += [first.step, last.step]
        for key, rows in first.problems.items():
            then = _mean_score(rows)
            now = _mean_score(last.problems.get(key, ()))
            if then is None or now is None:
                continue

            kind = "same"
            if now != then:
                kind = "better" if now > then else "worse"
            pairs[kind].append(
                {
                    "prompt": cut(rows[0].get("prompt"), _MAX_PROMPT),
                    "ground_truth": cut(rows[0].get("ground_truth"), _MAX_PROMPT),
                    "before": _response(rows, then),
                    "after": _response(last.problems[key], now),
                }
            )

    if not steps:
        return None

    numbers = {f"num_{kind}": len(found) for kind, found in pairs.items()}
    examples = [*pairs["better"][:4], *pairs["worse"][:1], *pairs["same"][:1]]
    return {"first": min(steps), "last": max(steps), **numbers, "examples": examples}


def _mean_score(rows: Sequence[Row]) -> float | None:
    """The mean correctness of the responses, without penalties (`acc`), else the mean score. None
    without a score."""
    scores = []
    for row in rows:
        score = row.get("score") if row.get("acc") is None else row.get("acc")
        if isinstance(score, float) and not row.get("errors"):
            scores.append(score)

    return sum(scores) / len(scores) if scores else None


def _response(rows: Sequence[Row], score: float) -> dict[str, object]:
    response = cut(rows[0].get("response"), _MAX_RESPONSE)
    return {"response": response, "score": score, "num_responses": len(rows)}
