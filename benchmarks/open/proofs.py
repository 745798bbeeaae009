"""Whether a system did the work that it reports. Each proof names what it found."""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replay import Replay, Row, accuracy, encode, load_reward, replay
from tasks import EOS, Task, read_rows, read_task
from transformers import AutoTokenizer

FIRST_STEP = 0.01
"""Relative difference of the first loss and gradient norm."""
DRAWN = 5.0
"""Standard deviations of a stretch of updates."""
UPDATED = {"float32": 0.02, "bfloat16": 0.5}
"""Distance of saved weights from those of the replay, over the way that these went since the
weights saved before: the median."""
FURTHEST = {"float32": 0.2, "bfloat16": 1.0}
"""The largest. Differences of rounding grow fast where the loss falls steeply."""


class Refused(Exception):
    """A proof failed: its name, and what it found."""


@dataclass(frozen=True)
class Work:
    """What a system left."""

    task: Task
    folder: Path
    updates: list[list[Row]]
    losses: list[float]
    norms: list[float]
    saved: dict[int, Path]
    """The folder of weights after an update, by its number from 1."""

    @property
    def weights(self) -> Path:
        """The last ones."""
        return self.saved[self.task.updates]


def read_work(folder: Path, out: Path) -> Work:
    """Raises Refused for records that cannot be read."""
    try:
        lines = [json.loads(line) for line in (out / "updates.jsonl").read_text().splitlines()]
        task = read_task(folder)
        return Work(
            task=task,
            folder=folder,
            updates=[line["rows"] for line in lines],
            losses=[float(line["loss"]) for line in lines],
            norms=[float(line["grad_norm"]) for line in lines],
            saved=_saved(task, out),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"records: updates.jsonl cannot be read: {error!r}") from error


def _saved(task: Task, out: Path) -> dict[int, Path]:
    numbers = {*range(task.saved_every, task.updates, task.saved_every), task.updates}
    found = {number: out / "weights" / str(number) for number in sorted(numbers)}
    missing = [number for number, path in found.items() if not (path / "config.json").exists()]
    if missing:
        raise Refused(f"records: there are no weights of update {missing[0]}")
    return found


def prove(work: Work, precision: str) -> dict[str, float]:
    """Figures of a result that was proven. Raises Refused."""
    _rows_in_order(work)
    if work.task.kind == "grpo":
        _responses(work)
        _rewards(work)

    try:
        found = replay(work.task, work.folder, work.updates, work.saved)
    except (OSError, ValueError) as error:
        raise Refused(f"weights: saved ones cannot be read: {error}") from error

    _first_step(work, found)
    if work.task.kind == "grpo":
        _drawn_by_the_law(found)
    distance = _weights(work, found, precision)

    reached = accuracy(work.task, work.folder, work.weights)
    if reached < work.task.target:
        raise Refused(f"target: the saved weights reach {reached:.3f} of {work.task.target}")
    return {"accuracy": reached, "distance": distance, "tokens": _num_tokens(work)}


def _rows_in_order(work: Work) -> None:
    """Each update has the rows that are its own, token by token."""
    task = work.task
    if len(work.updates) != task.updates:
        raise Refused(f"rows: {len(work.updates)} updates instead of {task.updates}")

    for number, (given, expected) in enumerate(zip(work.updates, _expected(work), strict=True)):
        wanted = sorted(json.dumps(row, sort_keys=True) for row in expected for _ in _times(task))
        names = list(expected[0])
        had = sorted(
            json.dumps({name: row.get(name) for name in names}, sort_keys=True) for row in given
        )
        if had != wanted:
            different = sum(text not in wanted for text in had)
            raise Refused(
                f"rows: update {number} has {len(had)} rows, {different} of them not its own; it "
                f"must have {len(wanted)}"
            )


def _expected(work: Work) -> Iterator[list[Row]]:
    """The tokens of each update's rows; of a task that draws responses those of the prompts."""
    task = work.task
    tokenizer = AutoTokenizer.from_pretrained(work.folder / "model")
    rows = [encode(tokenizer, row) for row in read_rows(work.folder / "rows.jsonl")]
    if task.kind == "grpo":
        rows = [{"prompt_ids": row["prompt_ids"]} for row in rows]
    for start in range(0, len(rows), task.rows):
        yield rows[start : start + task.rows]


def _times(task: Task) -> range:
    return range(task.samples)


def _responses(work: Work) -> None:
    """A response ends by its end token or at the longest length, and the samples of a prompt are
    together."""
    longest = work.task.longest
    for number, rows in enumerate(work.updates):
        for place, row in enumerate(rows):
            ids = row["response_ids"]
            ends = ids[-1:] == [EOS]
            if not 0 < len(ids) <= longest or (not ends and len(ids) < longest) or EOS in ids[:-1]:
                raise Refused(
                    f"responses: update {number} has one of {len(ids)} tokens that does not end "
                    f"as the task says"
                )
            first = rows[place - place % work.task.samples]
            if row["prompt_ids"] != first["prompt_ids"]:
                raise Refused(f"responses: row {place} of update {number} is in another's group")


def _rewards(work: Work) -> None:
    """From the texts."""
    score = load_reward(work.folder)
    tokenizer = AutoTokenizer.from_pretrained(work.folder / "model")
    problems = read_rows(work.folder / "rows.jsonl")
    answers = {row["prompt"]: row["answer"] for row in problems}

    for number, rows in enumerate(work.updates):
        for row in rows:
            prompt = tokenizer.decode(row["prompt_ids"])
            response = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
            expected = score(response, answers[prompt])
            if abs(row["reward"] - expected) > 1e-6:
                raise Refused(
                    f"rewards: update {number} has {row['reward']} for {response!r}, which is "
                    f"worth {expected}"
                )


def _first_step(work: Work, found: Replay) -> None:
    """Loss and gradient of the first update, before rounding can add up."""
    for name, had, expected in (
        ("loss", work.losses[0], found.losses[0]),
        ("gradient norm", work.norms[0], found.norms[0]),
    ):
        allowed = FIRST_STEP * abs(expected) + 1e-4
        if not abs(had - expected) <= allowed:
            raise Refused(
                f"first step: its {name} is {had:.6f}, the recorded rows give {expected:.6f}"
            )


def _drawn_by_the_law(found: Replay) -> None:
    """By stretches of updates. A stretch ends when a deviation is more than its largest token:
    where the policy is nearly certain, a rare token is many deviations of its own update. The last
    updates may be no stretch, and go unjudged."""
    start = 0
    difference = 0.0
    variance = 0.0
    largest = 0.0
    for number, drawn in enumerate(found.drawn):
        difference += drawn.difference
        variance += drawn.variance
        largest = max(largest, drawn.largest)
        deviation = math.sqrt(variance)
        if deviation < largest:
            continue

        if abs(difference) > DRAWN * deviation:
            raise Refused(
                f"sampling: the tokens of updates {start} to {number} are "
                f"{difference / deviation:.1f} standard deviations from the policy's law at "
                "temperature 1"
            )
        start = number + 1
        difference = 0.0
        variance = 0.0
        largest = 0.0


def _weights(work: Work, found: Replay, precision: str) -> float:
    """The median distance of saved weights."""
    for number, distance in zip(work.saved, found.distances, strict=True):
        if not distance <= FURTHEST[precision]:
            raise Refused(
                f"weights: those of update {number} are {distance:.2f} of the way from those that "
                f"the recorded rows give; {FURTHEST[precision]} is allowed"
            )

    median = statistics.median(found.distances)
    if median > UPDATED[precision]:
        raise Refused(
            f"weights: {median:.2f} of the way from those that the recorded rows give, in the "
            f"median; {UPDATED[precision]} is allowed"
        )
    return median


def _num_tokens(work: Work) -> float:
    """Trained and read tokens of all updates."""
    total = 0
    for rows in work.updates:
        for row in rows:
            total += sum(len(ids) for name, ids in row.items() if name.endswith("_ids"))

    return float(total)
