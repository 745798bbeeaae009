"""Whether a system did the work that it reports. Each proof names what it found."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from replay import Replay, Row, accuracy, encode, load_model, load_reward, replay
from tasks import EOS, Task, read_rows, read_task
from transformers import AutoTokenizer

FIRST_STEP = 0.01
"""Relative difference of the first loss and gradient norm."""
DRAWN = 5.0
"""Standard deviations of a single update."""
UPDATED = {"float32": 0.02, "bfloat16": 0.5}
"""Largest distance of the saved weights from those of the replay, over the way that these went."""


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
    weights: Path


def read_work(folder: Path, out: Path) -> Work:
    """Raises Refused for records that cannot be read."""
    try:
        lines = [json.loads(line) for line in (out / "updates.jsonl").read_text().splitlines()]
        return Work(
            task=read_task(folder),
            folder=folder,
            updates=[line["rows"] for line in lines],
            losses=[float(line["loss"]) for line in lines],
            norms=[float(line["grad_norm"]) for line in lines],
            weights=out / "weights",
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"records: updates.jsonl cannot be read: {error!r}") from error


def prove(work: Work, precision: str) -> dict[str, float]:
    """Figures of a result that was proven. Raises Refused."""
    _rows_in_order(work)
    if work.task.kind == "grpo":
        _responses(work)
        _rewards(work)

    found = replay(work.task, work.folder, work.updates)
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
    worst = max(found.drawn, key=abs)
    if abs(worst) > DRAWN:
        number = found.drawn.index(worst)
        raise Refused(
            f"sampling: the tokens of update {number} are {worst:.1f} standard deviations from the "
            "policy's law at temperature 1"
        )


@torch.no_grad()
def _weights(work: Work, found: Replay, precision: str) -> float:
    """How far the saved weights are from those that the recorded rows give, over the way from the
    start."""
    saved = dict(load_model(work.weights).named_parameters())
    start = dict(load_model(work.folder / "model").named_parameters())
    if saved.keys() != found.weights.keys():
        raise Refused("weights: the saved model has other parameters")

    off = _norm([saved[name] - found.weights[name] for name in saved])
    way = _norm([found.weights[name] - start[name] for name in saved])
    if not off <= UPDATED[precision] * way:
        raise Refused(
            f"weights: the saved ones are {off / way:.2f} of the way from those that the recorded "
            f"rows give; {UPDATED[precision]} is allowed"
        )
    return off / way


def _norm(tensors: Sequence[Any]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def _num_tokens(work: Work) -> float:
    """Trained and read tokens of all updates."""
    total = 0
    for rows in work.updates:
        for row in rows:
            total += sum(len(ids) for name, ids in row.items() if name.endswith("_ids"))

    return float(total)
