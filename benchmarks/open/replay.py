"""The neutral trainer: plain transformers in float32, which repeats all updates of a system from
the tokens that it recorded, and scores weights on the validation rows."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tasks import PAD, Task, read_rows
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

Row = dict[str, Any]
"""A line's entry in updates.jsonl, see README.md."""
SIDES = {"answer": "response_ids", "chosen": "chosen_ids", "rejected": "rejected_ids"}
"""Columns with a response, and the names of their tokens."""


@dataclass(frozen=True)
class Drawn:
    """The log-probs of an update's drawn tokens beside the law of the policy: sums over the tokens.
    Of tokens drawn at temperature 1 from all of the vocabulary, the log-prob has minus the entropy
    as its mean."""

    difference: float
    """From this mean."""
    variance: float
    """That the law gives."""
    largest: float
    """The largest difference of one token, by its size."""


@dataclass
class Replay:
    """What the recorded tokens come to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    """By update."""
    distances: list[float] = field(default_factory=list)
    """Of each saved model's weights from those of the replay, over the way that these went since
    the weights before."""


def load_reward(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("reward", folder / "reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def replay(
    task: Task, folder: Path, updates: Sequence[Sequence[Row]], saved: dict[int, Path]
) -> Replay:
    """All updates, one after another, from the model that every system began with.

    Where a model was saved, its weights are compared and taken: a difference of rounding grows in a
    hundred updates to another model. Raises OSError and ValueError for a saved model that cannot be
    read or has another form."""
    model = load_model(folder / "model")
    reference = load_model(folder / "model") if task.kind == "dpo" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, eps=1e-8, weight_decay=0.0)
    found = Replay()
    start = _weights(model)

    for number, rows in enumerate(updates, 1):
        loss = _loss(task, model, reference, rows, found)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.losses.append(float(loss.detach()))
        found.norms.append(float(norm))

        if number in saved:
            theirs = _weights(load_model(saved[number]))
            ours = _weights(model)
            found.distances.append(_distance(theirs, ours) / _distance(ours, start))
            _take(model, theirs)
            start = theirs

    return found


def _weights(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    if one.keys() != other.keys():
        raise ValueError("the saved model has other parameters")
    apart = [(one[name].double() - other[name].double()).norm() for name in one]
    return float(torch.stack(apart).norm())


@torch.no_grad()
def _take(model: Any, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def _loss(task: Task, model: Any, reference: Any, rows: Sequence[Row], found: Replay) -> Tensor:
    if task.kind == "dpo":
        return _preference_loss(task, model, reference, rows)

    logits, log_probs, mask = _forward(model, rows, "response_ids")
    if task.kind == "sft":
        return -(log_probs * mask).sum() / mask.sum()

    found.drawn.append(_drawn(logits, log_probs, mask))
    rewards = torch.tensor([row["reward"] for row in rows]).view(-1, task.samples)
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
    ratio = torch.exp(log_probs - log_probs.detach())
    return -(advantages * ratio * mask).sum() / mask.sum()


def _preference_loss(task: Task, model: Any, reference: Any, rows: Sequence[Row]) -> Tensor:
    margins = []
    for side in ("chosen_ids", "rejected_ids"):
        _, log_probs, mask = _forward(model, rows, side)
        with torch.no_grad():
            _, of_reference, _ = _forward(reference, rows, side)
        margins.append(((log_probs - of_reference) * mask).sum(1))

    return -logsigmoid(task.beta * (margins[0] - margins[1])).mean()


def _forward(model: Any, rows: Sequence[Row], side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, log-probs and mask of the responses' tokens, `(rows, tokens)`."""
    texts = [row["prompt_ids"] + row[side] for row in rows]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
    attended = torch.zeros_like(ids)
    mask = torch.zeros_like(ids)
    for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
        attended[place, : len(text)] = 1
        mask[place, len(row["prompt_ids"]) : len(text)] = 1

    logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1].float()
    mask = mask[:, 1:].bool()
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return logits, torch.where(mask, log_probs, 0.0), mask


@torch.no_grad()
def _drawn(logits: Tensor, log_probs: Tensor, mask: Tensor) -> Drawn:
    logs = logits[mask].double().log_softmax(-1)
    probs = logs.exp()
    mean = (probs * logs).sum(-1)
    variance = (probs * logs**2).sum(-1) - mean**2
    difference = log_probs[mask].double() - mean
    return Drawn(
        difference=float(difference.sum()),
        variance=float(variance.sum()),
        largest=float(difference.abs().max()),
    )


@torch.no_grad()
def accuracy(task: Task, folder: Path, weights: Path) -> float:
    """The share of validation rows whose greedy response is the answer; for pairs the share whose
    chosen response has the higher log-prob."""
    model = load_model(weights)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = read_rows(folder / "validation.jsonl")

    if task.kind == "dpo":
        encoded = [encode(tokenizer, row) for row in rows]
        sums = []
        for side in ("chosen_ids", "rejected_ids"):
            _, log_probs, _ = _forward(model, encoded, side)
            sums.append(log_probs.sum(1))
        return float((sums[0] > sums[1]).float().mean())

    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=task.longest)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)


def encode(tokenizer: Any, row: dict[str, str]) -> Row:
    """The tokens of a row: its prompt, and the responses that the file gives."""
    found: Row = {"prompt_ids": tokenizer(row["prompt"])["input_ids"]}
    for column, name in SIDES.items():
        if column in row:
            found[name] = [*tokenizer(row[column])["input_ids"], tokenizer.eos_token_id]

    return found
